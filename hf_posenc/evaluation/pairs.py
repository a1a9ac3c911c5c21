"""How much two models differ on the same tokens, which is known far better than how good either is."""

from __future__ import annotations

from dataclasses import dataclass

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.bootstrap import bootstrap_interval
from hf_posenc.evaluation.records import Record

_SAME = (
    *("protocol", "context_length", "text_hash", "tokenizer_hash", "bos", "window", "stride", "last_k", "average"),
    *("key_tokens", "n_tokens", "unit_tokens"),
)


WORTH = 0.5  # percent of perplexity: less is no difference to choose by, however sure


@dataclass(frozen=True)
class Ratio:
    """One perplexity over another, with the 95 % interval; below 1 the first is the better one."""

    value: float
    ci_low: float
    ci_high: float
    ci_unit: str

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
        ValueError: They are not of the same tokens, or were written before records had their units.
    """
    for name in _SAME:
        if getattr(one, name) != getattr(other, name):
            values = "" if name == "unit_tokens" else f" ({getattr(one, name)!r} and {getattr(other, name)!r})"
            raise InvalidRequestError(f"the records are not of the same tokens: {name} differs{values}.")
    if not one.unit_tokens:
        raise InvalidRequestError(
            "the records do not have the parts that are compared. Measure again, with this version."
        )
    differences = [mine - theirs for mine, theirs in zip(one.unit_nll, other.unit_nll, strict=True)]
    low, high = bootstrap_interval(differences, one.unit_tokens, seed=seed)
    return Ratio(one.perplexity / other.perplexity, low, high, one.ci_unit)


def is_tie(one: Record, other: Record) -> bool:
    """Say whether two records of the same tokens cannot be told apart, by ``paired_interval``.

    Of records that were written before they had their units, or had others, whether their own intervals meet, which
    finds more ties.
    """
    if one.unit_tokens and one.unit_tokens == other.unit_tokens:
        return paired_interval(one, other).is_tie
    return one.ci_low <= other.ci_high and other.ci_low <= one.ci_high
