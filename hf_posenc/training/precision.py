"""Weights in float32 while they are trained, whatever the checkpoint's precision, and back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hf_posenc.utils.dtypes import HALF


def is_half(model: nn.Module) -> bool:
    """Return whether any weight is in half precision."""
    return any(p.dtype in HALF for p in model.parameters())


@contextmanager
def float32_weights(model: nn.Module, *, frozen: bool) -> Iterator[dict[str, torch.dtype]]:
    """Hold weights in float32 while open; afterwards in the dtype each one came in.

    bfloat16 keeps 8 bits: an update below 0.4 % of a weight rounds away, and those of a fine-tune are smaller. Buffers
    are not touched (a rotary ``inv_freq`` must never be rounded).

    Args:
        model: Its parameters in half precision are converted, in place. They are known by name: an engine that shards
            puts others in their place, and must be free to let these go.
        frozen: Those that are not trained too, for training without autocast, which cannot mix dtypes; they come back
            bit for bit. Else the trained ones only.

    Yields:
        The dtype that each converted parameter came in, by name.
    """
    came = {name: p.dtype for name, p in model.named_parameters() if (frozen or p.requires_grad) and p.dtype in HALF}
    for name, parameter in model.named_parameters():
        if name in came:
            parameter.data = parameter.data.float()
    try:
        yield came
    finally:
        for name, parameter in model.named_parameters():
            if name in came:
                parameter.data = parameter.data.to(came[name])
                parameter.grad = None
