"""The attention implementation that was in use before, which hf_posenc's calls: its name, its function, its masks.

No mask is [length, length]: the state of each key slot is noted, and each call of the inner implementation gets a mask
of its own queries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Output = tuple[torch.Tensor, torch.Tensor | None]
# States of a key slot.
REAL, PADDING, UNWRITTEN = 1, 0, -1
PREFIX = "hf_posenc_"
SHIFTED = PREFIX + "shifted_"


def inner_name(implementation: str) -> str:
    """Return the attention implementation that is called in the end."""
    return implementation.removeprefix(SHIFTED).removeprefix(PREFIX)


def inner_attention(name: str, module: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return an attention function; ``eager`` is the family's own."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]  # a module's attribute
    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]  # Transformers leaves it untyped


class AttentionCall(NamedTuple):
    """A layer's call of an attention function.

    Attributes:
        module: The attention layer.
        query: As the model rotated them, ``(batch, heads, num_queries, head_dim)``.
        key: The same, ``(batch, kv_heads, num_slots, head_dim)``.
        value: ``(batch, kv_heads, num_slots, head_dim)``.
        mask: Of Transformers' making.
        kwargs: What else Transformers gave.
        kind: What the layer's queries and keys need (``hf_posenc.attention.interface``).
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    kwargs: dict[str, Any]
    kind: str = ""

    def by(self, name: str) -> Output:
        """Return the output ``(batch, num_queries, heads, head_dim)`` of an attention function, and its weights."""
        return inner_attention(name, self.module)(
            self.module, self.query, self.key, self.value, self.mask, **self.kwargs
        )

    def own_values(self) -> Output:
        """Return each token's own value, as if it attended to itself alone."""
        groups = self.query.shape[1] // self.value.shape[1]
        return self.value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None


def slot_states(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    cache_position: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """Return the mask that hf_posenc's attention reads; the arguments are Transformers' for a mask function.

    None for plain causal attention to every key; int8 ``(batch or 1, kv_length)`` with ``REAL``, ``PADDING`` or
    ``UNWRITTEN`` (a static cache's free slots) where that is not so; and for any other pattern (sliding windows, packed
    documents) the inner implementation's own mask.
    """
    if cache_position is not None:  # Transformers 5.0
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    if mask_function is not causal_mask_function or kv_offset or kwargs.get("use_vmap"):
        offset = {"cache_position": cache_position} if cache_position is not None else {"q_offset": q_offset}
        length = {} if cache_position is not None else {"q_length": q_length, "device": device}
        return ALL_MASK_ATTENTION_FUNCTIONS[inner_name(config._attn_implementation)](
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            config=config,
            # A mask that lets a query see later keys must arrive as one: None is read as causal attention.
            **{**length, **offset, **kwargs, "allow_is_bidirectional_skip": False},
        )
    slots = torch.arange(kv_length, device=device)
    states = (slots < q_offset + q_length).to(torch.int8) * 2 - 1  # type: ignore[operator]  # REAL or UNWRITTEN
    states = states[None]
    if attention_mask is not None:
        given = torch.nn.functional.pad(attention_mask.bool(), (0, kv_length - attention_mask.shape[-1]), value=True)
        states = torch.where((states == REAL) & ~given, PADDING, states).to(torch.int8)
    if not torch.compiler.is_compiling() and bool((states == REAL).all()):
        return None
    return states


def piece_mask(inner: str, num_queries: int, num_keys: int, real: torch.Tensor | None, like: torch.Tensor) -> Any:
    """Return the inner implementation's mask for queries that are the last of their keys (lower-right causal).

    Args:
        inner: Its name.
        num_queries: Queries of the piece.
        num_keys: Keys of the piece; the last query is at the last key.
        real: bool ``(batch, num_keys)``, False for padding; None if there is none.
        like: The queries, for device and dtype.
    """
    if inner == "flex_attention" or "flash" in inner:
        function = ALL_MASK_ATTENTION_FUNCTIONS[inner]
        return function(
            batch_size=like.shape[0],
            q_length=num_queries,
            kv_length=num_keys,
            q_offset=num_keys - num_queries,
            attention_mask=real,
            device=like.device,
        )
    if inner != "eager" and real is None and num_queries in (1, num_keys):
        return None
    slots = torch.arange(num_keys, device=like.device)
    allowed = (slots <= slots[num_keys - num_queries :, None])[None, None]
    if real is not None:
        allowed = allowed & real[:, None, None, :]
    if inner != "eager":
        return allowed
    zero = torch.zeros((), dtype=like.dtype, device=allowed.device)  # eager attention adds its mask to the logits
    return torch.where(allowed, zero, torch.finfo(like.dtype).min)
