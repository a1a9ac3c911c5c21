"""Tasks with sentences hidden in free text: passkey, RULER's needles in a haystack, and its variable tracking."""

from __future__ import annotations

import string
from random import Random

from hf_posenc.retrieval.puzzle import Needle, Puzzle
from hf_posenc.retrieval.vocabulary import vocabulary

_SEVERAL = 4  # keys, values or questions, as in RULER's multi-key 1, multi-value and multi-query
_HOPS = 4


def passkey(rng: Random, context_length: int) -> Puzzle:
    """A number of five digits, hidden once (Mohtashami and Jaggi, arXiv:2305.16300)."""
    key = str(rng.randint(10_000, 99_999))
    return Puzzle(
        instruction="A pass key is hidden in the long text below. Find it and remember it. You will be asked for it.",
        question="What is the pass key?",
        answer_prefix="The pass key is",
        answers=(key,),
        needles=(Needle(f"The pass key is {key}. Remember it. {key} is the pass key.", at_depth=True),),
    )


def niah_single(rng: Random, context_length: int) -> Puzzle:
    """One key with one number of seven digits."""
    return _one_number(rng, num_others=0)


def niah_multikey(rng: Random, context_length: int) -> Puzzle:
    """Four keys with a number each; one is asked for, the others are distractors."""
    return _one_number(rng, num_others=_SEVERAL - 1)


def niah_multivalue(rng: Random, context_length: int) -> Puzzle:
    """One key with four numbers, all asked for; the question names no order, so only what is written is scored."""
    (key,), numbers = _keys(rng, 1), _numbers(rng, _SEVERAL)
    return _several_numbers(key, numbers, [(key, number) for number in numbers], ordered=False)


def niah_multiquery(rng: Random, context_length: int) -> Puzzle:
    """Four keys with a number each, all asked for, in an order that is not that of the text."""
    keys, numbers = _keys(rng, _SEVERAL), _numbers(rng, _SEVERAL)
    pairs = list(zip(keys, numbers, strict=True))
    hidden = rng.sample(pairs, len(pairs))
    return _several_numbers(f"{', '.join(keys[:-1])} and {keys[-1]}", numbers, hidden)


def variable_tracking(rng: Random, context_length: int) -> Puzzle:
    """A chain of five variables, each but the first set to the one before it; all with the value are asked for."""
    names, value, chain = _chain(rng, letters=5)
    shown, shown_value, example = _chain(rng, letters=3)
    told = "Variables are set in the text below. Keep track of which have the same value."
    asked = "Question: Which variables have the value {value}, directly or through other variables?\nAnswer:"
    prefix = f"The {_HOPS + 1} variables with the value {{value}} are:"
    worked = f"{asked} {prefix}".format(value=shown_value)
    return Puzzle(
        instruction="\n".join([told, "", *example, "", f"{worked} {', '.join(shown)}.", "", told]),
        question=asked.format(value=value).removesuffix("\nAnswer:"),
        answer_prefix=f"Answer: {prefix.format(value=value)}",
        answers=tuple(names),
        needles=tuple(Needle(line) for line in chain),
    )


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


def _several_numbers(asked: str, numbers: list[str], hidden: list[tuple[str, str]], ordered: bool = True) -> Puzzle:
    return Puzzle(
        instruction="Some secret numbers are hidden in the text below. Remember them. You will be asked for them.",
        question=f"What are all the secret numbers of {asked} in the text above?",
        answer_prefix=f"The secret numbers of {asked} in the text above are:",
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


def _chain(rng: Random, letters: int) -> tuple[list[str], int, list[str]]:
    """Return the variables of a chain, its value, and its lines."""
    names: list[str] = []
    while len(names) < _HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [] if name in names else [name]
    value = rng.randint(10_000, 99_999)
    sources = [str(value), *(f"VAR {name}" for name in names)]
    return names, value, [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=False)]
