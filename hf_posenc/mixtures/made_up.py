"""Names and values that are in no document: what dictionaries and hidden sentences are about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
# Digits twice, so that about half of what is drawn are digits.
_LETTERS_AND_DIGITS = "abcdefghijkmnopqrstuvwxyz" + 2 * "0123456789"
_HEXADECIMAL = "0123456789abcdef"  # of few characters, so that more of a mark has to be compared
_LONGEST_MARK = 27  # letters and digits: about as many tokens as a UUID has
_TIMES_AS_MANY = 4  # marks of a form as are asked for, so that few are drawn twice
_BETWEEN_GROUPS = "/_:+"  # no hyphen, as UUIDs have


def longest_mark(seq_len: int) -> int:
    """Return the largest number of letters and digits of a mark: few in short blocks, which need enough marks."""
    return max(6, min(_LONGEST_MARK, 3 * (seq_len // 200)))


def names(rng: Random, count: int) -> list[str]:
    """Return different made-up names, such as Kovari."""
    return _different(
        count, lambda: "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3)).capitalize()
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


def titles(rng: Random, count: int) -> list[str]:
    """Return different names of three words, such as Amber Lantern Bridge: of some 250,000."""
    return _different(count, lambda: f"{phrase(rng)} {rng.choice(_NOUNS)}".title())


@dataclass(frozen=True)
class Marks:
    """Marks of one form: groups of letters and digits, such as R7K/2TM/94B or 4q_0d_m1_9h.

    Attributes:
        characters: What letters and digits are drawn from.
        between: What separates the groups.
        size: Letters and digits of a group.
        groups: Groups of a mark.
    """

    characters: str
    between: str
    size: int
    groups: int

    @classmethod
    def of_any_form(cls, rng: Random, longest: int) -> Marks:
        """Return a form of two groups or more.

        Args:
            rng: What it is drawn from.
            longest: Letters and digits of a mark at most, 4 or more.
        """
        characters = rng.choice((_LETTERS_AND_DIGITS, _HEXADECIMAL))
        characters = rng.choice((characters, characters.upper()))
        size = rng.randint(2, min(5, longest // 2))
        return cls(characters, rng.choice(_BETWEEN_GROUPS), size, rng.randint(2, longest // size))

    def one(self, rng: Random) -> str:
        """Return a mark."""
        return self.between.join(self._group(rng) for _ in range(self.groups))

    def several(self, rng: Random, count: int) -> list[str]:
        """Return different marks; of more groups where there are few of this form."""
        marks = self
        while marks.number < _TIMES_AS_MANY * count:
            marks = replace(marks, groups=marks.groups + 1)
        return _different(count, lambda: marks.one(rng))

    @property
    def number(self) -> int:
        """How many marks of the form there are, each character counted once."""
        characters = {*self.characters}
        digits = sum(character.isdigit() for character in characters)
        return int((len(characters) ** self.size - digits**self.size) ** self.groups)

    def _group(self, rng: Random) -> str:
        while (group := "".join(rng.choices(self.characters, k=self.size))).isdigit():
            pass  # as a passkey is
        return group


def _different(count: int, make: Callable[[], str]) -> list[str]:
    """Return as many different words, in the order in which they are made."""
    words: dict[str, None] = {}
    while len(words) < count:
        words[make()] = None
    return list(words)
