"""Keys kept rotated between the steps of a generation, so that each is rotated once per stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

# What keys were rotated by (the stage of each row, or a region's name), and the position of slot 0 of each row.
Signature = tuple[tuple[int, ...] | str, tuple[int, ...]]
Rotate = Callable[[torch.Tensor, int, int], torch.Tensor]  # of keys, for slots from, to


@dataclass
class _Rotated:
    source: torch.Tensor
    version: int
    signature: Signature
    buffer: torch.Tensor
    length: int


class RotatedKeys:
    """The keys rotated further beside each layer of a KV cache, which itself holds them as the model rotated them.

    An entry is good only while the layer holds the very tensor it was made from, unchanged: whatever reorders, crops,
    repeats or replaces it makes another one, and the keys are rotated anew.
    """

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[Any, dict[bool | str, _Rotated]] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> RotatedKeys:
        return RotatedKeys()

    def __reduce__(self) -> Any:
        return RotatedKeys, ()

    def check(self, cache: Cache) -> None:
        """Forget the entries whose layer changed since; called before a forward adds to the cache."""
        layer: Any  # of linear attention some have no keys, and no entry either
        for layer in cache.layers:
            entries = self._entries.get(layer, {}).values()
            if any(layer.keys is not entry.source or layer.keys._version != entry.version for entry in entries):
                del self._entries[layer]

    def nbytes(self, cache: Cache) -> int:
        """Return the bytes of the rotated keys beside a cache."""
        entries = (entry for layer in cache.layers for entry in self._entries.get(layer, {}).values())
        return sum(entry.buffer.nbytes for entry in entries)

    def at(self, layer: Any, keys: torch.Tensor, signature: Signature, stop: int, rotate: Rotate) -> torch.Tensor:
        """Return the first ``stop`` keys rotated further, rotating only those that are not yet.

        Args:
            layer: The layer of the cache that ``keys`` came from; None without a cache.
            keys: As the model rotated them, ``(batch, heads, num_keys, head_dim)``.
            signature: What the rotation depends on besides the slot.
            stop: Slots wanted.
            rotate: Rotates keys of a range of slots.
        """
        # Tensors of inference_mode have no version by which a change could be seen.
        if type(layer) is not DynamicLayer or layer.keys is not keys or keys.requires_grad or keys.is_inference():
            return rotate(keys[:, :, :stop], 0, stop)
        entries = self._entries.setdefault(layer, {})
        way = signature[0] if isinstance(signature[0], str) else True  # of a stage only the last is kept
        entry = entries.get(way)
        if entry is None or entry.signature != signature:
            entry = _Rotated(keys, keys._version, signature, rotate(keys[:, :, :stop], 0, stop), stop)
            entries[way] = entry
        elif entry.length < stop:
            entry.buffer = _with_room(entry.buffer, entry.length, stop)
            entry.buffer[:, :, entry.length : stop] = rotate(keys[:, :, entry.length : stop], entry.length, stop)
            entry.length = stop
        entry.source, entry.version = keys, keys._version
        return entry.buffer[:, :, :stop]


def _with_room(buffer: torch.Tensor, length: int, stop: int) -> torch.Tensor:
    if buffer.shape[2] >= stop:
        return buffer
    grown = buffer.new_empty(*buffer.shape[:2], stop + max(256, stop // 8), buffer.shape[3])
    grown[:, :, :length] = buffer[:, :, :length]
    return grown
