"""A trained bias for each distance and head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.methods.base import Encoding, ModelSizes
from hf_posenc.methods.encodings.modules import DistanceTable
from hf_posenc.methods.explained import ModelShape, Numbers, PositionMap
from hf_posenc.methods.options import option, tokens
from hf_posenc.methods.registry import register_method


@register_method
@dataclass(frozen=True)
class RelativeBias(Encoding):
    """Add a trained bias for each distance and head to the logits; distances are clipped, as Shaw et al. have it."""

    name: ClassVar[str] = "relative_bias"
    look: ClassVar[int | None] = 16
    paper: ClassVar[str] = (
        "Shaw et al. 2018, arXiv:1803.02155, section 3.2 (distances clipped); as a bias: Raffel et al. 2019, "
        "arXiv:1910.10683"
    )
    summary: ClassVar[str] = "Adds a trained bias for each distance and head to the logits; for training from scratch."
    formula: ClassVar[str] = r"z_{m,n} = \frac{q_m \cdot k_n}{\sqrt{d_h}} + B_{h, \min(m - n, D)}"
    symbols: ClassVar[str] = "The numbers $B$ are trained; $h$ is the head and $D$ is the option max_distance."
    has_parameters: ClassVar[bool] = True
    title: ClassVar[str] = "Learned relative bias, clipped"
    explanation: ClassVar[str] = (
        "A trained number is added to each score, one for each head and distance; distances past the largest share its "
        "number."
    )
    absolute_or_relative: ClassVar[str] = "Relative: only the distance counts."
    kv_cache: ClassVar[str] = (
        "Yes: keys know of no position; the bias is looked up anew for each query, from the distance."
    )
    trained: ClassVar[str] = "One number for each head and distance up to the largest."
    extrapolates: ClassVar[str] = (
        "Partly, as T5's: far keys are all alike, and attention spreads over more of them than in training."
    )

    max_distance: int = option(128, tokens, "tokens from which on all distances are one")

    def module(self, sizes: ModelSizes) -> nn.Module:
        classify = partial(_clipped_distance, farthest=self.max_distance)
        return DistanceTable(sizes.num_heads, self.max_distance + 1, classify, sizes.initializer_range)

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
