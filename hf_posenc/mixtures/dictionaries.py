"""Key-value dictionaries, and questions for some of their values."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from hf_posenc.mixtures import register_kind
from hf_posenc.mixtures.base import Dialogues
from hf_posenc.mixtures.made_up import Marks, amount, date, longest_mark, names, phrase, titles

# The first line, an entry, and what is between two entries.
_LAYOUTS = (
    ("An inventory of names, each with its entry:", "{key}: {value}", "; "),
    ("A register with one entry in each line:", "{key} = {value}", "\n"),
    ("A table with two columns:", "| {key} | {value} |", "\n"),
    ("Some pairs that belong together:", "{key} -> {value}", ", "),
)
_QUESTIONS = (
    ("Which entry belongs to {key}?", "To {key} belongs {value}."),
    ("What stands beside {key}?", "Beside {key} stands {value}."),
    ("Look up {key}, please.", "{value}, found under {key}."),
    ("And what goes with {key}?", "{key} goes with {value}."),
)


@register_kind
class Dictionaries(Dialogues):
    """A dictionary, and questions for the values of some of its keys.

    Xiong et al. (2024, arXiv:2406.19292, section 2) train on dictionaries of 3 or 4 integers with integers, asked for
    one, with the answer in a sentence of one form, and the loss on the answer. Here each dictionary has one of several
    layouts and questions, its keys are made-up names or marks, and its values are phrases, amounts, dates and marks: in
    no form that is measured later, and of several forms, as a model that is trained on one form may learn to look that
    form up alone. Several are asked for, since a block costs the same.
    """

    name: ClassVar[str] = "kv"
    least: ClassVar[int] = 2

    def turns(self, rng: Random, count: int) -> list[tuple[str, str]]:
        longest = longest_mark(self.material.seq_len)
        # All forms before any entry, so that they are the same for another count, and with them the tokens of an entry.
        of_keys = Marks.of_any_form(rng, longest)
        draw_keys = rng.choice((names, titles, *2 * [of_keys.several]))
        # Values that look like keys, as often as not.
        mark = rng.choice((of_keys, Marks.of_any_form(rng, longest))).one
        forms = rng.choice(((mark,), (mark, phrase, amount, date)))
        (heading, entry, between), (question, answer) = rng.choice(_LAYOUTS), rng.choice(_QUESTIONS)
        keys = draw_keys(rng, count)
        values = [rng.choice(forms)(rng) for _ in keys]
        text = between.join(entry.format(key=key, value=value) for key, value in zip(keys, values, strict=True))
        asked = rng.sample(range(count), min(count, self.material.num_questions))
        turns = [(question.format(key=keys[at]), answer.format(key=keys[at], value=values[at])) for at in asked]
        return [(f"{heading}\n\n{text}\n\n{turns[0][0]}", turns[0][1]), *turns[1:]]
