"""The certainty of a number: bootstrap intervals of perplexities and of their differences, Wilson's of a share."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.records import Record, RetrievalRecord

MIN_DOCUMENTS = 5
BLOCKS_PER_DOCUMENT = 32
_MIN_BLOCK_TOKENS = 16
_NUM_SAMPLES = 1000  # of a bootstrap: how many times as many units are drawn, with replacement
WORTH = 0.5  # percent of perplexity: less is no difference to choose by, however sure
Z = 1.959964  # of a normal distribution's central 95 %
# What two records of the same tokens have in common.
_SAME = (
    *("protocol", "context_length", "text_hash", "tokenizer_hash", "bos", "stride", "last_k", "average"),
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


def bootstrap_interval(nll_sums: Sequence[float], counts: Sequence[int], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of ``exp(sum of losses / number of tokens)``.

    Args:
        nll_sums: ``(units,)``, nats summed over each unit (a document, or a block of one).
        counts: ``(units,)``, tokens of each unit.
        seed: The same seed and numbers give the same interval, to the bit.

    Reference: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(counts), (_NUM_SAMPLES, len(counts)), generator=generator)
    sums = torch.tensor(nll_sums, dtype=torch.float64)[drawn].sum(dim=1)
    tokens = torch.tensor(counts, dtype=torch.float64)[drawn].sum(dim=1)
    low, high = torch.quantile(torch.exp(sums / tokens), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
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


def _wilson(share: float, count: float, z: float) -> tuple[float, float]:
    """Return the shares p with ``|share - p| = z sqrt(p (1 - p) / count)``."""
    z2 = z**2
    middle = share + z2 / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low, high = ((middle - spread) / (1 + z2 / count), (middle + spread) / (1 + z2 / count))
    return (0.0 if share == 0 else low, 1.0 if share == 1 else high)


@dataclass(frozen=True)
class Share:
    """The share of questions that were answered right, with its 95 % interval. As text, in percent."""

    value: float
    low: float
    high: float
    n_questions: int
    n_texts: int

    def __str__(self) -> str:
        return f"{100 * self.value:.0f} % ({self.interval})"

    @property
    def interval(self) -> str:
        """The interval in percent."""
        return f"{100 * self.low:.0f}–{100 * self.high:.0f}"

    @property
    def counted(self) -> str:
        """The units of the share: prompts, each with a text of its own, or questions in some texts."""
        if self.n_texts == self.n_questions:
            return "1 prompt" if self.n_questions == 1 else f"{self.n_questions} prompts"
        return f"{self.n_questions} questions in {self.n_texts} text{'' if self.n_texts == 1 else 's'}"

    @property
    def is_over(self) -> str:
        """The units of the interval: those that would differ if it were measured again."""
        if self.n_texts == self.n_questions:
            return "prompts"
        return "the questions of one text" if self.n_texts == 1 else "texts"


def share_interval(scores: Sequence[float], texts: Sequence[Hashable]) -> Share:
    """Return the share of right answers with its 95 % interval.

    Questions of one text are right or wrong together more often than by chance, so they say less than as many
    independent ones. With several texts the number of questions is divided by the design effect: the variance of the
    share over texts (of a ratio, with different numbers of questions) over that of independent questions, and at least
    1. Of that effective number the interval is Wilson's, with Student's quantile for one degree of freedom less than
    there are texts, as so few say little about how much texts vary. Where each question has a text of its own this is
    Wilson's interval. With a single text it is too, and says nothing about other texts.

    A bootstrap over texts is too narrow where there are few of them.

    Args:
        scores: ``(questions,)``, between 0 and 1.
        texts: ``(questions,)``, what tells the text of each from others.

    Raises:
        ValueError: There are no scores.

    References:
        Rao and Scott 1992, Biometrics 48, pages 577 to 585: design effect and effective number of clustered answers.
        Korn and Graubard 1998, Survey Methodology 24, pages 193 to 201: Student's quantile in intervals of shares.
    """
    if not scores:
        raise InvalidRequestError("an interval needs at least one score.")
    right: dict[Hashable, list[float]] = {}
    for score, text in zip(scores, texts, strict=True):
        right.setdefault(text, []).append(score)
    n, m = len(scores), len(right)
    share, effect, z = math.fsum(scores) / n, 1.0, Z
    if 1 < m < n:
        over_texts = math.fsum((math.fsum(each) - share * len(each)) ** 2 for each in right.values()) * m / (m - 1)
        independent = n * share * (1 - share)
        effect = max(over_texts / independent, 1.0) if independent else 1.0
        z = student_quantile(m - 1)
    return Share(share, *_wilson(share, n / effect, z), n_questions=n, n_texts=m)


def share_right(records: Sequence[RetrievalRecord]) -> Share:
    """Return the share of right answers: teacher-forced, or as written where their order is free.

    Raises:
        ValueError: There are no records.
    """
    each = [(one.score("forced"), one.score("written")) for one in records]
    scores = [written or 0.0 if forced is None else forced for forced, written in each]
    return share_interval(scores, [one.text for one in records])


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's distribution, to 0.2 %.

    Reference: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5; that of 1 and 2 degrees is exact.
    """
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 0.95 / math.sqrt(2 * 0.975 * 0.025)
    z = Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum([z, *(term / float(degrees**power) for power, term in enumerate(terms, 1))])


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


def paired_interval(one: Record, other: Record) -> Ratio:
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
    low, high = bootstrap_interval(differences, one.unit_tokens)
    return Ratio(one.perplexity / other.perplexity, low, high, one.ci_unit)


def is_tie(one: Record, other: Record) -> bool:
    """Say whether two records of one column of a table tie, by ``paired_interval``.

    Where each model chose the key tokens of ``longppl`` itself, they can be equally many and not the same, so that
    there are no pairs. Then the records tie if their own intervals meet, which finds more ties.
    """
    if one.unit_tokens != other.unit_tokens:
        return one.ci_low <= other.ci_high and other.ci_low <= one.ci_high
    return paired_interval(one, other).is_tie
