"""Names and values that are in no document: what dictionaries and hidden sentences are about."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_ADJECTIVES = _words(
    "amber bitter brass bright broken calm clever copper cosy crooked dusty early faded gentle golden hollow humble "
    "hungry icy ivory jolly leafy lonely loud lucky mellow misty modest narrow noble olden painted pale plain polite "
    "purple quick quiet rapid rough rusty salty scarlet shallow silent silver sleepy slender smooth solid sour steady "
    "stormy sunny tender thirsty tidy tiny velvet wild windy wooden yellow"
)
_NOUNS = _words(
    "acorn anchor anvil apron arrow barrel basket beacon bell blanket bottle bridge broom bucket button candle canoe "
    "carpet castle chimney clock cloud compass cradle cushion drum feather ferry fiddle flute garden goblet hammer "
    "harbour harp helmet hinge kettle ladder lantern lemon mirror mitten needle orchard paddle pebble pepper pigeon "
    "pillow plough puppet quilt raven ribbon saddle sparrow spindle spoon thimble tunnel wagon whistle"
)

_CURRENCIES = _words("crowns ducats florins guineas guilders shillings thalers")
_MONTHS = _words("January February March April May June July August September October November December")
_CAPITALS_AND_DIGITS = "BCDFGHJKLMNPQRSTVWXZ23456789"


def names(rng: Random, count: int, syllables: int = 3) -> list[str]:
    """Return different made-up names, such as Kovari."""
    return _different(
        count, lambda: "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables)).capitalize()
    )


def phrase(rng: Random) -> str:
    """Return an adjective with a noun, such as amber lantern: one of some 4000."""
    return f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"


def amount(rng: Random) -> str:
    """Return an amount of money, such as 3,482 crowns."""
    return f"{rng.randint(1_000, 99_999):,} {rng.choice(_CURRENCIES)}"


def date(rng: Random) -> str:
    """Return a day, such as 14 March 1873."""
    return f"{rng.randint(1, 28)} {rng.choice(_MONTHS)} {rng.randint(1600, 1999)}"


def mark(rng: Random, most: int = 9) -> str:
    """Return groups of capitals and digits, such as R7K/2TM/94B: 2 of them, up to ``most``."""
    return "/".join("".join(rng.choices(_CAPITALS_AND_DIGITS, k=3)) for _ in range(rng.randint(2, most)))


def marks(rng: Random, count: int, most: int) -> list[str]:
    """Return different marks of up to ``most`` groups."""
    return _different(count, lambda: mark(rng, most))


def _different(count: int, make: Callable[[], str]) -> list[str]:
    """Return as many different words, in the order in which they are made."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[make()] = None
    return list(found)


def value(rng: Random, most: int) -> str:
    """Return a phrase, an amount, a date or a mark of up to ``most`` groups."""
    make = rng.choice((phrase, amount, date, partial(mark, most=most)))
    return make(rng)
