"""Tasks about how often words occur in a list: RULER's common-words and frequent-words extraction."""

from __future__ import annotations

import math
import re
import string
from functools import lru_cache
from random import Random

from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel
from hf_posenc.retrieval.puzzle import Listing, Puzzle

_LONG = 4096  # tokens from which RULER repeats words more often
_NUM_COMMON = 10
_NUM_FREQUENT = 3
_ZETA_2 = math.pi**2 / 6
_TOKENS_PER_CODED_WORD = 50  # of context, to each different word
_LEAST_DRAWN = 100  # so that ranks 2 to 5 have different counts


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Return the words of four to ten letters in the novels that are written small, sorted."""
    novels = (load_novel(name) for name in (HELD_OUT_NOVEL, *TRAIN_NOVELS))
    return tuple(sorted({word for text in novels for word in re.findall(r"\b[a-z]{4,10}\b", text)}))


def common_words(rng: Random, context_length: int) -> Puzzle:
    """A numbered list in which ten words stand 30 times and all others 3 times; below 4096 tokens 6 times and once."""
    is_long = context_length >= _LONG
    order = rng.sample(vocabulary(), len(vocabulary()))
    common, seed = order[:_NUM_COMMON], rng.random()
    times = (30, 3) if is_long else (6, 1)
    told = "Below is a numbered list of words. Some occur more often than others. Remember those that occur most often."
    asked = f"Question: What are the {_NUM_COMMON} words that occur most often in the list above?"
    prefix = f"Answer: The {_NUM_COMMON} words that occur most often in the list are:"
    return Puzzle(
        instruction=f"{told}\n{_worked_example(rng, is_long, asked, prefix)}\n\n{told}",
        question=asked,
        answer_prefix=prefix,
        answers=tuple(common),
        listing=Listing(
            lambda count: _numbered(common, order[_NUM_COMMON : _NUM_COMMON + count], times, Random(seed)),
            least=1,
            most=len(order) - _NUM_COMMON,
        ),
        ordered=False,
        spare_tokens=48,  # for numbers before the words
    )


def frequent_words(rng: Random, context_length: int) -> Puzzle:
    """Made-up words whose counts fall with the square of their rank (zeta, alpha 2); the first is noise, "..."."""
    found: dict[str, None] = {}
    while len(found) < max(context_length // _TOKENS_PER_CODED_WORD, _NUM_FREQUENT + 2):
        found["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    ranked, seed = ["...", *found][:-1], rng.random()

    def write(drawn: int) -> str:
        counts = (int(drawn / rank**2 / _ZETA_2) for rank in range(1, len(ranked) + 1))
        text = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
        Random(seed).shuffle(text)
        return " ".join(text)

    return Puzzle(
        instruction="Below is a text of made-up words. Count how often each occurs, and find the three most frequent.",
        question="Question: Leave the dots '...' out. Which three words occur most often in the text above?",
        answer_prefix="Answer: The three words that occur most often are:",
        answers=tuple(ranked[1 : 1 + _NUM_FREQUENT]),
        listing=Listing(write, least=_LEAST_DRAWN, most=10 * context_length),
        spare_tokens=32,
    )


def _worked_example(rng: Random, is_long: bool, asked: str, prefix: str) -> str:
    """Return a short list with its question and answer, as RULER puts before the long one."""
    count, times = (40, (10, 3)) if is_long else (20, (3, 1))
    drawn = rng.sample(vocabulary(), count)
    common = drawn[:_NUM_COMMON]
    return f"{_numbered(common, drawn[_NUM_COMMON:], times, rng)}\n{asked}\n{prefix} {', '.join(common)}."


def _numbered(common: list[str], others: list[str], times: tuple[int, int], rng: Random) -> str:
    """Return ``1. word 2. word ...``, shuffled."""
    entries = common * times[0] + others * times[1]
    rng.shuffle(entries)
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, start=1))
