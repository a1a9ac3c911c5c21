"""RULER's variable tracking: a chain of assignments, hidden line by line."""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

from hf_posenc.retrieving.tasks import register_task
from hf_posenc.retrieving.tasks.base import Puzzle, Question

_HOPS = 4
_QUESTION = "Question: Which variables have the value {value}, directly or through other variables?"
_PREFIX = f"The {_HOPS + 1} variables with the value {{value}} are:"


@register_task(
    "vt",
    has_depth=False,
    source="RULER, arXiv:2404.06654, section 3, in our words and with free text",
    several_questions=True,
)
def variable_tracking(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """All variables with a value, directly or through other variables: a chain of five in a book.

    Each but the first is set to the one before it.

    With several questions there are as many chains, as RULER's ``num_chains``; their lines are mixed.
    """
    chains = [_chain(rng, letters=5)]
    shown = _chain(rng, letters=3)
    while shown.value == chains[0].value:
        shown = _chain(rng, letters=3)
    while len(chains) < num_questions:
        other = _chain(rng, letters=5)
        if not any(other.value == one.value or {*other.names} & {*one.names} for one in (shown, *chains)):
            chains.append(other)
    instruction = "Variables are set in the text below. Keep track of which have the same value."
    worked = f"{_QUESTION}\nAnswer: {_PREFIX}".format(value=shown.value)
    # Each line goes to the next place of its chain, so that no variable is used before it is set.
    places = [at for at in range(len(chains)) for _ in shown.lines]
    order = rng.sample(places, len(places)) if num_questions > 1 else places
    lines = [iter(chain.lines) for chain in chains]
    return Puzzle(
        instruction="\n".join(
            [instruction, "", *shown.lines, "", f"{worked} {', '.join(shown.names)}.", "", instruction]
        ),
        questions=tuple(
            Question(
                text=_QUESTION.format(value=chain.value),
                answer_prefix=f"Answer: {_PREFIX.format(value=chain.value)}",
                answers=chain.names,
                needles=tuple(place for place, at in enumerate(order) if at == number),
            )
            for number, chain in enumerate(chains)
        ),
        needles=tuple(next(lines[at]) for at in order),
    )


@dataclass(frozen=True)
class _Chain:
    """A chain: the variables in their order, their value, and the line that sets each."""

    names: tuple[str, ...]
    value: int
    lines: tuple[str, ...]


def _chain(rng: Random, letters: int) -> _Chain:
    names: list[str] = []
    while len(names) < _HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [] if name in names else [name]
    value = rng.randint(10_000, 99_999)
    sources = [str(value), *(f"VAR {name}" for name in names)]
    lines = (f"VAR {name} = {source}" for name, source in zip(names, sources, strict=False))
    return _Chain(tuple(names), value, tuple(lines))
