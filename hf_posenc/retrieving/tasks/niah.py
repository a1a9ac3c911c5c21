"""RULER's needles in a haystack: secret numbers (or codes) of keys, hidden in a book, in noise or among their like.

With several questions of a text, each has needles of its own, and those of the others are distractors as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from random import Random

from hf_posenc.retrieving.tasks import register_task
from hf_posenc.retrieving.tasks.base import Puzzle, Question, draw_keys, draw_uuid, vocabulary

_RULER = "RULER, arXiv:2404.06654, section 3, in our words and with other texts"
_SEVERAL = 4  # keys, values or questions, as in RULER's multi-key 1, multi-value and multi-query
_SEVEN_DIGITS = (1_000_000, 10_000_000)
_NOISE = "The road is long. The hills are green. The wind is cold. We walk on. It will be dark soon."
_Pair = tuple[str, str]  # a key and its number or code


@register_task("niah_single_1", has_depth=True, source=_RULER, several_questions=True)
def niah_single_1(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """One key with one number of seven digits, in sentences that are always the same."""
    return _one_value(_keys_and_numbers(rng, num_questions), rng, num_questions, lines=lambda: repeat(_NOISE))


@register_task("niah_single_2", has_depth=True, source=_RULER, several_questions=True)
def niah_single_2(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """One key with one number of seven digits, in a book."""
    return _one_value(_keys_and_numbers(rng, num_questions), rng, num_questions)


@register_task("niah_single_3", has_depth=True, source=_RULER, several_questions=True)
def niah_single_3(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """One key with one code, a UUID, in a book."""
    pairs = [(key, draw_uuid(rng)) for key in draw_keys(rng, num_questions)]
    return _one_value(pairs, rng, num_questions, what="code")


@register_task("niah_multikey_1", has_depth=True, source=_RULER, several_questions=True)
def niah_multikey_1(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """Four keys with a number each in a book; one is asked for, the others are distractors."""
    return _one_value(_keys_and_numbers(rng, num_questions + _SEVERAL - 1), rng, num_questions)


@register_task("niah_multikey_2", has_depth=True, source=_RULER, several_questions=True)
def niah_multikey_2(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """One key with one number, in a text of nothing but other keys with numbers, more the longer it is."""
    pairs, seed = _keys_and_numbers(rng, num_questions), rng.random()

    def others() -> Iterator[str]:
        drawn, known = Random(seed), {key for key, _ in pairs}
        while len(known) < len(vocabulary()) ** 2 // 2:
            key = "-".join(drawn.sample(vocabulary(), 2))
            if key not in known:
                known.add(key)
                yield _says(key, str(drawn.randrange(*_SEVEN_DIGITS)))

    return _one_value(pairs, rng, num_questions, lines=others)


@register_task("niah_multikey_3", has_depth=True, source=_RULER, several_questions=True)
def niah_multikey_3(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """One key with one code, both UUIDs, in a text of nothing but other keys with codes, more the longer it is."""
    pairs, seed = [(draw_uuid(rng), draw_uuid(rng)) for _ in range(num_questions)], rng.random()

    def others() -> Iterator[str]:
        drawn = Random(seed)
        while True:  # 122 random bits: no key is drawn twice
            yield _says(draw_uuid(drawn), draw_uuid(drawn), "code")

    return _one_value(pairs, rng, num_questions, what="code", lines=others)


@register_task("niah_multivalue", has_depth=False, source=_RULER, several_questions=True)
def niah_multivalue(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """One key with four numbers in a book, all asked for.

    The question names no order, so only what is written is scored.
    """
    keys, numbers = draw_keys(rng, num_questions), _numbers(rng, _SEVERAL * num_questions)
    pairs = [(keys[at // _SEVERAL], number) for at, number in enumerate(numbers)]
    hidden = rng.sample(pairs, len(pairs)) if num_questions > 1 else pairs
    groups = [pairs[at : at + _SEVERAL] for at in range(0, len(pairs), _SEVERAL)]
    return _several_numbers(hidden, dict(zip(keys, groups, strict=True)), ordered=False)


@register_task("niah_multiquery", has_depth=False, source=_RULER, several_questions=True)
def niah_multiquery(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """Four keys with a number each in a book, all asked for, in an order that is not that of the text."""
    pairs = _keys_and_numbers(rng, _SEVERAL * num_questions)
    hidden = rng.sample(pairs, len(pairs))
    groups = [pairs[at : at + _SEVERAL] for at in range(0, len(pairs), _SEVERAL)]
    asked = {f"{', '.join(key for key, _ in group[:-1])} and {group[-1][0]}": group for group in groups}
    return _several_numbers(hidden, asked, ordered=True)


def _one_value(
    pairs: Sequence[_Pair],
    rng: Random,
    num_questions: int,
    what: str = "number",
    lines: Callable[[], Iterator[str]] | None = None,
) -> Puzzle:
    # Among the others' needles with several questions; in front of them with one, which lies at the requested depth.
    asked = sorted(rng.sample(range(len(pairs)), num_questions)) if num_questions > 1 else [0]
    return Puzzle(
        instruction=f"Secret {what}s of keys are hidden in the text below. Remember them. You will be asked for one.",
        questions=tuple(
            Question(
                text=f"What is the secret {what} of {pairs[at][0]} in the text above?",
                answer_prefix=f"The secret {what} of {pairs[at][0]} in the text above is",
                answers=(pairs[at][1],),
                needles=(at,),
            )
            for at in asked
        ),
        needles=tuple(_says(*pair, what) for pair in pairs),
        lines=lines,
    )


def _several_numbers(hidden: Sequence[_Pair], asked: dict[str, list[_Pair]], ordered: bool) -> Puzzle:
    return Puzzle(
        instruction="Some secret numbers are hidden in the text below. Remember them. You will be asked for them.",
        questions=tuple(
            Question(
                text=f"What are all the secret numbers of {keys} in the text above?",
                answer_prefix=f"The secret numbers of {keys} in the text above are:",
                answers=tuple(number for _, number in pairs),
                needles=tuple(hidden.index(pair) for pair in pairs),
                spare_tokens=64,  # for words between the numbers
                ordered=ordered,
            )
            for keys, pairs in asked.items()
        ),
        needles=tuple(_says(*pair) for pair in hidden),
    )


def _says(key: str, value: str, what: str = "number") -> str:
    return f"One of the secret {what}s of {key} is {value}."


def _keys_and_numbers(rng: Random, count: int) -> list[_Pair]:
    return list(zip(draw_keys(rng, count), _numbers(rng, count), strict=True))


def _numbers(rng: Random, count: int) -> list[str]:
    return [str(number) for number in rng.sample(range(*_SEVEN_DIGITS), count)]
