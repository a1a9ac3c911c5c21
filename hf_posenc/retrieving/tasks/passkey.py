"""Passkey retrieval: one number in a long text, or several with names."""

from __future__ import annotations

from random import Random

from hf_posenc.retrieving.tasks import register_task
from hf_posenc.retrieving.tasks.base import Puzzle, Question, draw_keys


@register_task("passkey", has_depth=True, source="Mohtashami and Jaggi 2023, arXiv:2305.16300", several_questions=True)
def passkey(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """A number of five digits, hidden once in a book.

    With several questions there is one for each of several names.
    """
    if num_questions > 1:
        return _named_keys(rng, num_questions)
    key = str(rng.randint(10_000, 99_999))
    return Puzzle(
        instruction="A pass key is hidden in the long text below. Find it and remember it. You will be asked for it.",
        questions=(Question("What is the pass key?", "The pass key is", (key,), needles=(0,)),),
        needles=(f"The pass key is {key}. Remember it. {key} is the pass key.",),
    )


def _named_keys(rng: Random, count: int) -> Puzzle:
    names, keys = draw_keys(rng, count), [str(key) for key in rng.sample(range(10_000, 100_000), count)]
    return Puzzle(
        instruction="Pass keys are hidden in the long text below. Find and remember them. You will be asked for one.",
        questions=tuple(
            Question(f"What is the pass key of {name}?", f"The pass key of {name} is", (key,), needles=(at,))
            for at, (name, key) in enumerate(zip(names, keys, strict=True))
        ),
        needles=tuple(
            f"The pass key of {name} is {key}. Remember it. {key} is the pass key of {name}."
            for name, key in zip(names, keys, strict=True)
        ),
    )
