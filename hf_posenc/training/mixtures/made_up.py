"""Names and phrases that are in no document: what dictionaries and hidden sentences are about."""

from __future__ import annotations

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


def names(rng: Random, count: int, syllables: int = 3) -> list[str]:
    """Return different made-up names, such as Kovari."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables)).capitalize()] = None
    return list(found)


def phrase(rng: Random) -> str:
    """Return an adjective with a noun, such as amber lantern: one of some 4000."""
    return f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"
