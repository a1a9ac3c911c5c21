"""Multi-round reference, as in MRCR: a long talk of requests for verses, some asked for several times.

The verses are made from word lists of our own: they rhyme and make little sense.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

from hf_posenc.errors import InvalidRequestError
from hf_posenc.retrieving.tasks import register_task
from hf_posenc.retrieving.tasks.base import Puzzle, Question

_ORDINALS = ("first", "second", "third", "fourth")  # as often as a verse of one kind and subject is asked for
_KINDS = ("poem", "song", "ballad", "lullaby", "hymn")
_SUBJECTS = (
    *("anchors", "apples", "badgers", "balloons", "barns", "beetles", "bicycles", "bridges", "brooms", "candles"),
    *("canoes", "castles", "cherries", "clowns", "comets", "cranes", "dolphins", "dragons", "eagles", "ferries"),
    *("foxes", "gardens", "geese", "glaciers", "hedgehogs", "islands", "kettles", "ladders", "lighthouses", "llamas"),
    *("mirrors", "mushrooms", "owls", "pirates", "pumpkins", "rivers", "shadows", "snails", "trains", "volcanoes"),
)
_RHYMES = (
    *(("night", "light"), ("stone", "throne"), ("rain", "lane"), ("hill", "mill"), ("door", "shore"), ("tree", "sea")),
    *(("town", "crown"), ("sand", "band"), ("dream", "stream"), ("bell", "well"), ("moon", "spoon"), ("hall", "wall")),
    *(("bread", "thread"), ("road", "load"), ("boat", "coat"), ("ring", "spring"), ("lake", "rake"), ("star", "jar")),
    *(("flower", "tower"), ("house", "mouse"), ("clock", "rock"), ("cart", "heart"), ("glass", "grass")),
    *(("nest", "guest"), ("cloud", "crowd"), ("kite", "knight"), ("fire", "wire"), ("cage", "stage")),
)
_ADJECTIVES = (
    *("amber", "brave", "broken", "crooked", "distant", "empty", "faded", "gentle", "golden", "hidden", "hollow"),
    *("humble", "icy", "lonely", "narrow", "pale", "patient", "quiet", "rusty", "silver", "sleepy", "tall", "wild"),
)
_FIGURES = (
    *("baker", "beggar", "captain", "clerk", "cook", "dancer", "farmer", "fiddler", "giant", "hunter", "king"),
    *("miller", "monk", "painter", "pilgrim", "queen", "sailor", "shepherd", "soldier", "tailor", "widow", "wizard"),
)
_VERBS = (
    *("dream", "drift", "gleam", "glow", "hide", "hum", "laugh", "linger", "listen", "roam", "shiver", "sing"),
    *("sleep", "tremble", "wait", "wander", "weep", "whisper"),
)
_PREPOSITIONS = ("above", "before", "behind", "below", "beside", "beyond", "near", "under")


@register_task(
    "mrcr",
    has_depth=False,
    source="MRCR: Michelangelo, arXiv:2409.12640, and OpenAI 2025 (huggingface.co/datasets/openai/mrcr), in our words",
    several_questions=True,
)
def multi_round(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """One of four verses of the same kind and subject, word for word, in a long talk of requests for verses.

    The talk fills the text, so the number of other verses grows with the length. Each four questions share their kind
    and subject.
    """
    pairs = list(product(_KINDS, _SUBJECTS))
    rng.shuffle(pairs)
    num_groups = -(-num_questions // len(_ORDINALS))
    most = len(pairs) // 2  # the others are what the rest of the talk is about
    if num_groups > most:
        raise InvalidRequestError(
            f"task 'mrcr' has at most {most * len(_ORDINALS)} questions of a text, got {num_questions}: ask less of "
            "one text, and of more texts."
        )
    rounds = [pair for pair in pairs[:num_groups] for _ in _ORDINALS]
    rng.shuffle(rounds)
    verses: list[tuple[str, ...]] = []
    for _, subject in rounds:
        verses.append(_verse(rng, subject, not_among={line for verse in verses for line in verse}))
    places = {pair: [at for at, one in enumerate(rounds) if one == pair] for pair in pairs[:num_groups]}
    asked = sorted(rng.sample([(pair, nth) for pair in places for nth in range(len(_ORDINALS))], num_questions))
    seed = rng.random()

    def other_rounds() -> Iterator[str]:
        others = Random(seed)
        while True:
            kind, subject = others.choice(pairs[num_groups:])
            yield _round(kind, subject, _verse(others, subject))

    return Puzzle(
        instruction=(
            "Below is a talk between a user and an assistant, who writes verses. Remember all of them. You will be "
            "asked to repeat one."
        ),
        questions=tuple(
            Question(
                text=f"Question: What is the {_ORDINALS[nth]} {kind} about {subject} in the talk above, word for word?",
                answer_prefix=f"Answer: The {_ORDINALS[nth]} {kind} about {subject} is:",
                answers=verses[places[kind, subject][nth]],
                needles=(places[kind, subject][nth],),
            )
            for (kind, subject), nth in asked
        ),
        needles=tuple(_round(*pair, verse) for pair, verse in zip(rounds, verses, strict=True)),
        lines=other_rounds,
    )


def _round(kind: str, subject: str, verse: tuple[str, ...]) -> str:
    return f"User: Write a {kind} about {subject}.\nAssistant: {', '.join(verse)}."


def _verse(rng: Random, subject: str, not_among: set[str] | None = None) -> tuple[str, ...]:
    """Return four lines in two pairs that rhyme, none of which is one of those given."""
    ends = [word for rhyme in rng.sample(_RHYMES, 2) for word in rng.sample(rhyme, 2)]
    lines: list[str] = []
    while len(lines) < len(ends):
        where = f"{rng.choice(_PREPOSITIONS)} the {rng.choice(_ADJECTIVES)} {ends[len(lines)]}"
        who = f"{rng.choice(_ADJECTIVES)} {subject}" if not lines else f"the {rng.choice(_FIGURES)}s"
        line = f"{who} {rng.choice(_VERBS)} {where}"
        lines += [line] if line not in (not_among or ()) else []
    return tuple(lines)
