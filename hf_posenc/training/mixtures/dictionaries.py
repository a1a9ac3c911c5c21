"""Key-value dictionaries: shelves of names with an entry each, and questions for some of them."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import ClassVar

from hf_posenc.training.mixtures import register_kind
from hf_posenc.training.mixtures.base import Dialogues
from hf_posenc.training.mixtures.made_up import marks, names, value

_ON_A_SHELF = 4  # keys


@register_kind
class Dictionaries(Dialogues):
    """A list of small dictionaries; each question names a key, the answer its value and the dictionary it is in.

    Xiong et al. train on dictionaries of 3 or 4 integers with integers, asked for one, with the answer in a sentence of
    one form, and the loss on the answer. Here keys are made-up names or marks, and values are phrases, amounts, dates
    and marks: in no form that is measured later, and of several forms, as a model that is trained on one learns to
    answer in it. Several are asked for, since a block costs the same.
    """

    name: ClassVar[str] = "kv"
    summary: ClassVar[str] = "dictionaries, asked for some of their values; the answers count"
    source: ClassVar[str] = "Xiong et al. 2024, arXiv:2406.19292, section 2"
    least: ClassVar[int] = 2

    def turns(self, rng: Random, count: int) -> list[tuple[str, str]]:
        # Marks of 9 groups have as many tokens as a UUID, and need blocks that hold enough of them.
        most = max(2, min(9, self.material.seq_len // 200))
        keys = rng.choice((names, partial(marks, most=most)))(rng, count)
        values = [value(rng, most) for _ in keys]
        entries = [f"{key}: {entry}" for key, entry in zip(keys, values, strict=True)]
        shelves = [
            f"Shelf {number} | {'; '.join(entries[start : start + _ON_A_SHELF])}"
            for number, start in enumerate(range(0, count, _ON_A_SHELF), 1)
        ]
        asked = rng.sample(range(count), min(count, self.material.num_questions))
        turns = [
            (
                f"Which entry belongs to {keys[at]}, and which shelf is it on?",
                f"To {keys[at]} belongs {values[at]}, on shelf {at // _ON_A_SHELF + 1}.",
            )
            for at in asked
        ]
        text = "\n".join(["An inventory of shelves, each with names and their entries:", "", *shelves])
        return [(f"{text}\n\n{turns[0][0]}", turns[0][1]), *turns[1:]]
