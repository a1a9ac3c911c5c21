"""What is kept of a document's losses: sums over stretches of tokens, and the tokens in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hf_posenc.evaluation.bootstrap import BLOCKS_PER_DOCUMENT, block_totals
from hf_posenc.evaluation.plans import Run
from hf_posenc.evaluation.windows import Window

Totals = tuple[list[float], list[int]]  # of each stretch, in order: nats and scored tokens

_STRETCHES = 32  # of the original length, if nobody says how wide
_NARROWEST = 16
_WIDTH_WITHOUT_ORIGINAL = 256


def default_bucket(original_length: int | None) -> int:
    """Return how many positions share a bucket: a 32nd of the original length, at least 16; 256 where it is unknown."""
    return _WIDTH_WITHOUT_ORIGINAL if original_length is None else max(_NARROWEST, original_length // _STRETCHES)


def position_totals(losses: torch.Tensor, first: int, width: int) -> Totals:
    """Sum losses by where their token stands.

    Args:
        losses: ``(n,)``, of tokens ``first`` to ``first + n - 1`` of a text.
        first: Index of the first scored token.
        width: Tokens of a bucket; bucket b begins at token ``b * width``.

    Returns:
        Nats (summed in float64) and scored tokens of each bucket, from bucket 0 to the last one that has any.
    """
    buckets = torch.arange(first, first + len(losses)) // width
    sums = torch.zeros(int(buckets[-1]) + 1, dtype=torch.float64).index_add_(0, buckets, losses.double())
    return sums.tolist(), torch.bincount(buckets).tolist()


def run_totals(run: Run, windows: Sequence[Window], losses: Sequence[torch.Tensor], num_tokens: int) -> Totals:
    """Return what one number needs to know of a text, or of one portion of a stream.

    Args:
        run: The number.
        windows: What was fed of the text, in order.
        losses: Of each window the losses of the tokens it scores.
        num_tokens: Of the whole text.

    Returns:
        Totals of blocks of neighbouring tokens, which the interval is made of. Where windows are averaged, those of
        each window. Of a stream those of each 32nd of it, a token's losses all in one, however many windows score it.
    """
    if run.rule.shape == "beginning":
        (window,), (found,) = windows, losses
        scored = run.scored(num_tokens)
        losses = [found[scored.start - window.score_from : scored.stop - window.score_from]]
    if run.average == "windows":
        return [float(one.double().sum()) for one in losses], [len(one) for one in losses]
    if run.rule.shape != "stream":
        return block_totals(torch.cat(list(losses)))
    width = math.ceil(num_tokens / BLOCKS_PER_DOCUMENT)
    return add_totals([position_totals(one, at.score_from, width) for one, at in zip(losses, windows, strict=True)])


def join_portions(run: Run, totals: Sequence[Totals]) -> list[Totals]:
    """Return the totals of each text from those of its portions: only a stream has more than one."""
    if run.rule.shape != "stream":
        return list(totals)
    if run.average == "tokens":
        sums, counts = add_totals(totals)
        scored = [at for at, count in enumerate(counts) if count]
        return [([sums[at] for at in scored], [counts[at] for at in scored])]
    return [([nats for sums, _ in totals for nats in sums], [count for _, counts in totals for count in counts])]


def window_means(totals: Totals) -> Totals:
    """Return windows as if each had one token, of the window's mean loss."""
    return [nats / count for nats, count in zip(*totals, strict=True)], [1] * len(totals[1])


def add_totals(totals: Sequence[Totals]) -> Totals:
    """Add up the stretches of several documents, first with first, second with second."""
    longest = max(len(counts) for _, counts in totals)
    sums = [math.fsum(nats[at] for nats, _ in totals if at < len(nats)) for at in range(longest)]
    return sums, [sum(counts[at] for _, counts in totals if at < len(counts)) for at in range(longest)]


def sum_up(totals: Sequence[Totals]) -> tuple[float, int]:
    """Return all nats and all tokens."""
    nats = math.fsum(value for sums, _ in totals for value in sums)
    return nats, sum(count for _, counts in totals for count in counts)
