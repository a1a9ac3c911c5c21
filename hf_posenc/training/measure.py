"""Perplexity before and after training: which texts are held out, which lengths are measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_posenc.evaluation import Record, perplexity
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.packing import Tokens

logger = logging.getLogger(__name__)

_HELD_OUT = 20  # one part in so many


def num_held_out(num_documents: int) -> int:
    """Return how many of several documents are held out: the last twentieth, one at least."""
    return max(1, round(num_documents / _HELD_OUT))


def hold_out(documents: Sequence[Tokens], longest: int) -> tuple[list[Tokens], list[Tokens]]:
    """Split documents into those to train on and the last twentieth, to measure on.

    Of a single document the tail is held out: a twentieth, but at least ``longest`` tokens where that is no more than a
    quarter. Where it is more, a twentieth has to do, and ``longest`` is not measured.

    Args:
        documents: Token ids, 1-D.
        longest: The longest length to be measured, in tokens.
    """
    if len(documents) > 1:
        num_held = num_held_out(len(documents))
        return list(documents[:-num_held]), list(documents[-num_held:])
    (only,) = documents
    tail = max(len(only) // _HELD_OUT, longest if longest <= len(only) // 4 else 0)
    return [only[: len(only) - tail]], [only[len(only) - tail :]]


def default_lengths(original: int, target: int) -> list[int]:
    """Half the original length, the original, the target."""
    return sorted({max(2, original // 2), original, target})


def measure(
    model: Any,
    tokenizer: Any,
    held_out: Sequence[torch.Tensor],
    lengths: Sequence[int],
    config: FinetuneConfig,
    *,
    tokens_trained: int,
    output: Path | None,
    progress: bool = True,
) -> list[Record]:
    """Append the perplexities at ``lengths`` to ``output``; lengths no held-out text reaches are left out.

    The held-out texts are cut in pieces of the longest length, so that short lengths are scored on many texts too.
    """
    if config.eval_documents == 0:
        return []
    reach = max((len(document) for document in held_out), default=0)
    reached = [length for length in lengths if length <= reach]
    if len(reached) < len(lengths):
        logger.warning(
            "the longest held-out text has %d tokens, so perplexity at %s is not measured. Pass longer eval_documents.",
            reach,
            ", ".join(str(length) for length in lengths if length > reach),
        )
    if not reached:
        return []
    return perplexity(
        model,
        [document for document in held_out if len(document) >= max(reached)],
        reached,
        tokenizer=tokenizer,
        cut=True,
        max_documents=config.eval_documents,
        logits_chunk=config.logits_chunk,
        output=output,
        tokens_trained=tokens_trained,
        progress=progress,
    )
