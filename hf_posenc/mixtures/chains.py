"""Entries that refer to other entries, and questions whose answers follow them to a value."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import ClassVar

from hf_posenc.mixtures import register_kind
from hf_posenc.mixtures.base import Dialogues
from hf_posenc.mixtures.made_up import amount, date, names, phrase, titles

# The first line, an entry with its value, one that refers to another entry, and the question.
_RELATIONS = (
    ("A price list:", "{key} costs {value}", "{key} costs as much as {other}", "How much does {key} cost?"),
    ("A list of codes:", "{key} stands for {value}", "{key} stands for what {other} stands for", "What is {key}?"),
    ("Who carries what:", "{key} carries {value}", "{key} carries the same as {other}", "What does {key} carry?"),
    ("A calendar of feasts:", "{key} falls on {value}", "{key} falls on the day of {other}", "When is {key}?"),
)
_BETWEEN = (".\n", ". ", "; ")
_MOST_LINKS = 3


@register_kind
class Chains(Dialogues):
    """Entries of which some have a value, and others refer to another entry, which can refer on.

    An answer names every entry on the way to the value, so that each step is one look-up. Two and more look-ups in a
    row are what babilong's questions with several facts and RULER's variable tracking need, in other forms (Kuratov et
    al. 2024, arXiv:2406.10149; Hsieh et al. 2024, arXiv:2404.06654).
    """

    name: ClassVar[str] = "chains"
    least: ClassVar[int] = 2

    def turns(self, rng: Random, count: int) -> list[tuple[str, str]]:
        heading, entry, referring, question = rng.choice(_RELATIONS)
        between, draw_keys = rng.choice(_BETWEEN), rng.choice((names, titles))
        values = (date,) if "calendar" in heading else (amount,) if "price" in heading else (phrase, amount, date)
        keys = draw_keys(rng, count)
        chains: list[list[str]] = []
        start = 0
        while start < count:
            chains.append(keys[start : start + rng.randint(1, _MOST_LINKS)])
            start += len(chains[-1])
        lines: dict[str, str] = {}
        answers: list[tuple[str, str]] = []
        for chain in chains:
            for key, other in pairwise(chain):
                lines[key] = referring.format(key=key, other=other)
            lines[chain[-1]] = entry.format(key=chain[-1], value=rng.choice(values)(rng))
            answers.append((question.format(key=chain[0]), f"{', and '.join(lines[key] for key in chain)}."))
        shown = list(lines.values())
        rng.shuffle(shown)
        # The longest chains first, so that most questions need several look-ups.
        order = sorted(range(len(chains)), key=lambda at: (-len(chains[at]), rng.random()))
        turns = [answers[at] for at in order[: self.material.num_questions]]
        rng.shuffle(turns)
        return [(f"{heading}\n\n{between.join(shown)}\n\n{turns[0][0]}", turns[0][1]), *turns[1:]]
