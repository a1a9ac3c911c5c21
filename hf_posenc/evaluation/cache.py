"""A KV cache for a text whose length is known: room for all of it, taken once."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_posenc.attention.masks import inner_name
from hf_posenc.families.discovery import unwrap


class RoomyLayer(DynamicLayer):
    """A cache layer that writes into room for ``num_tokens`` and gives views of what is filled.

    Transformers' own makes new, longer tensors at each chunk: old and new exist together, and what is freed has holes
    too small for the next, so that a long text needs much more than its keys and values.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
        self.num_tokens = num_tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``(batch, heads, new, head_dim)``; return all keys and values so far."""
        start = self.get_seq_length()
        if start == 0:
            super().update(key_states, value_states, *args, **kwargs)
            self.room = [self._make_room(states) for states in (key_states, value_states)]
        end = start + key_states.shape[-2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values

    def _make_room(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, dim = states.shape
        return states.new_empty(batch, heads, self.num_tokens, dim)


def make_cache(model: PreTrainedModel, num_tokens: int) -> DynamicCache:
    """Return an empty cache for ``num_tokens`` tokens fed in chunks.

    Layers with a window, recurrent ones, and those of a model whose method runs in attention, which remembers the
    rotated keys of Transformers' own layers, stay as Transformers makes them.
    """
    base = unwrap(model)
    cache = DynamicCache(config=base.config)
    implementation = str(base.config._attn_implementation)
    if inner_name(implementation) == implementation:
        cache.layers = [RoomyLayer(num_tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
