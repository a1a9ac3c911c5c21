"""xPos: RoPE whose pairs shrink with distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import ModelSizes
from hf_posenc.methods.encodings.rope import RopeOptions, RopeRotation
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import register_method

# What a key itself may come to, as a logarithm, besides the factor of xPos.
_HEADROOM = 5.0


def xpos_decay(num_pairs: int, gamma: float = 0.4) -> torch.Tensor:
    """Return each pair's decay, float64 ``(num_pairs,)``: its logits shrink by this every ``scale_base`` tokens.

    ``(2i / d + gamma) / (1 + gamma)`` of pair i: the fast pairs, first, shrink most.

    Reference: Sun et al. 2022, arXiv:2212.10554, section 3.2 and algorithm 1.
    """
    share = torch.arange(num_pairs, dtype=torch.float64) / num_pairs
    return (share + gamma) / (1 + gamma)


class XposRotation(RopeRotation):
    """RoPE whose pairs also shrink with distance, the fast ones most: ``decay ** (distance / scale_base)``.

    Queries are multiplied by ``decay ** (p / scale_base)`` and keys by its inverse, p counted from the middle of the
    queries: no factor is larger than half their number makes it, and those of earlier keys are below 1.

    Reference: Sun et al. 2022, arXiv:2212.10554, section 3.2 and algorithm 1.
    """

    def __init__(self, sizes: ModelSizes, options: Xpos) -> None:
        super().__init__(sizes, options)
        self.decay = xpos_decay(self.width // 2)
        self.scale_base = options.scale_base

    def _factors(self, positions: torch.Tensor, middle: torch.Tensor, sign: int) -> torch.Tensor:
        powers = (positions - middle).double()[:, None, :, None] / self.scale_base
        return self.decay.to(positions.device) ** (sign * powers)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = queries.to(query.device), keys.to(query.device)
        middle = (queries.amin(-1, keepdim=True) + queries.amax(-1, keepdim=True)) // 2
        largest = float((queries.amax(-1) - middle[:, 0]).max()) / self.scale_base * -float(self.decay[0].log())
        if largest > math.log(torch.finfo(query.dtype).max) - _HEADROOM:
            raise InvalidRequestError(
                f"xpos over {queries.shape[-1]} tokens at once needs larger numbers than {query.dtype} has. Feed the "
                "text in parts, with a KV cache, or patch with a larger scale_base."
            )
        query = self.rotate(query, queries, self._factors(queries, middle, 1))
        return query, self.rotate(key, keys, self._factors(keys, middle, -1))


@register_method
@dataclass(frozen=True)
class Xpos(RopeOptions):
    """RoPE whose pairs shrink with distance, the fast ones most."""

    name: ClassVar[str] = "xpos"
    paper: ClassVar[str] = "Sun et al. 2022, arXiv:2212.10554, section 3.2"
    summary: ClassVar[str] = "RoPE whose pairs shrink with distance, the fast ones most; for training from scratch."

    scale_base: float = option(512.0, positive, "tokens in which a pair's logits shrink by its decay")

    def module(self, sizes: ModelSizes) -> nn.Module:
        return XposRotation(sizes, self)
