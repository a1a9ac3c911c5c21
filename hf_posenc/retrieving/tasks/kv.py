"""InfiniteBench's key-value retrieval: the value of a key in a long JSON object of UUIDs."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from hf_posenc.retrieving.tasks import register_task
from hf_posenc.retrieving.tasks.base import Puzzle, Question, draw_uuid


@register_task(
    "kv",
    has_depth=True,
    source="InfiniteBench (Retrieve.KV), arXiv:2402.13718, after Liu et al. 2023, arXiv:2307.03172",
    several_questions=True,
)
def key_values(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """The value of a key in a JSON object: all keys and values are UUIDs, one pair a line.

    The object fills the text, so the number of other pairs grows with the length. Each question has a pair of its own.
    """
    pairs = [(draw_uuid(rng), draw_uuid(rng)) for _ in range(num_questions)]
    first, seed = (draw_uuid(rng), draw_uuid(rng)), rng.random()

    def other_pairs() -> Iterator[str]:
        others = Random(seed)
        while True:  # 122 random bits: no key is drawn twice
            yield _line(draw_uuid(others), draw_uuid(others))

    return Puzzle(
        # The pair that needs no comma before it; all others bring theirs, so that any number of lines is valid JSON.
        instruction=f'Below is a JSON object. Remember its keys and values.\n\n{{"{first[0]}": "{first[1]}"',
        questions=tuple(
            Question(
                text=f'}}\n\nWhat is the value of the key "{key}" in the JSON object above?',
                answer_prefix=f'The value of the key "{key}" is',
                answers=(value,),
                needles=(at,),
            )
            for at, (key, value) in enumerate(pairs)
        ),
        needles=tuple(_line(*pair) for pair in pairs),
        lines=other_pairs,
    )


def _line(key: str, value: str) -> str:
    return f', "{key}": "{value}"'
