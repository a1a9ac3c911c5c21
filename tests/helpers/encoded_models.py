"""Small models with each positional encoding in the place of RoPE."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.testing
from transformers import (
    PreTrainedModel,
)

from attention_models import sharp_model
from hf_posenc import patch_model

ENCODINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sinusoidal": ("sinusoidal", {"embedding_scale": 0.05}),
    "sinusoidal-base": ("sinusoidal", {"embedding_scale": 0.05, "base": 500.0}),
    "learned": ("learned", {}),
    "relative_bias": ("relative_bias", {"max_distance": 6}),
    "t5_bias": ("t5_bias", {"num_buckets": 8, "max_distance": 20}),
    "alibi": ("alibi", {}),
    "rope": ("rope", {}),
    "rope-interleaved": ("rope", {"interleaved": True, "rope_theta": 500.0}),
    "rope-complex": ("rope", {"computation": "complex"}),
    "rope-partial": ("rope", {"partial_rotary_factor": 0.5}),
    "xpos": ("xpos", {"scale_base": 8}),
}


def encoded(key: str, family: str = "Llama", **overrides: Any) -> PreTrainedModel:
    """A sharp model with an encoding, whose parameters, if it has any, are as large as to matter."""
    name, options = ENCODINGS[key]
    model = patch_model(sharp_model(family, **overrides), name, **options)
    torch.manual_seed(3)
    for parameter in encoding_of(model).parameters():
        torch.nn.init.normal_(parameter, std=0.5 if key != "learned" else 0.05)
    return model


def encoding_of(model: PreTrainedModel) -> Any:
    return model.get_decoder().positional_encoding
