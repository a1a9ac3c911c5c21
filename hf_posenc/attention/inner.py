"""The attention implementation that was in use, which hf_posenc's calls."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def inner_attention(name: str, module: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return an attention function; ``eager`` is the family's own."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]  # a module's attribute
    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]  # Transformers leaves it untyped
