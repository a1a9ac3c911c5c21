"""One instance of a task: what is hidden in a text, what is asked, and what has to come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Needle:
    """A sentence to hide, at the depth that is asked for, or somewhere: those keep their order."""

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
        instruction: What stands before the text.
        question: What stands behind it.
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
