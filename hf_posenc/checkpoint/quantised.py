"""Quantised weights: loading in 4 bits, and those that cannot be saved or would be saved as other ones.

The last are bitsandbytes' 4-bit weights on a CPU that has AVX512-BF16. The first forward outside training lays them
out anew and rounds their scales to bfloat16. ``state_dict()`` undoes that wrongly, in the live model too, and nothing
says so (bitsandbytes 0.50.2).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from hf_posenc.checkpoint.pretrained import is_gguf
from hf_posenc.errors import InvalidRequestError, MissingPackageError

_MAY_LAY_OUT = "support_avx512bf16_for_cpu"


def check_4bit(name_or_path: str | Path, lora: bool) -> None:
    """Refuse what 4-bit weights cannot be, before texts are read and weights are loaded.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: No adapters are to be trained, or the model is a ``.gguf`` file.
    """
    if find_spec("bitsandbytes") is None:
        raise MissingPackageError("--load-in-4bit needs a package that is not installed: pip install bitsandbytes")
    if not lora:
        raise InvalidRequestError(
            "--load-in-4bit: weights in 4 bits cannot be trained. Train adapters on them: add --lora."
        )
    if is_gguf(name_or_path):
        raise InvalidRequestError(
            "--load-in-4bit: a .gguf file is dequantised when it is loaded. Give a checkpoint's folder."
        )


def in_4bit(dtype: torch.dtype | str) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that quantise as QLoRA does (arXiv:2305.14314, section 3)."""
    settings = BitsAndBytesConfig(  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings}


def refuse_unsaveable(model: PreTrainedModel, *, whole: bool) -> None:
    """Refuse a model that cannot be saved as it is, before anything is written.

    Args:
        model: The model, not wrapped.
        whole: Its weights are to be written, not an adapter's alone.

    Raises:
        ValueError: Transformers cannot write weights quantised so, or some are laid out for this CPU.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if whole and quantizer is not None and not quantizer.is_serializable():
        method = quantizer.quantization_config.quant_method
        method = getattr(method, "value", method)  # an enum, or the name
        raise InvalidRequestError(
            f"the model cannot be saved: Transformers does not write weights quantised by {method!r}. Extend and save "
            "the model without quantisation, and quantise what that gives."
        )
    refuse_laid_out(model, "the model cannot be saved")


def refuse_laid_out(model: nn.Module, what: str) -> None:
    """Refuse a model whose 4-bit weights are laid out for this CPU, before ``state_dict()`` can scramble them.

    Args:
        model: Any model.
        what: What cannot be done with it, for the message.

    Raises:
        ValueError: Some weight is laid out so.
    """
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise InvalidRequestError(
                f"{what}: when the model first ran, bitsandbytes laid its 4-bit weights ({name}) out for this CPU, and "
                "would save other ones now. Load the model again and do this before it runs, or call "
                "hf_posenc.checkpoint.quantised.keep_layout(model) before it runs, or load it on a GPU."
            )


def keep_layout(model: nn.Module) -> None:
    """Leave 4-bit weights as they are in every forward to come: slower on such a CPU, and safe to save."""
    for module in model.modules():
        if hasattr(module, _MAY_LAY_OUT):
            setattr(module, _MAY_LAY_OUT, False)
