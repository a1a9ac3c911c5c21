"""RULER's common-words extraction: a list in which ten words are repeated more often than the others."""

from __future__ import annotations

from random import Random

from hf_posenc.retrieving.tasks import register_task
from hf_posenc.retrieving.tasks.base import Listing, Puzzle, Question, vocabulary

_LONG = 4096  # tokens from which RULER repeats words more often
_NUM_COMMON = 10


@register_task("cwe", has_depth=False, source="RULER, arXiv:2404.06654, section 3, in our words")
def common_words(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """The ten words that occur most often in a numbered list.

    They occur 30 times and all others 3 times; below 4096 tokens 6 times and once.
    """
    is_long = context_length >= _LONG
    order = rng.sample(vocabulary(), len(vocabulary()))
    common, seed = order[:_NUM_COMMON], rng.random()
    times = (30, 3) if is_long else (6, 1)
    instruction = (
        "Below is a numbered list of words. Some occur more often than others. Remember those that occur most often."
    )
    question = f"Question: What are the {_NUM_COMMON} words that occur most often in the list above?"
    prefix = f"Answer: The {_NUM_COMMON} words that occur most often in the list are:"
    return Puzzle(
        instruction=f"{instruction}\n{_worked_example(rng, is_long, question, prefix)}\n\n{instruction}",
        questions=(
            # spare tokens for numbers before the words
            Question(question, prefix, answers=tuple(common), ordered=False, spare_tokens=48),
        ),
        listing=Listing(
            lambda count: _numbered(common, order[_NUM_COMMON : _NUM_COMMON + count], times, Random(seed)),
            least=1,
            most=len(order) - _NUM_COMMON,
        ),
    )


def _worked_example(rng: Random, is_long: bool, question: str, prefix: str) -> str:
    """Return a short list with its question and answer, as RULER puts before the long one."""
    count, times = (40, (10, 3)) if is_long else (20, (3, 1))
    drawn = rng.sample(vocabulary(), count)
    common = drawn[:_NUM_COMMON]
    return f"{_numbered(common, drawn[_NUM_COMMON:], times, rng)}\n{question}\n{prefix} {', '.join(common)}."


def _numbered(common: list[str], others: list[str], times: tuple[int, int], rng: Random) -> str:
    """Return ``1. word 2. word ...``, shuffled."""
    entries = common * times[0] + others * times[1]
    rng.shuffle(entries)
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, start=1))
