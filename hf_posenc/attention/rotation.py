"""Turning queries and keys by tables of cos and sin, as the decoders of Transformers do it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rotation:
    """A family's way of turning; in float32 only ``neighbours`` makes a difference.

    Attributes:
        neighbours: Pairs are features ``(2i, 2i + 1)`` (Cohere, GLM), not ``(i, i + rotary_dim / 2)``.
        rounded: The tables are rounded to the dtype of the states first.
        in_float32: Tables of float32, so that the product is too, and is rounded once.
    """

    neighbours: bool = False
    rounded: bool = True
    in_float32: bool = False

    def tables(
        self, inv_freq: torch.Tensor, attention_factor: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
    ) -> Tables:
        """Return cos and sin of every position, each ``(rows, 1, length, rotary_dim)``.

        Angles are float32 whatever the model computes in: Transformers' own order of operations, so that plain
        frequencies give its bits.

        Args:
            inv_freq: float32 ``(rows, rotary_dim // 2)``, radians per token.
            attention_factor: float32 ``(rows,)``, multiplies both.
            positions: ``(rows, length)``.
            dtype: Of the states to turn.
        """
        angles = positions[:, :, None].float() * inv_freq[:, None, :]
        angles = angles.repeat_interleave(2, dim=-1) if self.neighbours else torch.cat((angles, angles), dim=-1)
        factor = attention_factor[:, None, None, None]
        cos, sin = angles[:, None].cos() * factor, angles[:, None].sin() * factor
        if self.rounded:
            cos, sin = cos.to(dtype), sin.to(dtype)
        return (cos.float(), sin.float()) if self.in_float32 else (cos, sin)

    def turn(self, states: torch.Tensor, tables: Tables) -> torch.Tensor:
        """Turn the first ``rotary_dim`` features of queries or keys ``(batch, heads, length, head_dim)``."""
        cos, sin = tables
        width = cos.shape[-1]
        turning = states[..., :width]
        if self.neighbours:
            swapped = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
        else:
            swapped = torch.cat((-turning[..., width // 2 :], turning[..., : width // 2]), dim=-1)
        turned = ((turning * cos) + (swapped * sin)).to(states.dtype)
        return turned if width == states.shape[-1] else torch.cat((turned, states[..., width:]), dim=-1)


# Those of Transformers' families; the first is Llama's.
ROTATIONS = tuple(
    Rotation(neighbours, rounded, in_float32)
    for neighbours in (False, True)
    for rounded, in_float32 in ((True, False), (True, True), (False, True))
)


@torch.no_grad()
def find_rotation(
    apply: Callable[..., Any], cos: torch.Tensor, sin: torch.Tensor, inv_freq: torch.Tensor, factor: float
) -> Rotation | None:
    """Return the way of turning that gives a family's own bits in bfloat16, which tells them apart; None if none does.

    Args:
        apply: The family's ``apply_rotary_pos_emb``, of queries and keys or of one of them.
        cos: What its rotary module hands out in bfloat16 for the positions from 0.
        sin: The same.
        inv_freq: float32 ``(rotary_dim // 2,)``, what the module holds.
        factor: The attention factor it holds.
    """
    length, num_pairs = cos.shape[-2], len(inv_freq)
    states = torch.linspace(-2, 3, 2 * length * num_pairs).view(1, 1, length, -1).bfloat16()
    both = (states, states) if "k" in inspect.signature(apply).parameters else (states,)
    turned = apply(*both, cos, sin)
    turned = turned if isinstance(turned, torch.Tensor) else turned[1]
    for rotation in ROTATIONS:
        tables = rotation.tables(inv_freq[None], torch.tensor([factor]), torch.arange(length)[None], states.dtype)
        if torch.equal(rotation.turn(states, tables), turned):
            return rotation
    return None
