"""A task makes three things: what a text hides, the question, and the expected answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from uuid import UUID

from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel
from hf_posenc.errors import InvalidRequestError


@dataclass(frozen=True)
class Question:
    """One question of a text.

    Attributes:
        text: What comes after the text.
        answer_prefix: How the answer begins; the model goes on from here.
        answers: What has to be found, in the order in which it is written in the teacher-forced answer.
        needles: Which needles hold the answer, as indices in ``Puzzle.needles``. A question with one has its depth.
        ordered: Whether the order of the answers is the only right one; if not, teacher forcing says nothing.
        choices: Where the answer is one of a few, these: a model that writes several has answered with the first.
        spare_tokens: Tokens that a written answer may have beyond those of the right one.
    """

    text: str
    answer_prefix: str
    answers: tuple[str, ...]
    needles: tuple[int, ...] = ()
    ordered: bool = True
    choices: tuple[str, ...] = ()
    spare_tokens: int = 16


@dataclass(frozen=True)
class Listing:
    """A text that the task makes itself: ``write(n)`` has ``n`` of something, from ``least`` to ``most``."""

    write: Callable[[int], str]
    least: int
    most: int


@dataclass(frozen=True)
class Puzzle:
    """One text of a task, with its questions.

    The text is one of three: the documents, with the needles hidden in them; ``lines``, with the needles among them;
    or a ``listing``, which has no needles.

    Attributes:
        instruction: What comes before the text.
        questions: What is asked after it; each is put to the model as if it were the only one.
        needles: Sentences (or lines) to hide. Those that hold the answer lie at the requested depth, if there is one:
            with a single question, of a task that is measured by depth. All others are spread over the text, in this
            order.
        lines: Begins a list of lines, which is taken from until the text is full.
        listing: A text that depends on its size as a whole.
    """

    instruction: str
    questions: tuple[Question, ...]
    needles: tuple[str, ...] = ()
    lines: Callable[[], Iterator[str]] | None = None
    listing: Listing | None = None


# Makes one text of a task: from what all that is random comes from, the context length in tokens, and the number of
# questions.
MakePuzzle = Callable[[Random, int, int], Puzzle]


@dataclass(frozen=True)
class Task:
    """A task: ``make`` makes its texts, ``source`` is where it was published.

    ``has_depth`` says whether an answer lies at one depth of the text, ``several_questions`` whether one text can be
    asked more than one; if not, ``make`` is always called for one.
    """

    name: str
    make: MakePuzzle
    has_depth: bool
    source: str
    several_questions: bool

    @property
    def summary(self) -> str:
        """A description of the hidden facts and the question: the first line of the docstring of ``make``."""
        return (self.make.__doc__ or "").strip().partition("\n")[0]


# First names that no novel of the package has, so that only a task's own sentences are about these people.
PEOPLE = (
    *("Akiko", "Alejandro", "Amara", "Anselm", "Arjun", "Aylin", "Bogdan", "Bronwen", "Chidi", "Dalia", "Dmitri"),
    *("Ebba", "Eitan", "Elif", "Farouk", "Fergus", "Freya", "Gunnar", "Hadiya", "Hiroshi", "Ignacio", "Ilse"),
    *("Ingrid", "Isolde", "Jaromir", "Jovana", "Kalinda", "Kenji", "Kwame", "Lakshmi", "Leocadia", "Liesl", "Magnus"),
    *("Mahmoud", "Marisol", "Mei", "Naveen", "Niamh", "Nkechi", "Olumide", "Oksana", "Paloma", "Priya", "Qiang"),
    *("Radek", "Rukmini", "Saoirse", "Sefton", "Signe", "Takumi", "Tariq", "Thandiwe", "Tomasz", "Ulrike", "Vasilisa"),
    *("Wojtek", "Xiomara", "Yusuf", "Zeynep", "Zoltan"),
)


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Return the words of four to ten letters in the novels that are written in lower case, sorted."""
    novels = (load_novel(name) for name in (HELD_OUT_NOVEL, *TRAIN_NOVELS))
    return tuple(sorted({word for text in novels for word in re.findall(r"\b[a-z]{4,10}\b", text)}))


def has_words(text: str, words: str, ended: bool = False) -> bool:
    """Say whether a text has these words, in whatever case: this is how an answer is found in what a model writes.

    ``ended`` also wants a character behind them, for the text may go on.
    """
    return _place(text, words, ended) is not None


def num_written(text: str, answers: Sequence[str], choices: Sequence[str] = (), ended: bool = False) -> int:
    """Return the number of answers in a text; if they are one of some choices, only its first choice counts.

    BABILong too gives no point for a list of all places (arXiv:2406.10149, its published metric).
    """
    places = [place for choice in choices if (place := _place(text, choice, ended)) is not None]
    if places:
        start, end = min(places)
        text = f"{text[start:end]}."
    return sum(has_words(text, answer, ended) for answer in answers)


def _place(text: str, words: str, ended: bool) -> tuple[int, int] | None:
    """Return where these words first are in a text."""
    behind = r"(?=\W)" if ended else r"(?!\w)"
    match = re.search(rf"(?<!\w){re.escape(words)}{behind}", text, re.IGNORECASE)
    return match and match.span()


def draw_keys(rng: Random, count: int) -> list[str]:
    """Return different keys, each two words with a hyphen between them.

    Raises:
        ValueError: More are wanted than there are words for.
    """
    most = len(vocabulary()) // 2
    if count > most:
        raise InvalidRequestError(f"{count} keys of two words are wanted, and there are words for {most}: ask less.")
    words = rng.sample(vocabulary(), 2 * count)
    return [f"{one}-{other}" for one, other in zip(words[::2], words[1::2], strict=True)]


def draw_people(rng: Random, count: int) -> list[str]:
    """Return different first names.

    Raises:
        ValueError: More are wanted than there are.
    """
    if count > len(PEOPLE):
        raise InvalidRequestError(f"{count} people are wanted, and there are names for {len(PEOPLE)}: ask less.")
    return rng.sample(PEOPLE, count)


def draw_uuid(rng: Random) -> str:
    """Return a random UUID (version 4)."""
    return str(UUID(int=rng.getrandbits(128), version=4))
