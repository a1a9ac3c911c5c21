"""Faster kernels while a model is trained on a GPU: FlashAttention and Liger's, where they are installed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.import_utils import is_flash_attn_2_available, is_liger_kernel_available

from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import needs_hf_posenc
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.launch import Launch

logger = logging.getLogger(__name__)

FLASH = "flash_attention_2"
# The loss stays the one in chunks, and positions stay those that verify_model has seen. The names are those of
# liger_kernel.transformers.monkey_patch; it leaves out what a family has not.
LIGER = {
    "rope": False,
    "cross_entropy": False,
    "fused_linear_cross_entropy": False,
    "rms_norm": True,
    "swiglu": True,
    "geglu": True,
}


def liger_arguments(rotary: RotaryModel) -> dict[str, Any]:
    """Return the TrainingArguments with which Trainer puts Liger's kernels in; empty off a GPU or without it."""
    if not _on_gpu(rotary) or not is_liger_kernel_available():
        return {}
    logger.info("norms and MLPs by liger-kernel, where it knows the family")
    return {"use_liger_kernel": True, "liger_kernel_config": dict(LIGER)}


def flash_reason(rotary: RotaryModel, config: FinetuneConfig, *, bf16: bool) -> str | None:
    """Return why FlashAttention does not replace sdpa; None if it does.

    Transformers tells packed documents apart by their positions there, and only in a batch of one.
    """
    base = rotary.model
    reasons = {
        "the model is not on a GPU": not _on_gpu(rotary),
        "flash-attn is not installed": not is_flash_attn_2_available(),
        "it needs half precision (bf16)": not bf16,
        "per_device_train_batch_size is not 1": config.per_device_train_batch_size != 1,
        "positions are not one after the other": config.position_schedule != "full",
        "the attention was chosen by the caller": base.config._attn_implementation != "sdpa",
        "the rule changes the attention itself": needs_hf_posenc(base) or config.shifted_sparse_attention,
        "context parallelism needs sdpa": Launch.from_environment().cp_size > 1,
        "the family does not support it": not getattr(base, "_supports_flash_attn", False),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@contextmanager
def training_kernels(rotary: RotaryModel, config: FinetuneConfig, *, bf16: bool) -> Iterator[None]:
    """While open, attention is FlashAttention where it can be; afterwards it, and what Liger bound, are taken out.

    FlashAttention needs no mask to keep packed documents apart: with sdpa that is block x block numbers in each layer.
    """
    base = rotary.model
    before = base.config._attn_implementation
    flash = flash_reason(rotary, config, bf16=bf16) is None
    bound = {module: set(vars(module)) for module in rotary.wrapped.modules()}
    if flash:
        logger.info("attention by %s while training", FLASH)
        base.set_attn_implementation(FLASH)
    try:
        yield
    finally:
        if flash:
            base.set_attn_implementation(before)
        for module, kept in bound.items():
            for name in {"forward", "extra_repr", "_get_name"} & vars(module).keys() - kept:
                delattr(module, name)  # bound by Liger; the method of the class is found again


def _on_gpu(rotary: RotaryModel) -> bool:
    return rotary.device.type == "cuda"
