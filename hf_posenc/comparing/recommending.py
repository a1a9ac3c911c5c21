"""The choice of a row from the numbers alone: rows within the noise tie, and of these the simplest is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_posenc.comparing.candidates import OTHER, STAGED, STATIC, UNPATCHED
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.effective_length import LossReach, Reach, reach
from hf_posenc.evaluation.intervals import Ratio, Share, paired_interval, share_right
from hf_posenc.evaluation.records import AnyRecord, Record, RetrievalRecord
from hf_posenc.utils.units import length_name


@dataclass(frozen=True)
class Recommendation:
    """The recommended row.

    Attributes:
        method: Its name, or that of another row; "none" for the model as it is.
        best: The method of the lowest perplexity among those that retrieve as well as any.
        ties: Methods that tie with the best, itself included.
        served: The method of the lowest perplexity among those that servers run; None if there is none.
        lines: Why, in words.
        holds: Whether it reads as far as was measured; None where that is unknown.
        kind: How hard it is to serve, as ``candidates`` has it.
    """

    method: str
    best: str
    ties: tuple[str, ...]
    served: str | None
    lines: tuple[str, ...]
    holds: bool | None
    kind: int


def recommend(rows: Mapping[str, Sequence[AnyRecord]], kinds: Mapping[str, int]) -> Recommendation:
    """Choose among methods measured on the same text, by their longest length.

    Rows whose retrieval at that length is surely worse than the best's (their intervals do not meet) are out. Of
    the others, those tie with the lowest perplexity whose paired difference is within the noise, or less than 0.5 %. Of
    these the model as it is comes before static rules, which can be served everywhere, these before staged ones, and
    these before what changes distances; of one kind the lowest perplexity is taken.

    Args:
        rows: For each method ("none" for the model as it is) its records of ``perplexity`` (``truncated``), and of
            ``retrieval`` if it was measured.
        kinds: How hard each row is to serve, as ``candidates`` has it.

    Raises:
        ValueError: A row has no perplexity, or they were measured on different tokens.
    """
    longest = {method: _longest(method, records) for method, records in rows.items()}
    shares = {method: _share(records) for method, records in rows.items()}
    able = {method: longest[method] for method in _able(shares)}
    best = min(able, key=lambda method: able[method].perplexity)
    above = {method: paired_interval(record, able[best]) for method, record in able.items()}
    ties = [method for method in able if method == best or above[method].is_tie]
    taken = min(ties, key=lambda method: (kinds[method], able[method].perplexity))
    static = [method for method in able if kinds[method] == STATIC]
    served = min(static, key=lambda method: able[method].perplexity, default=None)
    row = reach([*rows.get("none", ()), *rows[taken]])[-1]
    loss = row.loss
    holds = None if isinstance(loss, str) or loss.doubt else loss.length is not None and loss.is_longest
    lines = [_why(taken, best, kinds[taken], longest, above, shares), *_price(taken, row)]
    if others := [f"{_name(method)} {above[method]}" for method in ties if method not in (taken, best)]:
        lines.append(f"as good as the lowest within the noise: {', '.join(others)}")
    if kinds[taken] > STATIC and served is not None:
        less = paired_interval(able[served], able[taken])
        lines.append(f"servers cannot run {taken}; of what they can, {served} is the best: {less}")
    if out := [f"{_name(method)} {shares[method]}" for method in rows if method not in able]:
        lines.append(f"not considered, for they retrieve less: {', '.join(out)}")
    return Recommendation(taken, best, tuple(ties), served, tuple(lines), holds, kinds[taken])


def _longest(method: str, records: Sequence[AnyRecord]) -> Record:
    plain = [record for record in records if isinstance(record, Record)]
    if not plain:
        raise InvalidRequestError(f"the row {method!r} has no perplexity to choose by.")
    return max(plain, key=lambda one: one.context_length)


def _share(records: Sequence[AnyRecord]) -> Share | None:
    """Return the share of right answers at the longest length, of all tasks together; None without retrieval."""
    retrievals = [record for record in records if isinstance(record, RetrievalRecord)]
    longest = max((one.context_length for one in retrievals), default=0)
    here = [one for one in retrievals if one.context_length == longest]
    return share_right(here) if here else None


def _able(shares: Mapping[str, Share | None]) -> list[str]:
    """Return the methods whose retrieval is not surely worse than the best's; all where it was not measured."""
    needed = max((share.low for share in shares.values() if share is not None), default=0.0)
    return [method for method, share in shares.items() if share is None or share.high >= needed]


def _name(method: str) -> str:
    return "the model as it is" if method == "none" else method


def _why(
    taken: str,
    best: str,
    kind: int,
    longest: Mapping[str, Record],
    above: Mapping[str, Ratio],
    shares: Mapping[str, Share | None],
) -> str:
    record = longest[taken]
    text = f"take {_name(taken)}: perplexity {record.perplexity:.2f} at {length_name(record.context_length)}"
    if taken != "none" and "none" in longest:
        text += f" (unpatched {longest['none'].perplexity:.2f})"
    if taken == best:
        text += ", the lowest" + (" of those that retrieve" if len(above) < len(longest) else "")
    else:
        text += f", a tie with the lowest, {best}: {above[taken]}, and {_ADVANTAGE[kind]}"
    return text + (f"; there it retrieves {shares[taken]}" if shares[taken] else "")


_ADVANTAGE = {
    UNPATCHED: "nothing has to be changed",
    STATIC: "every server runs it",
    STAGED: "simpler and faster",
    OTHER: "no harder",
}


def _price(taken: str, row: Reach) -> list[str]:
    """Return the cost for short texts, and whether the curve ends before the requested length."""
    if taken == "none":
        return []
    lines = [] if row.short_cost is None else row.short_words()
    if isinstance(row.loss, LossReach) and not row.loss.doubt and not (row.loss.length and row.loss.is_longest):
        ends = "is worse than unpatched at the original length already"
        if row.loss.length is not None:
            ends = f"reads to {length_name(row.loss.length)} only"
        lines.append(f"without training it {ends}: fine-tune it, or ask for less")
    return lines
