"""T5's bias: trained, for each bucket of distances and head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Encoding
from hf_posenc.methods.encodings.modules import DistanceTable
from hf_posenc.methods.explained import ModelShape, Numbers, PositionMap
from hf_posenc.methods.options import option, tokens
from hf_posenc.methods.registry import register_method
from hf_posenc.settings import flag


def t5_buckets(
    relative: torch.Tensor, *, bidirectional: bool = False, num_buckets: int = 32, max_distance: int = 128
) -> torch.Tensor:
    """Return the bucket of each relative position, int64 of the same shape.

    Half of the buckets (of a direction) hold one distance each, the others grow by a ratio up to ``max_distance``, from
    which on all distances share the last.

    Args:
        relative: Key position minus query position, int64.
        bidirectional: Whether keys after the query have the upper half of the buckets; else they are in bucket 0.
        num_buckets: Number of all buckets.
        max_distance: In tokens.

    Reference: Raffel et al. 2019, arXiv:1910.10683, section 2.1; ``_relative_position_bucket`` of its code.
    """
    buckets = torch.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        buckets = (relative > 0) * num_buckets
        distance = relative.abs()
    else:
        distance = (-relative).clamp(min=0)
    exact = num_buckets // 2
    # float32 and in this order, as T5 has it: where a bucket begins is a matter of rounding.
    ratio = (distance.float() / exact).log() / math.log(max_distance / exact)
    grown = exact + (ratio.clamp(min=0) * (num_buckets - exact)).long()
    return buckets + torch.where(distance < exact, distance, grown.clamp(max=num_buckets - 1))


@register_method
@dataclass(frozen=True)
class T5Bias(Encoding):
    """Add a trained bias for each bucket of distances and head to the logits."""

    name: ClassVar[str] = "t5_bias"
    aliases: ClassVar[tuple[str, ...]] = ("t5",)
    paper: ClassVar[str] = "Raffel et al. 2019, arXiv:1910.10683, section 2.1"
    summary: ClassVar[str] = (
        "Adds a trained bias for each bucket of distances and head to the logits; for training from scratch."
    )
    has_parameters: ClassVar[bool] = True

    num_buckets: int = option(32, tokens, "classes of distances")
    max_distance: int = option(128, tokens, "tokens from which on all distances are one")
    bidirectional: bool = option(False, flag, "half of the buckets are for keys after the query, as in T5's encoder")

    def check_options(self) -> None:
        exact = self.num_buckets // (4 if self.bidirectional else 2)
        if exact < 1 or self.max_distance <= exact:
            raise InvalidRequestError(
                f"max_distance must be greater than the {exact} distances that have a bucket each (num_buckets is "
                f"{self.num_buckets}, at least {4 if self.bidirectional else 2}), got {self.max_distance}."
            )

    def module(self, model: ModelShape) -> nn.Module:
        return DistanceTable(model.num_heads, self.num_buckets, self.buckets, model.initializer_range)

    def buckets(self, relative: torch.Tensor) -> torch.Tensor:
        """Return the bucket of each relative position, key minus query; see ``t5_buckets``."""
        return t5_buckets(
            relative,
            bidirectional=self.bidirectional,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )

    def numbers(self, model: ModelShape) -> Numbers:
        farthest = self.max_distance
        buckets = self.buckets(-torch.arange(farthest + 1))
        rows = []
        for bucket in sorted(set(buckets.tolist())):
            inside = torch.nonzero(buckets == bucket).flatten()
            first, last = int(inside[0]), int(inside[-1])
            span = f"{first:,}" if first == last else f"{first:,} to {last:,}"
            rows.append([str(bucket), f"{first:,} and more" if last == farthest else span])
        begins = int(torch.nonzero(buckets == buckets[-1])[0])
        one_direction = self.num_buckets // (2 if self.bidirectional else 1)
        later = " (and as many for later keys)" if self.bidirectional else ""
        sentences = [
            f"{one_direction} buckets{later}, of which {one_direction // 2} hold one distance each; from {begins:,} "
            "tokens on all keys share the last.",
            f"{self.num_buckets * model.num_heads:,} numbers are trained: {self.num_buckets} for each of "
            f"{model.num_heads} heads.",
            f"Of the {model.target:,} distances to be read, {max(model.target - begins, 0):,} are in the last bucket.",
        ]
        return Numbers(sentences, ["bucket", "distances"], rows)

    def position_map(self, model: ModelShape) -> PositionMap:
        buckets = self.buckets(-torch.arange(self.max_distance + 1))
        begins = int(torch.nonzero(buckets == buckets[-1])[0])
        return PositionMap(
            "T5's bias",
            [("", lambda distances: self.buckets(-distances).double())],
            "bucket: which learned number",
            (0.0, self.num_buckets - 1.0),
            f"Which of a head's {self.num_buckets} learned numbers is added to the score. Near keys have one each, "
            f"farther ones share, and from {begins:,} tokens on all have the last: past it, near and far are "
            "the same.",
        )
