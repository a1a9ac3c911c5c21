"""Sines and cosines added to the embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Encoding
from hf_posenc.methods.encodings.modules import AddedToEmbeddings
from hf_posenc.methods.encodings.rope import EQUAL_VECTORS, rope_score
from hf_posenc.methods.explained import ModelShape, Numbers, PositionMap
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.settings import number
from hf_posenc.utils.units import number_name


def sinusoidal_table(positions: torch.Tensor, width: int, base: float = 10000.0) -> torch.Tensor:
    """Return sines in the even and cosines in the odd features, float64 ``(*positions.shape, width)``.

    Feature ``2i`` of position p is ``sin(p / base ** (2i / width))``, feature ``2i + 1`` the cosine of the same angle.

    Args:
        positions: Tokens before each, of any shape.
        width: Features, even.
        base: Base of the geometric series of wavelengths.

    Raises:
        ValueError: ``width`` is odd.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """
    if width % 2:
        raise InvalidRequestError(f"sinusoids come in pairs of features: the width must be even, got {width}.")
    angles = positions.double()[..., None] * _sinusoidal_frequencies(width, base).to(positions.device)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def sinusoidal_shift(distance: float, width: int, base: float = 10000.0) -> torch.Tensor:
    """Return the matrix T, float64 ``(width, width)``, that takes the table's row p to row ``p + distance``, for all p.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.5: "can be represented as a linear function".
    """
    shift = torch.zeros(width, width, dtype=torch.float64)
    angles = distance * _sinusoidal_frequencies(width, base)
    even = torch.arange(0, width, 2)
    shift[even, even] = shift[even + 1, even + 1] = angles.cos()
    shift[even, even + 1], shift[even + 1, even] = angles.sin(), -angles.sin()
    return shift


def _sinusoidal_frequencies(width: int, base: float) -> torch.Tensor:
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


class SinusoidalTable(AddedToEmbeddings):
    """Sines and cosines of wavelengths from 2 pi to 10,000 * 2 pi tokens.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    def __init__(self, width: int, scale: float, base: float = 10000.0) -> None:
        """Make one.

        Args:
            width: Features of the embeddings.
            scale: What multiplies the table. In the paper embeddings have variance 1, and those of a Llama 0.02 ** 2:
                unscaled, the table would drown them.
            base: Base of the geometric series of wavelengths.
        """
        super().__init__()
        sinusoidal_table(torch.zeros(1), width)  # raises on an odd width
        self.width, self.scale, self.base = width, scale, base

    def forward(self, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        table = self.scale * sinusoidal_table(positions.to(like.device), self.width, self.base)
        return table.to(like.dtype)


@register_method
@dataclass(frozen=True)
class Sinusoidal(Encoding):
    """Add sines and cosines of each position to the embeddings."""

    name: ClassVar[str] = "sinusoidal"
    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762, section 3.5"
    summary: ClassVar[str] = "Adds sines and cosines of each position to the embeddings; for training from scratch."

    base: float = option(10000.0, number(above=1), "of the geometric series of wavelengths")
    embedding_scale: float | None = option(
        None, positive, "what multiplies the table; default: the initializer_range of the model"
    )

    def module(self, model: ModelShape) -> nn.Module:
        return SinusoidalTable(model.hidden_size, self.embedding_scale or model.initializer_range, self.base)

    def numbers(self, model: ModelShape) -> Numbers:
        width = model.hidden_size
        tokens = [2 * math.pi * self.base ** (2 * pair / width) for pair in range(width // 2)]
        longer = [sum(token > length for token in tokens) for length in (model.length, model.target)]
        sentences = [
            f"A row has {width:,} features, {len(tokens):,} waves of {number_name(tokens[0])} to "
            f"{number_name(tokens[-1])} tokens.",
            f"{longer[0]:,} waves are longer than {model.length:,} tokens, {longer[1]:,} longer than {model.target:,}.",
            "The row of p + k is that of p rotated by k, wave by wave, whatever p is.",
        ]
        rows = [
            [f"{2 * at}, {2 * at + 1}", number_name(one), number_name(model.length / one)]
            for at, one in enumerate(tokens)
        ]
        return Numbers(sentences, ["features", "wavelength", f"waves in {model.length:,}"], rows)

    def position_map(self, model: ModelShape) -> PositionMap:
        return PositionMap(
            "Sinusoidal",
            [("", partial(rope_score, num_pairs=model.hidden_size // 2, base=self.base))],
            "product, 1 at distance 0",
            EQUAL_VECTORS,
            f"The dot product of the rows of two positions, {model.hidden_size} features. It depends on the distance "
            "alone, but the rows are added to the words before the first layer, whose weights may make anything of "
            "them.",
        )
