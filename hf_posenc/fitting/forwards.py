"""What modules compute, replaced for a while; hooks of PyTorch run as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """While open, modules compute by other functions; then as before, by a function of accelerate's too."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own
