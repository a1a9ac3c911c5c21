"""A trained bias for each distance and head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.methods.base import Encoding
from hf_posenc.methods.encodings.modules import DistanceTable
from hf_posenc.methods.explained import ModelShape, Numbers, PositionMap
from hf_posenc.methods.options import option, tokens
from hf_posenc.methods.registry import register_method


@register_method
@dataclass(frozen=True)
class RelativeBias(Encoding):
    """Add a trained bias for each distance and head to the logits; distances are clipped, as Shaw et al. have it."""

    name: ClassVar[str] = "relative_bias"
    paper: ClassVar[str] = (
        "Shaw et al. 2018, arXiv:1803.02155, section 3.2 (distances clipped); as a bias: Raffel et al. 2019, "
        "arXiv:1910.10683"
    )
    summary: ClassVar[str] = "Adds a trained bias for each distance and head to the logits; for training from scratch."
    has_parameters: ClassVar[bool] = True

    max_distance: int = option(128, tokens, "tokens from which on all distances are one")

    def module(self, model: ModelShape) -> nn.Module:
        classify = partial(_clipped_distance, farthest=self.max_distance)
        return DistanceTable(model.num_heads, self.max_distance + 1, classify, model.initializer_range)

    def numbers(self, model: ModelShape) -> Numbers:
        farthest = self.max_distance
        return Numbers(
            [
                f"{(farthest + 1) * model.num_heads:,} numbers are trained: one for each of {model.num_heads} heads "
                f"and the distances 0 to {farthest:,}.",
                f"Of the {model.target:,} distances to be read, {max(model.target - farthest, 0):,} share the last.",
            ]
        )

    def position_map(self, model: ModelShape) -> PositionMap:
        farthest = self.max_distance
        return PositionMap(
            "Relative bias, clipped",
            [("", lambda distances: distances.clamp(max=farthest).double())],
            "which learned number",
            (0.0, float(farthest)),
            f"Which of a head's {farthest + 1} learned numbers is added to the score: one for each distance, and all "
            f"keys {farthest} or more tokens away share the last.",
        )


def _clipped_distance(relative: torch.Tensor, farthest: int) -> torch.Tensor:
    return (-relative).clamp(0, farthest)
