"""RoPE as a replaceable encoding: pairs of halves or of neighbours, computed with real or with complex numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Encoding, plain_frequencies
from hf_posenc.methods.encodings.modules import RotatesPairs
from hf_posenc.methods.explained import ModelShape, PositionMap
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.settings import flag, share, word
from hf_posenc.spec import RopeSpec

# Scores of equal vectors: the values of the first and the last colour of their maps.
EQUAL_VECTORS = (-0.2, 1.0)


def rotate_real(states: torch.Tensor, angles: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate each pair of features by its angle, in real numbers.

    Args:
        states: ``(..., length, dim)``.
        angles: Radians, ``(..., length, dim // 2)``.
        interleaved: Pairs are features ``(2i, 2i + 1)``, as in the paper, Meta's Llama and GPT-J; else
            ``(i, i + dim / 2)``, as in GPT-NeoX and Transformers' Llama.

    Reference: Su et al. 2021, arXiv:2104.09864, section 3.4.2, equation 34.
    """
    first, second = split_pairs(states, interleaved=interleaved)
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    return join_pairs(first * cos - second * sin, second * cos + first * sin, interleaved=interleaved)


def rotate_complex(states: torch.Tensor, angles: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate each pair of features by its angle, as a product of complex numbers; arguments as ``rotate_real``'s.

    Reference: Su et al. 2021, arXiv:2104.09864, section 3.2.1, equation 12; Meta's Llama code.
    """
    first, second = split_pairs(states, interleaved=interleaved)
    rotated = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).to(_complex_of(states.dtype))
    return join_pairs(rotated.real, rotated.imag, interleaved=interleaved)


def split_pairs(states: torch.Tensor, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second feature of each pair, ``(..., dim // 2)`` each."""
    if interleaved:
        return states[..., ::2], states[..., 1::2]
    first, second = states.chunk(2, dim=-1)
    return first, second


def join_pairs(first: torch.Tensor, second: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Undo ``split_pairs``."""
    return torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)


def _complex_of(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def rope_decay_bound(distance: torch.Tensor, num_pairs: int, base: float = 10000.0) -> torch.Tensor:
    """Return the mean over i of ``|S_i|``, float64: what the score at a distance is bounded by, up to a constant.

    ``S_i`` is the sum of ``exp(1j * distance * frequency)`` over the first i pairs.

    Args:
        distance: In tokens, of any shape.
        num_pairs: Half the rotated width of a head.
        base: ``rope_theta``.

    Reference: Su et al. 2021, arXiv:2104.09864, section 3.4.3, equations 36 and 37.
    """
    angles = pair_angles(distance, num_pairs, base)
    sums = torch.polar(torch.ones_like(angles), angles).cumsum(dim=-1)
    return sums.abs().mean(dim=-1)


def rope_score(distance: torch.Tensor, num_pairs: int, base: float = 10000.0) -> torch.Tensor:
    """Return the score of a query and a key that are equal, all pairs of one length, as a share of that at distance 0.

    It is the mean cosine of the pairs' angles. Sinusoidal rows of ``2 * num_pairs`` features have the same dot product.
    Arguments as ``rope_decay_bound``'s.
    """
    return pair_angles(distance, num_pairs, base).cos().mean(-1)


def pair_angles(distance: torch.Tensor, num_pairs: int, base: float) -> torch.Tensor:
    """Return by how much each pair of two vectors at a distance is rotated apart, float64 ``(..., num_pairs)``."""
    frequencies = base ** (-torch.arange(num_pairs, dtype=torch.float64) / num_pairs)
    return distance.double()[..., None] * frequencies


@dataclass(frozen=True)
class RopeOptions(Encoding):
    """The options of RoPE, as it is (``Rope``) or with a decay (``Xpos``)."""

    rope_theta: float | None = option(None, positive, "the base; default: the model's own")
    interleaved: bool = option(False, flag, "pairs are neighbouring features, not halves apart")
    computation: str = option("real", word("real", "complex"), "real or complex numbers")
    partial_rotary_factor: float | None = option(
        None, share, "the share of a head that is rotated, up to 1; default: the model's own"
    )

    def rotary_spec(self, spec: RopeSpec, head_dim: int) -> RopeSpec:
        """Return the pairs that are rotated, where ``spec`` is the model's own.

        Raises:
            ValueError: ``partial_rotary_factor`` rotates no even number of features of a head.
        """
        partial_factor = self.partial_rotary_factor
        width = spec.rotary_dim if partial_factor is None else int(head_dim * partial_factor)
        if width % 2 or not 0 < width <= head_dim:
            raise InvalidRequestError(
                f"{width} of {head_dim} features of a head would be rotated: it must be an even number of "
                "them, at least 2. Give partial_rotary_factor."
            )
        unrotated = spec.unrotated_pairs if partial_factor is None else 0
        return RopeSpec(width, self.rope_theta or spec.rope_theta, spec.original_max_position_embeddings, unrotated)


class RopeRotation(RotatesPairs):
    """Pairs of features rotated by position times frequency, in either layout.

    Reference: Su et al. 2021, arXiv:2104.09864, section 3.
    """

    def __init__(self, model: ModelShape, options: RopeOptions) -> None:
        """Make one of a rule's options; what it leaves open is the model's own."""
        super().__init__()
        rotary = options.rotary_spec(model.rope, model.head_dim)
        self.width = rotary.rotary_dim
        self.interleaved = options.interleaved
        self.rotation = rotate_complex if options.computation == "complex" else rotate_real
        self.inv_freq = plain_frequencies(rotary)

    def rotate(
        self, states: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return states rotated by positions ``(rows, length)``; pair by pair times ``factors``, if given."""
        angles = positions.to(states.device, torch.float64)[:, None, :, None] * self.inv_freq.to(states.device)
        rotated = self.rotation(states[..., : self.width].float(), angles.float(), interleaved=self.interleaved)
        if factors is not None:
            each = factors.repeat_interleave(2, -1) if self.interleaved else torch.cat((factors, factors), dim=-1)
            rotated = rotated * each.to(rotated.dtype)
        rotated = rotated.to(states.dtype)
        return rotated if self.width == states.shape[-1] else torch.cat((rotated, states[..., self.width :]), dim=-1)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rotate(query, queries), self.rotate(key, keys)


@register_method
@dataclass(frozen=True)
class Rope(RopeOptions):
    """Rotate pairs of features by position times frequency."""

    name: ClassVar[str] = "rope"
    paper: ClassVar[str] = "Su et al. 2021, arXiv:2104.09864, section 3"
    summary: ClassVar[str] = "Rotates pairs of features by position, in either layout, in real or complex numbers."

    def module(self, model: ModelShape) -> nn.Module:
        return RopeRotation(model, self)

    def position_map(self, model: ModelShape) -> PositionMap:
        spec = self.rotary_spec(model.rope, model.head_dim)
        return PositionMap(
            "RoPE",
            [("", partial(rope_score, num_pairs=spec.rotated_pairs, base=spec.rope_theta))],
            "score, 1 at distance 0",
            EQUAL_VECTORS,
            f"The score of a query and a key with the same features, {spec.rotated_pairs} pairs at base "
            f"{spec.rope_theta:g}. It falls with the distance and depends on nothing else: lines along the diagonal "
            "have one colour.",
        )
