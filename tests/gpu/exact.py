"""The reference of the GPU tests: the same model, with the same rounded weights, in float64 on the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from attention_models import sharp_model
from every_method import patch
from tiny_models import logits

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)
# Mean difference of logits as a share of their standard deviation. The model is of two layers, whose own rounding is
# about 4e-7, 6e-3 and 8e-4 on the CPU: some tens of roundings of each dtype (2 ** -24, 2 ** -9, 2 ** -12).
ALLOWED = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}


def model_of(key: str, dtype: torch.dtype, device: torch.device, **overrides: Any) -> PreTrainedModel:
    """A patched model on a device; patched there, so that patching and its verification run there too."""
    return patched(sharp_model("Llama", dtype, **overrides).to(device), key)


def exact_model(key: str, dtype: torch.dtype, **overrides: Any) -> PreTrainedModel:
    """The same model in float64 on the CPU; its frequencies are float32 as in every dtype."""
    return patched(in_float64(sharp_model("Llama", dtype, **overrides)), key)


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.double()
    for name, value in frequencies.items():
        owner, _, buffer = name.rpartition(".")
        model.get_submodule(owner)._buffers[buffer] = value.float()
    return model


def patched(model: PreTrainedModel, key: str) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dynamic with scope='sequence' picks one scale per forward", UserWarning)
        return patch(model, key)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the mean difference as a share of the exact values' standard deviation."""
    exact = exact.double()
    return float((found.double().cpu() - exact).abs().mean() / exact.std())


def logits_error(model: PreTrainedModel, exact: PreTrainedModel, ids: torch.Tensor) -> float:
    return error(logits(model, ids.to(model.device)), logits(exact, ids))
