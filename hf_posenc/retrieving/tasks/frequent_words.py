"""RULER's frequent-words extraction: made-up words, some far more frequent than others."""

from __future__ import annotations

import math
import string
from random import Random

from hf_posenc.retrieving.tasks import register_task
from hf_posenc.retrieving.tasks.base import Listing, Puzzle, Question

_NUM_FREQUENT = 3
_ZETA_2 = math.pi**2 / 6
_TOKENS_PER_CODED_WORD = 50  # of context, to each different word
_LEAST_DRAWN = 100  # so that ranks 2 to 5 have different counts


@register_task("fwe", has_depth=False, source="RULER, arXiv:2404.06654, section 3, in our words")
def frequent_words(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """The three most frequent of many made-up words.

    Their counts fall with the square of their rank (zeta, alpha 2); the first is noise, "...".
    """
    words: dict[str, None] = {}
    while len(words) < max(context_length // _TOKENS_PER_CODED_WORD, _NUM_FREQUENT + 2):
        words["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    ranked, seed = ["...", *words][:-1], rng.random()

    def write(drawn: int) -> str:
        counts = (int(drawn / rank**2 / _ZETA_2) for rank in range(1, len(ranked) + 1))
        text = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
        Random(seed).shuffle(text)
        return " ".join(text)

    return Puzzle(
        instruction="Below is a text of made-up words. Count how often each occurs, and find the three most frequent.",
        questions=(
            Question(
                text="Question: Leave the dots '...' out. Which three words occur most often in the text above?",
                answer_prefix="Answer: The three words that occur most often are:",
                answers=tuple(ranked[1 : 1 + _NUM_FREQUENT]),
                ordered=False,
                spare_tokens=32,
            ),
        ),
        listing=Listing(write, least=_LEAST_DRAWN, most=10 * context_length),
    )
