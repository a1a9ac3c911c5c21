"""ALiBi: a constant times the distance, off each logit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Encoding
from hf_posenc.methods.encodings.modules import AddedToLogits
from hf_posenc.methods.explained import ModelShape, Numbers, PositionMap
from hf_posenc.methods.registry import register_method
from hf_posenc.utils.units import number_name


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return the slopes: how much each head takes off a logit for a token of distance, float64 ``(num_heads,)``.

    ``2 ** (-8 (h + 1) / n)`` for n heads, a power of two. For other numbers, as the paper's code has it: those of the
    power of two below, then every other one of the power of two above.

    Reference: Press et al. 2021, arXiv:2108.12409, section 3; ``get_slopes`` of its code.

    Raises:
        ValueError: Less than one head.
    """
    if num_heads < 1:
        raise InvalidRequestError(f"num_heads must be at least 1, got {num_heads}.")
    below = 2 ** (num_heads.bit_length() - 1)

    def of_power(heads: int) -> torch.Tensor:
        return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64))

    return torch.cat((of_power(below), of_power(2 * below)[::2][: num_heads - below]))


class AlibiBias(AddedToLogits):
    """A constant times the distance, off each logit, another constant in each head.

    Reference: Press et al. 2021, arXiv:2108.12409, section 3.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(num_heads).float()  # no buffer, which .to(bfloat16) would round

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        distance = (queries[:, :, None] - keys[:, None, :])[:, None]
        return -self.slopes.to(distance.device)[:, None, None] * distance


@register_method
@dataclass(frozen=True)
class Alibi(Encoding):
    """Take a constant times the distance off the logits, another constant in each head."""

    name: ClassVar[str] = "alibi"
    paper: ClassVar[str] = "Press et al. 2021, arXiv:2108.12409, section 3"
    summary: ClassVar[str] = "Takes a constant times the distance off the logits; for training from scratch."

    def module(self, model: ModelShape) -> nn.Module:
        return AlibiBias(model.num_heads)

    def numbers(self, model: ModelShape) -> Numbers:
        slopes = alibi_slopes(model.num_heads).tolist()
        reach = [math.log(100) / slope for slope in slopes]
        inside = sum(one < model.length for one in reach)
        sentences = [
            f"{model.num_heads} heads, slopes from {max(slopes):.4g} to {min(slopes):.4g}: a weight falls to a "
            f"hundredth after {number_name(min(reach))} tokens in the nearest-sighted head and after "
            f"{number_name(max(reach))} in the farthest-sighted.",
            f"In {inside} of {model.num_heads} heads that is nearer than the {model.length:,} tokens the model reads; "
            f"at {model.target:,} tokens nothing changes for them.",
        ]
        rows = [
            [str(at + 1), f"{slope:.4g}", number_name(far)]
            for at, (slope, far) in enumerate(zip(slopes, reach, strict=True))
        ]
        return Numbers(sentences, ["head", "slope", "tokens to 1/100"], rows)

    def position_map(self, model: ModelShape) -> PositionMap:
        slopes = alibi_slopes(model.num_heads).tolist()
        return PositionMap(
            "ALiBi",
            [
                (f"head {head + 1}, slope {slopes[head]:.3g}", partial(_faded, slope=slopes[head]))
                for head in model.some_heads
            ],
            "weight factor, exp(bias)",
            (0.0, 1.0),
            "What the bias multiplies an attention weight by, before weights are made to sum to 1. Each head looks "
            "back as far as its slope lets it, and no further in a longer text.",
        )


def _faded(distances: torch.Tensor, slope: float) -> torch.Tensor:
    return torch.exp(-slope * distances.double())
