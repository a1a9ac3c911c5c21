"""ALiBi: a constant times the distance, off each logit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Encoding, ModelSizes
from hf_posenc.methods.encodings.modules import AddedToLogits
from hf_posenc.methods.registry import register_method


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return what each head takes off a logit for a token of distance, float64 ``(num_heads,)``.

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

    def module(self, sizes: ModelSizes) -> nn.Module:
        return AlibiBias(sizes.num_heads)
