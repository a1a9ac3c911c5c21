"""Rotating queries and keys on, from where the model rotated them to where a rule wants them; keys kept rotated."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rotation:
    """A family's way of rotating.

    Attributes:
        neighbours: Pairs are features ``(2i, 2i + 1)`` (Cohere, GLM), not ``(i, i + rotary_dim / 2)``.
    """

    neighbours: bool = False

    def tables(self, angles: torch.Tensor, attention_factor: torch.Tensor) -> Tables:
        """Return cos and sin, each float32 ``(rows, 1, length, rotary_dim)``.

        Not rounded to bfloat16, as the model's own are: states that are rotated a second time should not lose twice.

        Args:
            angles: float32 ``(rows, length, rotary_dim // 2)``, radians.
            attention_factor: float32 ``(rows,)``, multiplies both.
        """
        angles = angles.repeat_interleave(2, dim=-1) if self.neighbours else torch.cat((angles, angles), dim=-1)
        factor = attention_factor[:, None, None, None]
        return angles[:, None].cos() * factor, angles[:, None].sin() * factor

    def rotate(self, states: torch.Tensor, tables: Tables) -> torch.Tensor:
        """Rotate the first ``rotary_dim`` features of queries or keys ``(batch, heads, length, head_dim)``."""
        cos, sin = tables
        width = cos.shape[-1]
        rotating = states[..., :width]
        if self.neighbours:
            swapped = torch.stack((-rotating[..., 1::2], rotating[..., ::2]), dim=-1).flatten(-2)
        else:
            swapped = torch.cat((-rotating[..., width // 2 :], rotating[..., : width // 2]), dim=-1)
        rotated = ((rotating * cos) + (swapped * sin)).to(states.dtype)
        return rotated if width == states.shape[-1] else torch.cat((rotated, states[..., width:]), dim=-1)


# Those of Transformers' families; the first is Llama's.
ROTATIONS = (Rotation(), Rotation(neighbours=True))


def angles_at(positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return float32 ``(rows, length, rotary_dim // 2)``: positions ``(rows, length)`` times radians per token.

    Transformers' own order of operations. The difference of two of these rotates states from the one to the other, the
    model's own rounding of the first angle included: at position 16k that is up to 5e-4 radians.

    Args:
        positions: ``(rows, length)``, which may be fractions.
        inv_freq: float32 ``(rows or 1, rotary_dim // 2)``.
    """
    return positions[:, :, None].float() * inv_freq[:, None, :]


@torch.no_grad()
def find_rotation(
    apply: Callable[..., Any], cos: torch.Tensor, sin: torch.Tensor, inv_freq: torch.Tensor, factor: float
) -> Rotation | None:
    """Return the way of rotating that does what a family's own code does; None if none does.

    Args:
        apply: The family's ``apply_rotary_pos_emb``, of queries and keys or of one of them.
        cos: What its rotary module hands out in float32 for the positions from 0.
        sin: The same.
        inv_freq: float32 ``(rotary_dim // 2,)``, what the module holds.
        factor: The attention factor it holds.
    """
    length, num_pairs = cos.shape[-2], len(inv_freq)
    states = torch.linspace(-2, 3, 2 * length * num_pairs).view(1, 1, length, -1)
    both = (states, states) if "k" in inspect.signature(apply).parameters else (states,)
    rotated = apply(*both, cos, sin)
    rotated = rotated if isinstance(rotated, torch.Tensor) else rotated[1]
    for rotation in ROTATIONS:
        angles = angles_at(torch.arange(length)[None], inv_freq[None])
        tables = rotation.tables(angles, torch.tensor([factor]))
        if torch.allclose(rotation.rotate(states, tables), rotated, rtol=1e-4, atol=1e-4):
            return rotation
    return None


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
            stop: How many slots, from the first.
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
