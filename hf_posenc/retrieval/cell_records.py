"""What came back for one prompt, with everything that says how it was asked: a line of JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.records import JsonRecord, read_kind

_Z = 1.959964  # of a normal distribution's central 95 %


@dataclass(frozen=True)
class RetrievalRecord(JsonRecord):
    """One prompt of a task. ``context_length`` counts prompt and answer together, in tokens.

    ``depth`` is the percent of the free text before the needle, None where needles are spread over it;
    ``needle_places`` are the places of their first tokens. ``chat`` says whether the prompt was a user's turn in the
    chat template. Of the ``answers``, ``num_forced`` were right teacher-forced: the likeliest token was the right one
    wherever a token holds a character of it, which leaves out the word before it (None where the order is free);
    ``num_written`` stand in the greedy answer. ``n_tokens`` are the tokens that hold an answer, ``n_right`` of them
    were the likeliest, ``nll_sum`` is their loss in nats. ``text_hash`` is of the token ids of prompt and answer;
    ``run_key`` of all that decides the result, weights included; ``rope``, ``command`` and ``checkpoint_dtype`` as in
    ``Record``.
    """

    model: str
    method: str
    factor: float
    options: dict[str, Any]
    tokens_trained: int | None
    original_max_position_embeddings: int | None
    task: str
    context_length: int
    depth: float | None
    seed: int
    chat: bool
    num_prompt_tokens: int
    max_new_tokens: int
    needle_places: list[int]
    answers: list[str]
    num_forced: int | None
    num_written: int
    n_tokens: int
    n_right: int
    nll_sum: float
    forced: str
    written: str
    tokenizer_hash: str
    text_hash: str
    dtype: str
    attn_implementation: str
    versions: dict[str, str]
    seconds: float
    peak_memory_bytes: int
    run_key: str = field(repr=False)
    label: str = ""
    rope: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    checkpoint_dtype: str = ""

    MARK = "task"

    def score(self, by: str = "forced") -> float | None:
        """Return the share of the answers that were right, by "forced" or "written"."""
        right = self.num_forced if by == "forced" else self.num_written
        return None if right is None else right / len(self.answers)


def read_retrieval_records(path: str | Path) -> list[RetrievalRecord]:
    """Read the retrieval records of a file; the perplexities in it are passed over.

    Raises:
        ValueError: A line is not a record; the message names it.
    """
    return read_kind(path, RetrievalRecord)


def wilson_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, from scores between 0 and 1.

    Prompts count, not answers: those of one prompt are right or wrong together.

    Raises:
        ValueError: There are no scores.
    """
    count = len(scores)
    if count == 0:
        raise InvalidRequestError("an interval needs at least one score.")
    share, z2 = math.fsum(scores) / count, _Z**2
    middle = share + z2 / (2 * count)
    spread = _Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low, high = ((middle - spread) / (1 + z2 / count), (middle + spread) / (1 + z2 / count))
    return (0.0 if share == 0 else low, 1.0 if share == 1 else high)
