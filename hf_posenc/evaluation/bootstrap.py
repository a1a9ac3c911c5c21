"""How sure a perplexity is: resampling the documents it was measured on, or blocks of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

MIN_DOCUMENTS = 5
BLOCKS_PER_DOCUMENT = 32
_MIN_BLOCK_TOKENS = 16
Unit = Literal["documents", "blocks"]


def block_totals(losses: torch.Tensor) -> tuple[list[float], list[int]]:
    """Sum losses ``(n,)`` over blocks of consecutive tokens, in float64.

    Neighbouring tokens are easy or hard together, so single tokens would look surer than they are. Blocks have at
    least 16 tokens (or a quarter of a text too short for that), and a document has at most 32 of them.

    Returns:
        The sum of each block in nats, and its tokens.
    """
    size = max(min(_MIN_BLOCK_TOKENS, len(losses) // 4), math.ceil(len(losses) / BLOCKS_PER_DOCUMENT), 1)
    blocks = torch.split(losses.double(), size)
    return [float(block.sum()) for block in blocks], [len(block) for block in blocks]


def bootstrap_interval(
    nll_sums: Sequence[float], counts: Sequence[int], *, seed: int = 0, num_samples: int = 1000, level: float = 0.95
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of ``exp(sum of losses / number of tokens)``.

    Args:
        nll_sums: ``(units,)``, nats summed over each unit (a document, or a block of one).
        counts: ``(units,)``, tokens of each unit.
        seed: The same seed and numbers give the same interval, to the bit.
        num_samples: How many times as many units are drawn, with replacement.
        level: Share of the samples inside the interval.

    Reference: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(counts), (num_samples, len(counts)), generator=generator)
    sums = torch.tensor(nll_sums, dtype=torch.float64)[drawn].sum(dim=1)
    tokens = torch.tensor(counts, dtype=torch.float64)[drawn].sum(dim=1)
    tail = (1 - level) / 2
    low, high = torch.quantile(torch.exp(sums / tokens), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def resampled_units(
    documents: Sequence[tuple[Sequence[float], Sequence[int]]],
) -> tuple[list[float], list[int], Unit]:
    """Return the nats and tokens of what is resampled, and what that is: documents if there are at least 5, or blocks.

    Args:
        documents: What ``block_totals`` gave for each document.
    """
    if len(documents) >= MIN_DOCUMENTS:
        return [math.fsum(sums) for sums, _ in documents], [sum(counts) for _, counts in documents], "documents"
    sums = [value for sums, _ in documents for value in sums]
    return sums, [count for _, counts in documents for count in counts], "blocks"
