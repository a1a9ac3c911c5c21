"""The tasks by name. Passkey, and RULER's (arXiv:2404.06654, section 3) in our words and with free text around them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Protocol

from hf_posenc.retrieval import needles, vocabulary
from hf_posenc.retrieval.puzzle import Puzzle


class MakePuzzle(Protocol):
    """Makes one instance of a task for a context length in tokens."""

    def __call__(self, rng: Random, context_length: int) -> Puzzle: ...


@dataclass(frozen=True)
class Task:
    """How a task is made, and whether what is asked for lies at one depth."""

    make: MakePuzzle
    has_depth: bool


TASKS: dict[str, Task] = {
    "passkey": Task(needles.passkey, has_depth=True),
    "niah_single": Task(needles.niah_single, has_depth=True),
    "niah_multikey": Task(needles.niah_multikey, has_depth=True),
    "niah_multivalue": Task(needles.niah_multivalue, has_depth=False),
    "niah_multiquery": Task(needles.niah_multiquery, has_depth=False),
    "vt": Task(needles.variable_tracking, has_depth=False),
    "cwe": Task(vocabulary.common_words, has_depth=False),
    "fwe": Task(vocabulary.frequent_words, has_depth=False),
}
