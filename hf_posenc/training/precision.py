"""Weights in float32 while they are trained, whatever the checkpoint's precision, and back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

HALF = (torch.bfloat16, torch.float16)


def is_half(model: nn.Module) -> bool:
    """Return whether any weight is in half precision."""
    return any(p.dtype in HALF for p in model.parameters())


@contextmanager
def float32_weights(model: nn.Module, *, frozen: bool) -> Iterator[None]:
    """Hold weights in float32 while open; afterwards in the dtype each one came in.

    bfloat16 keeps 8 bits: an update below 0.4 % of a weight rounds away, and those of a fine-tune are smaller. Buffers
    are not touched (a rotary ``inv_freq`` must never be rounded).

    Args:
        model: Its parameters in half precision are converted, in place.
        frozen: Those that are not trained too, for training without autocast, which cannot mix dtypes; they come back
            bit for bit. Else the trained ones only.
    """
    came = [(p, p.dtype) for p in model.parameters() if (frozen or p.requires_grad) and p.dtype in HALF]
    for parameter, _ in came:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in came:
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None
