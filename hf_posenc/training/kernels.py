"""Faster kernels while a model is trained on a GPU: FlashAttention and Liger's, where they are installed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.utils.import_utils import is_flash_attn_2_available, is_liger_kernel_available

from hf_posenc.families.discovery import unwrap
from hf_posenc.patching.api import runs_in_attention
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


def liger_arguments(model: Any) -> dict[str, Any]:
    """Return what TrainingArguments is told so that Trainer puts Liger's kernels in; empty off a GPU or without it."""
    if not _on_gpu(model) or not is_liger_kernel_available():
        return {}
    logger.info("norms and MLPs by liger-kernel, where it knows the family")
    return {"use_liger_kernel": True, "liger_kernel_config": dict(LIGER)}


def flash_reason(model: Any, config: FinetuneConfig, *, bf16: bool) -> str | None:
    """Return why FlashAttention is not put in the place of sdpa; None if it is.

    Transformers tells packed documents apart by their positions there, and only in a batch of one.
    """
    base = unwrap(model)
    reasons = {
        "the model is not on a GPU": not _on_gpu(model),
        "flash-attn is not installed": not is_flash_attn_2_available(),
        "it wants half precision (bf16)": not bf16,
        "per_device_train_batch_size is not 1": config.per_device_train_batch_size != 1,
        "positions are not one after the other": config.position_schedule != "full",
        "the attention was chosen by the caller": base.config._attn_implementation != "sdpa",
        "the rule changes the attention itself": runs_in_attention(base) or config.shifted_sparse_attention,
        "context parallelism needs sdpa": Launch.from_environment().cp_size > 1,
        "the family does not support it": not getattr(base, "_supports_flash_attn", False),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@contextmanager
def training_kernels(model: Any, config: FinetuneConfig, *, bf16: bool) -> Iterator[None]:
    """While open, attention is FlashAttention where it can be; afterwards it, and what Liger bound, are taken out.

    FlashAttention needs no mask to keep packed documents apart: with sdpa that is block x block numbers in each layer.
    """
    base = unwrap(model)
    before = base.config._attn_implementation
    flash = flash_reason(model, config, bf16=bf16) is None
    bound = {module: set(vars(module)) for module in model.modules()}
    if flash:
        logger.info("attention by %s while training", FLASH)
        base.set_attn_implementation(FLASH)
    try:
        yield
    finally:
        if flash:
            base.set_attn_implementation(before)
        for module, names in bound.items():
            _unbind(module, names)


def _unbind(module: nn.Module, kept: set[str]) -> None:
    """Remove the methods that Liger bound to a module; the class' own show again."""
    for name in ("forward", "extra_repr", "_get_name"):
        if name in vars(module) and name not in kept:
            del vars(module)[name]


def _on_gpu(model: Any) -> bool:
    return unwrap(model).device.type == "cuda"
