"""What is kept of a document's losses: sums over stretches of tokens, and the tokens in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Totals = tuple[list[float], list[int]]  # of each stretch, in order: nats and scored tokens

_STRETCHES = 32  # of the original length, if nobody says how wide
_NARROWEST = 16
_WIDTH_WITHOUT_ORIGINAL = 256


def default_bucket(original_length: int | None) -> int:
    """Return how many positions share a bucket: a 32nd of the original length, at least 16; 256 where it is unknown."""
    return _WIDTH_WITHOUT_ORIGINAL if original_length is None else max(_NARROWEST, original_length // _STRETCHES)


def position_totals(losses: torch.Tensor, first: int, width: int) -> Totals:
    """Sum losses by where their token stands.

    Args:
        losses: ``(n,)``, of tokens ``first`` to ``first + n - 1`` of a text.
        first: Index of the first scored token.
        width: Tokens of a bucket; bucket b begins at token ``b * width``.

    Returns:
        Nats (summed in float64) and scored tokens of each bucket, from bucket 0 to the last one that has any.
    """
    buckets = torch.arange(first, first + len(losses)) // width
    sums = torch.zeros(int(buckets[-1]) + 1, dtype=torch.float64).index_add_(0, buckets, losses.double())
    return sums.tolist(), torch.bincount(buckets).tolist()


def add_totals(totals: Sequence[Totals]) -> Totals:
    """Add up the stretches of several documents, first with first, second with second."""
    longest = max(len(counts) for _, counts in totals)
    sums = [math.fsum(nats[at] for nats, _ in totals if at < len(nats)) for at in range(longest)]
    return sums, [sum(counts[at] for _, counts in totals if at < len(counts)) for at in range(longest)]
