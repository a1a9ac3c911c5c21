"""How sure a number is: bootstrap intervals of perplexities and of what two differ by, Wilson's of a share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.records import Record

MIN_DOCUMENTS = 5
BLOCKS_PER_DOCUMENT = 32
_MIN_BLOCK_TOKENS = 16
WORTH = 0.5  # percent of perplexity: less is no difference to choose by, however sure
Z = 1.959964  # of a normal distribution's central 95 %
# What two records of the same tokens have in common.
_SAME = (
    *("protocol", "context_length", "text_hash", "tokenizer_hash", "bos", "window", "stride", "last_k", "average"),
    *("key_tokens", "n_tokens", "unit_tokens"),
)
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


def wilson_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, from scores between 0 and 1.

    Prompts count, not answers: those of one prompt are right or wrong together.

    Raises:
        ValueError: There are no scores.
    """
    count = len(scores)
    if count == 0:
        raise InvalidRequestError("an interval needs at least one score.")
    share, z2 = math.fsum(scores) / count, Z**2
    middle = share + z2 / (2 * count)
    spread = Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low, high = ((middle - spread) / (1 + z2 / count), (middle + spread) / (1 + z2 / count))
    return (0.0 if share == 0 else low, 1.0 if share == 1 else high)


@dataclass(frozen=True)
class Ratio:
    """One perplexity over another, with the 95 % interval; below 1 the first is the better one. As text, in percent."""

    value: float
    ci_low: float
    ci_high: float
    ci_unit: str

    def __str__(self) -> str:
        percent, low, high = (100 * (value - 1) for value in (self.value, self.ci_low, self.ci_high))
        return f"{percent:+.1f} % ({low:+.1f} to {high:+.1f})"

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 1: the difference is more than a matter of which texts were taken."""
        return not self.ci_low <= 1 <= self.ci_high

    @property
    def is_tie(self) -> bool:
        """Whether the difference may be nothing, or is less than 0.5 %."""
        return not self.is_clear or 100 * abs(self.value - 1) < WORTH


def paired_interval(one: Record, other: Record, *, seed: int = 0) -> Ratio:
    """Compare two records of the same tokens, resampling documents, or blocks of them, for both at a time.

    What makes a text hard is hard for both models and cancels, so the interval is much narrower than the two of the
    perplexities let one think.

    Raises:
        ValueError: They are not of the same tokens.
    """
    for name in _SAME:
        if getattr(one, name) != getattr(other, name):
            values = "" if name == "unit_tokens" else f" ({getattr(one, name)!r} and {getattr(other, name)!r})"
            raise InvalidRequestError(f"the records are not of the same tokens: {name} differs{values}.")
    differences = [mine - theirs for mine, theirs in zip(one.unit_nll, other.unit_nll, strict=True)]
    low, high = bootstrap_interval(differences, one.unit_tokens, seed=seed)
    return Ratio(one.perplexity / other.perplexity, low, high, one.ci_unit)


def is_tie(one: Record, other: Record) -> bool:
    """Say whether two records of one column of a table tie, by ``paired_interval``.

    Where each model chose the key tokens of ``longppl`` itself, they can be equally many and not the same, so that
    there are no pairs. Then the records tie if their own intervals meet, which finds more ties.
    """
    if one.unit_tokens != other.unit_tokens:
        return one.ci_low <= other.ci_high and other.ci_low <= one.ci_high
    return paired_interval(one, other).is_tie
