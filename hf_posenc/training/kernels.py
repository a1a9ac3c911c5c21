"""FlashAttention, and what Liger binds, while a model is trained on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from hf_posenc.families.rotary_model import RotaryModel

logger = logging.getLogger(__name__)

FLASH = "flash_attention_2"


@contextmanager
def training_kernels(rotary: RotaryModel, *, flash: bool) -> Iterator[None]:
    """While open, attention is FlashAttention if ``flash``; afterwards it, and what Liger bound, are taken out.

    FlashAttention needs no mask to keep packed documents apart: with sdpa that is block x block numbers in each layer.
    """
    base = rotary.model
    before = base.config._attn_implementation
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
