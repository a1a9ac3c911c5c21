"""Sines and cosines added to the embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Encoding, ModelSizes
from hf_posenc.methods.encodings.modules import AddedToEmbeddings
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import register_method


def sinusoidal_table(positions: torch.Tensor, width: int, base: float = 10000.0) -> torch.Tensor:
    """Return sines in the even and cosines in the odd features, float64 ``(*positions.shape, width)``.

    Feature ``2i`` of position p is ``sin(p / base ** (2i / width))``, feature ``2i + 1`` the cosine of the same angle.

    Args:
        positions: Tokens before each, of any shape.
        width: Features, even.
        base: Of the geometric series of wavelengths.

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

    def __init__(self, width: int, scale: float) -> None:
        """Make one.

        Args:
            width: Features of the embeddings.
            scale: What multiplies the table. In the paper embeddings have variance 1, and those of a Llama 0.02 ** 2:
                unscaled, the table would drown them.
        """
        super().__init__()
        sinusoidal_table(torch.zeros(1), width)  # raises on an odd width
        self.width, self.scale = width, scale

    def forward(self, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        table = self.scale * sinusoidal_table(positions.to(like.device), self.width)
        return table.to(like.dtype)


@register_method
@dataclass(frozen=True)
class Sinusoidal(Encoding):
    """Add sines and cosines of each position to the embeddings."""

    name: ClassVar[str] = "sinusoidal"
    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762, section 3.5"
    summary: ClassVar[str] = "Adds sines and cosines of each position to the embeddings; for training from scratch."

    embedding_scale: float | None = option(
        None, positive, "what multiplies the table; default: the initializer_range of the model"
    )

    def module(self, sizes: ModelSizes) -> nn.Module:
        return SinusoidalTable(sizes.hidden_size, self.embedding_scale or sizes.initializer_range)
