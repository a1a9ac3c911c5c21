"""Whether a fitted rule is better than the published ones, on texts that it was not fitted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_posenc.evaluation.intervals import Ratio, paired_interval
from hf_posenc.evaluation.records import Record
from hf_posenc.patching.extension_config import NO_METHOD
from hf_posenc.utils.units import length_name

FITTED = "fitted"
ADAPTED = "adapted"  # the model with changed weights, under the rule they were changed for


@dataclass(frozen=True)
class Verdict:
    """The conclusion from the measurement.

    Attributes:
        better: Whether the fitted rule is better than every compared one at the target length; False if one of these
            is better than it, None if they cannot be told apart or none is compared.
        best: The row to take: ``"fitted"`` or ``"adapted"``, or the compared method that is better.
        lines: Why, in words.
    """

    better: bool | None
    best: str
    lines: tuple[str, ...]


def judge(rows: Mapping[str, Sequence[Record]]) -> Verdict:
    """Compare the fitted rule, or the adapted model, with the others by paired intervals.

    Args:
        rows: The records of each row by its name. The first is ``"fitted"`` or ``"adapted"``; ``"none"`` is the
            unextended model, which need not reach the target length.
    """
    by_length = {name: {record.context_length: record for record in records} for name, records in rows.items()}
    subject = next(iter(rows))
    ours = by_length[subject]
    rivals = {name: found for name, found in by_length.items() if name not in (subject, NO_METHOD)}
    words = "the adapted model" if subject == ADAPTED else "the fitted rule"
    better, best, lines = _against_rivals(ours, rivals, words)
    unmodified = by_length.get(NO_METHOD, {})
    if costs := [(length, paired_interval(ours[length], unmodified[length])) for length in sorted(unmodified)]:
        lines.append(
            "cost against the unextended model: "
            + ", ".join(f"{cost} at {length_name(length)}" for length, cost in costs)
        )
    return Verdict(better, best or subject, tuple(lines))


def _against_rivals(
    ours: Mapping[int, Record], rivals: Mapping[str, Mapping[int, Record]], subject: str
) -> tuple[bool | None, str | None, list[str]]:
    """Return the verdict about published rules, whose records are given by length, and which of them is better."""
    if not rivals:
        return None, None, []
    target = max(ours)
    target_name = length_name(target)
    ratios = {name: paired_interval(ours[target], found[target]) for name, found in rivals.items()}
    lower = [name for name, ratio in ratios.items() if ratio.value > 1 and not ratio.is_tie]
    best = max(lower or ratios, key=lambda name: ratios[name].value)  # of the lowest perplexity
    ties = [name for name, ratio in ratios.items() if ratio.is_tie]
    better = False if lower else None if ties else True
    if lower:
        line = f"{best} is better than {subject} at {target_name}: {subject} has {ratios[best]}"
    elif ties:
        differences = ", ".join(f"{ratios[name]} against {name}" for name in ties)
        line = f"at {target_name} {subject} cannot be told apart from {', '.join(ties)}: {differences}"
    else:
        line = f"{subject} is better than every compared rule at {target_name}: {ratios[best]} against {best}, the next"
    lines = [line]
    for length in sorted(set(ours) - {target}):
        name = min(rivals, key=lambda one: rivals[one][length].perplexity)
        lines.append(f"at {length_name(length)}: {_against(paired_interval(ours[length], rivals[name][length]), name)}")
    return better, best if lower else None, lines


def _against(ratio: Ratio, name: str) -> str:
    if ratio.is_tie:
        return f"no difference from {name} that can be told ({ratio})"
    return f"{'better' if ratio.value < 1 else 'worse'} than {name}, the best of the others ({ratio})"
