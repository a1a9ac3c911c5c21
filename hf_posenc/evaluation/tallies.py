"""What is kept of a document's losses: sums over stretches of tokens, and the tokens in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hf_posenc.evaluation.bootstrap import BLOCKS_PER_DOCUMENT, block_totals, bootstrap_interval, resampled_units
from hf_posenc.evaluation.plans import Run
from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.windows import Window

Totals = tuple[list[float], list[int]]  # of each stretch, in order: nats and scored tokens
NO_TOTALS: Totals = ([], [])

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


def key_totals(run: Run, losses: torch.Tensor, keys: torch.Tensor) -> Totals:
    """Return the totals of the key tokens among a text's first ones, of blocks as everywhere, or of all in one.

    Args:
        run: The number.
        losses: ``(num_tokens,)``.
        keys: bool ``(num_tokens,)``.
    """
    chosen = losses[: run.context_length][keys[: run.context_length]]
    if run.average == "windows":
        return [float(chosen.double().sum())], [len(chosen)]
    return block_totals(chosen)


def join_portions(run: Run, totals: Sequence[Totals]) -> list[Totals]:
    """Return the totals of each text that has any, from those of its portions: only a stream has more than one."""
    if run.rule.shape != "stream":
        return [one for one in totals if sum(one[1])]
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


def make_record(
    identity: dict[str, Any],
    totals: list[Totals],
    positions: Totals,
    seed: int,
    seconds: float,
    peak_memory_bytes: int,
) -> Record:
    """Return a record of what a run found.

    Args:
        identity: The fields that say what was measured, and how.
        totals: Of each text.
        positions: Of each bucket of positions; empty lists where there are none.
        seed: Of the interval.
        seconds: That its pass took.
        peak_memory_bytes: Until now.
    """
    nll_sum, n_tokens = sum_up(totals)
    if identity["average"] == "windows":
        totals = [window_means(one) for one in totals]
    of, count = sum_up(totals)
    unit_nll, unit_tokens, ci_unit = resampled_units(totals)
    ci_low, ci_high = bootstrap_interval(unit_nll, unit_tokens, seed=seed)
    return Record(
        **identity,
        n_tokens=n_tokens,
        nll_sum=nll_sum,
        perplexity=math.exp(of / count),
        ci_low=ci_low,
        ci_high=ci_high,
        ci_unit=ci_unit,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
        unit_nll=unit_nll,
        unit_tokens=unit_tokens,
        position_nll=positions[0],
        position_tokens=positions[1],
    )
