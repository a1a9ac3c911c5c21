"""A trained bias for each distance and head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.methods.base import Encoding, ModelSizes
from hf_posenc.methods.encodings.modules import DistanceTable
from hf_posenc.methods.options import option, tokens
from hf_posenc.methods.registry import register_method


@register_method
@dataclass(frozen=True)
class RelativeBias(Encoding):
    """Add a trained bias for each distance and head to the logits; distances are clipped, as Shaw et al. have it."""

    name: ClassVar[str] = "relative_bias"
    paper: ClassVar[str] = (
        "Shaw et al. 2018, arXiv:1803.02155, section 3.2 (distances clipped); as a bias: Raffel et al. 2019"
    )
    summary: ClassVar[str] = "Adds a trained bias for each distance and head to the logits; for training from scratch."
    has_parameters: ClassVar[bool] = True

    max_distance: int = option(128, tokens, "tokens from which on all distances are one")

    def module(self, sizes: ModelSizes) -> nn.Module:
        classify = partial(_clipped_distance, farthest=self.max_distance)
        return DistanceTable(sizes.num_heads, self.max_distance + 1, classify, sizes.initializer_range)


def _clipped_distance(relative: torch.Tensor, farthest: int) -> torch.Tensor:
    return (-relative).clamp(0, farthest)
