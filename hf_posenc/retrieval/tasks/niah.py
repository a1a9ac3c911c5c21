"""RULER's needles in a haystack: secret numbers of keys, hidden in free text."""

from __future__ import annotations

from random import Random

from hf_posenc.retrieval.tasks import register_task
from hf_posenc.retrieval.tasks.base import Needle, Puzzle, vocabulary

_RULER = "RULER, arXiv:2404.06654, section 3, in our words and with free text"
_SEVERAL = 4  # keys, values or questions, as in RULER's multi-key 1, multi-value and multi-query


@register_task("niah_single", has_depth=True, source=_RULER)
def niah_single(rng: Random, context_length: int) -> Puzzle:
    """One key with one number of seven digits."""
    return _one_number(rng, num_others=0)


@register_task("niah_multikey", has_depth=True, source=_RULER)
def niah_multikey(rng: Random, context_length: int) -> Puzzle:
    """Four keys with a number each; one is asked for, the others are distractors."""
    return _one_number(rng, num_others=_SEVERAL - 1)


@register_task("niah_multivalue", has_depth=False, source=_RULER)
def niah_multivalue(rng: Random, context_length: int) -> Puzzle:
    """One key with four numbers, all asked for; the question names no order, so only what is written is scored."""
    (key,), numbers = _keys(rng, 1), _numbers(rng, _SEVERAL)
    return _several_numbers(key, numbers, [(key, number) for number in numbers], ordered=False)


@register_task("niah_multiquery", has_depth=False, source=_RULER)
def niah_multiquery(rng: Random, context_length: int) -> Puzzle:
    """Four keys with a number each, all asked for, in an order that is not that of the text."""
    keys, numbers = _keys(rng, _SEVERAL), _numbers(rng, _SEVERAL)
    pairs = list(zip(keys, numbers, strict=True))
    hidden = rng.sample(pairs, len(pairs))
    return _several_numbers(f"{', '.join(keys[:-1])} and {keys[-1]}", numbers, hidden)


def _one_number(rng: Random, num_others: int) -> Puzzle:
    keys, numbers = _keys(rng, 1 + num_others), _numbers(rng, 1 + num_others)
    pairs = zip(keys, numbers, strict=True)
    return Puzzle(
        instruction="A secret number is hidden in the text below. Remember it. You will be asked for it.",
        question=f"What is the secret number of {keys[0]} in the text above?",
        answer_prefix=f"The secret number of {keys[0]} in the text above is",
        answers=(numbers[0],),
        needles=tuple(Needle(_says(*pair), at_depth=index == 0) for index, pair in enumerate(pairs)),
    )


def _several_numbers(keys: str, numbers: list[str], hidden: list[tuple[str, str]], ordered: bool = True) -> Puzzle:
    return Puzzle(
        instruction="Some secret numbers are hidden in the text below. Remember them. You will be asked for them.",
        question=f"What are all the secret numbers of {keys} in the text above?",
        answer_prefix=f"The secret numbers of {keys} in the text above are:",
        answers=tuple(numbers),
        needles=tuple(Needle(_says(*pair)) for pair in hidden),
        spare_tokens=64,  # for words between the numbers
        ordered=ordered,
    )


def _says(key: str, number: str) -> str:
    return f"One of the secret numbers of {key} is {number}."


def _keys(rng: Random, count: int) -> list[str]:
    """Return different keys, each two words with a hyphen between them."""
    found = rng.sample(vocabulary(), 2 * count)
    return [f"{one}-{other}" for one, other in zip(found[::2], found[1::2], strict=True)]


def _numbers(rng: Random, count: int) -> list[str]:
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]
