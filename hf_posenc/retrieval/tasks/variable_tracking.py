"""RULER's variable tracking: a chain of assignments, hidden line by line."""

from __future__ import annotations

import string
from random import Random

from hf_posenc.retrieval.tasks import register_task
from hf_posenc.retrieval.tasks.base import Needle, Puzzle

_HOPS = 4


@register_task("vt", has_depth=False, source="RULER, arXiv:2404.06654, section 3, in our words and with free text")
def variable_tracking(rng: Random, context_length: int) -> Puzzle:
    """A chain of five variables, each but the first set to the one before it; all with the value are asked for."""
    names, value, chain = _chain(rng, letters=5)
    shown, shown_value, example = _chain(rng, letters=3)
    instruction = "Variables are set in the text below. Keep track of which have the same value."
    question = "Question: Which variables have the value {value}, directly or through other variables?\nAnswer:"
    prefix = f"The {_HOPS + 1} variables with the value {{value}} are:"
    worked = f"{question} {prefix}".format(value=shown_value)
    return Puzzle(
        instruction="\n".join([instruction, "", *example, "", f"{worked} {', '.join(shown)}.", "", instruction]),
        question=question.format(value=value).removesuffix("\nAnswer:"),
        answer_prefix=f"Answer: {prefix.format(value=value)}",
        answers=tuple(names),
        needles=tuple(Needle(line) for line in chain),
    )


def _chain(rng: Random, letters: int) -> tuple[list[str], int, list[str]]:
    """Return the variables of a chain, its value, and its lines."""
    names: list[str] = []
    while len(names) < _HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [] if name in names else [name]
    value = rng.randint(10_000, 99_999)
    sources = [str(value), *(f"VAR {name}" for name in names)]
    return names, value, [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=False)]
