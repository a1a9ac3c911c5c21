"""What a task makes: what is hidden in a text, what is asked, and what has to come back."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Protocol

from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, at the depth that is requested, or anywhere: those keep their order."""

    text: str
    at_depth: bool = False


@dataclass(frozen=True)
class Listing:
    """A text that the task makes itself: ``write(n)`` has ``n`` of something, from ``least`` to ``most``."""

    write: Callable[[int], str]
    least: int
    most: int


@dataclass(frozen=True)
class Puzzle:
    """One instance of a task.

    Attributes:
        instruction: What comes before the text.
        question: What comes after it.
        answer_prefix: How the answer begins; the model goes on from here.
        answers: What has to be found, in the order in which it is written in the teacher-forced answer.
        needles: What is hidden in free text; or there is a ``listing``.
        listing: The text itself.
        ordered: Whether the order of the answers is the only right one; if not, teacher forcing says nothing.
        spare_tokens: Of a written answer, beyond those of the right one.
    """

    instruction: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    needles: tuple[Needle, ...] = ()
    listing: Listing | None = None
    ordered: bool = True
    spare_tokens: int = 16


class MakePuzzle(Protocol):
    """Makes one instance of a task for a context length in tokens; all that is random comes from ``rng``."""

    def __call__(self, rng: Random, context_length: int) -> Puzzle: ...


@dataclass(frozen=True)
class Task:
    """A task: ``make`` makes its instances, ``source`` is where it was published.

    ``has_depth`` says whether the answer lies at one depth of the text.
    """

    name: str
    make: MakePuzzle
    has_depth: bool
    source: str


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Return the words of four to ten letters in the novels that are written in lower case, sorted."""
    novels = (load_novel(name) for name in (HELD_OUT_NOVEL, *TRAIN_NOVELS))
    return tuple(sorted({word for text in novels for word in re.findall(r"\b[a-z]{4,10}\b", text)}))
