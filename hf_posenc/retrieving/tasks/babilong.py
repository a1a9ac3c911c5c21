"""Facts about a simulated world in a book, as in BABILong: who is where, and where a thing is that people carry.

The world and its sentences are our own, not those of bAbI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from hf_posenc.errors import InvalidRequestError
from hf_posenc.retrieving.tasks import register_task
from hf_posenc.retrieving.tasks.base import Puzzle, Question, draw_people

_SOURCE = "BABILong, arXiv:2406.10149, with a world and sentences of our own"
_PLACES = ("attic", "bakery", "cellar", "chapel", "harbour", "library", "orchard", "stable")
_THINGS = (
    *("accordion", "anvil", "atlas", "axe", "bagpipe", "bellows", "birdcage", "bugle", "cello", "chisel", "compass"),
    *("crowbar", "drum", "easel", "fiddle", "flagon", "flute", "funnel", "globe", "gong", "hammock", "harp"),
    *("hourglass", "kettle", "kite", "ladle", "lantern", "lute", "magnet", "mallet", "microscope", "oboe", "padlock"),
    *("parasol", "pitchfork", "pulley", "quiver", "rake", "rolling pin", "rucksack", "sextant", "shovel", "sieve"),
    *("sledge", "snorkel", "spade", "spindle", "stopwatch", "tambourine", "teapot", "telescope", "toolbox", "tripod"),
    *("trombone", "trowel", "tuba", "typewriter", "violin", "wheelbarrow", "zither"),
)
_GOES = ("{} walked over to the {}.", "{} has come to the {}.", "{} now stands in the {}.", "{} moved on to the {}.")
_TAKES = ("{} picked up the {}.", "{} took the {} along.", "{} got hold of the {}.")
_LEAVES = ("{} put the {} down.", "{} left the {} there.", "{} parted with the {}.")
_MOVES_EACH = 3
_FACTS_EACH = 8  # of a thing, at least
_TAKES_SHARE, _LEAVES_SHARE = 0.6, 0.3  # of the turns of a person who can
_FEWEST_PEOPLE, _FEWEST_THINGS = 4, 3


@register_task("babilong_qa1", has_depth=False, source=f"{_SOURCE}: qa1", several_questions=True)
def one_fact(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """Where a person is, among facts in a book about who went where: one supporting fact, the person's last move.

    The number of facts is that of the people; it is the book that grows with the length.
    """
    world = _World(rng, draw_people(rng, max(_FEWEST_PEOPLE, num_questions)), ())
    order = [person for person in world.people for _ in range(_MOVES_EACH)]
    rng.shuffle(order)
    for person in order:
        world.move(person)
    return _puzzle(
        world,
        [
            Question(
                text=f"Question: Where is {person} now?",
                answer_prefix=f"Answer: {person} is now in the",
                answers=(world.moves[person][-1].place,),
                choices=_PLACES,
                needles=(world.moves[person][-1].fact,),
            )
            for person in world.people[:num_questions]
        ],
    )


@register_task("babilong_qa2", has_depth=False, source=f"{_SOURCE}: qa2", several_questions=True)
def two_facts(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """Where a thing is, among facts in a book about who went where with what: two supporting facts.

    They are who took or left the thing last, and where that person was then.
    """
    world = _simulated(rng, num_questions, lambda thing: thing.at is not None)
    return _puzzle(
        world,
        [
            Question(
                text=f"Question: Where is the {thing.name} now?",
                answer_prefix=f"Answer: The {thing.name} is now in the",
                answers=(thing.at.place,),
                choices=_PLACES,
                needles=tuple(sorted((thing.at.fact, thing.handled))),
            )
            for thing in world.things
            if thing.at is not None
        ],
    )


@register_task("babilong_qa3", has_depth=False, source=f"{_SOURCE}: qa3", several_questions=True)
def three_facts(rng: Random, context_length: int, num_questions: int) -> Puzzle:
    """Where a thing was before it came where it is now, among facts in a book: three supporting facts.

    They are who took the thing there, and where that person was before and after. bAbI names the place where it is
    now; here that has to be found too, for a thing may come to a place more than once.
    """
    world = _simulated(rng, num_questions, lambda thing: bool(thing.carried))
    return _puzzle(
        world,
        [
            Question(
                text=f"Question: Where was the {thing.name} before it came to the place where it is now?",
                answer_prefix=f"Answer: Before that, the {thing.name} was in the",
                answers=(thing.carried[0].place,),
                choices=_PLACES,
                needles=tuple(sorted(visit.fact for visit in thing.carried)),
            )
            for thing in world.things
        ],
    )


def _puzzle(world: _World, questions: Sequence[Question]) -> Puzzle:
    return Puzzle(
        instruction=(
            "Sentences about some people are hidden in the book below: where they go, what they take and what they "
            "leave. A thing that is carried is where its carrier is. Later sentences happen later. Remember them."
        ),
        questions=tuple(questions),
        needles=tuple(world.facts),
    )


def _simulated(rng: Random, num_questions: int, is_ready: Callable[[_Thing], bool]) -> _World:
    """Return a world in which enough has happened to ask about its first things.

    Raises:
        ValueError: More is asked than there are things.
    """
    if num_questions > len(_THINGS):
        raise InvalidRequestError(
            f"the simulated world has {len(_THINGS)} things, so a text cannot have {num_questions} questions: ask less "
            "of one text, and of more texts."
        )
    things = rng.sample(_THINGS, max(_FEWEST_THINGS, num_questions))
    world = _World(rng, draw_people(rng, max(_FEWEST_PEOPLE, len(things) // 2)), things)
    ready: list[_Thing] = []
    while len(world.facts) < _FACTS_EACH * len(things) or len(ready) < num_questions:
        world.step(is_ready)
        ready = [thing for thing in world.things if is_ready(thing)]
    world.things = rng.sample(ready, num_questions)
    return world


@dataclass(frozen=True)
class _Visit:
    """A place, and the index of the fact that says how somebody or something came to be there."""

    place: str
    fact: int


@dataclass
class _Thing:
    """A thing.

    Attributes:
        name: What it is called.
        holder: Who carries it.
        at: Where it is: the visit of the person who has it, or of the one who left it there.
        handled: The last fact that says that somebody took or left it.
        taken: The last fact that says that somebody took it.
        carried: How it came where it is: the place before, by the carrier's visit and by the taking, and the visit to
            the place where it is.
    """

    name: str
    holder: str | None = None
    at: _Visit | None = None
    handled: int = -1
    taken: int = -1
    carried: tuple[_Visit, ...] = ()


class _World:
    """People who go to places, and things that they take and leave; ``facts`` says what happened, in order."""

    def __init__(self, rng: Random, people: Sequence[str], things: Sequence[str]) -> None:
        self.rng, self.people = rng, list(people)
        self.things = [_Thing(name) for name in things]
        self.moves: dict[str, list[_Visit]] = {person: [] for person in people}
        self.facts: list[str] = []

    def move(self, person: str) -> None:
        before = self._here(person)
        place = self.rng.choice([one for one in _PLACES if before is None or one != before.place])
        visit = _Visit(place, self._say(_GOES, person, place))
        self.moves[person].append(visit)
        for thing in self.things:
            if thing.holder == person and before is not None:
                thing.carried = (before, _Visit(before.place, thing.taken), visit)
                thing.at = visit

    def take(self, person: str, thing: _Thing) -> None:
        thing.holder, thing.at = person, self._here(person)
        thing.taken = thing.handled = self._say(_TAKES, person, thing.name)

    def leave(self, person: str, thing: _Thing) -> None:
        thing.holder = None
        thing.handled = self._say(_LEAVES, person, thing.name)

    def step(self, is_ready: Callable[[_Thing], bool]) -> None:
        """Let a random person take, leave or go, as far as it is possible; what is not ready is not left.

        Else things would lie where they were taken until somebody comes by, and a text would need far more facts.
        """
        person = self.rng.choice(self.people)
        here = self._here(person)
        held = [thing for thing in self.things if thing.holder == person]
        free = [thing for thing in self.things if thing.holder is None]
        near = [one for one in free if here is not None and (one.at is None or one.at.place == here.place)]
        if near and not held and self.rng.random() < _TAKES_SHARE:
            self.take(person, self.rng.choice(near))
        elif held and is_ready(held[0]) and self.rng.random() < _LEAVES_SHARE:
            self.leave(person, held[0])
        else:
            self.move(person)

    def _here(self, person: str) -> _Visit | None:
        return self.moves[person][-1] if self.moves[person] else None

    def _say(self, sentences: Sequence[str], *words: str) -> int:
        self.facts.append(self.rng.choice(sentences).format(*words))
        return len(self.facts) - 1
