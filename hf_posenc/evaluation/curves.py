"""The loss by where a token stands, as far as records tell: from buckets of positions, or from lengths that nest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_posenc.evaluation.records import Record

_Z = 1.959964  # of the 95 % interval that records carry
_MIN_BUCKETS = 4  # fewer do not say how much they vary
# Protocols that a curve can be read from, the first that is there.
_PROTOCOLS = ("truncated", "last_k", "sliding_window")


@dataclass(frozen=True)
class Segment:
    """Losses in nats, summed over tokens at places ``begin`` to ``end - 1`` of all documents."""

    begin: int
    end: int
    nll_sum: float
    n_tokens: int

    @property
    def mean(self) -> float:
        return self.nll_sum / self.n_tokens


@dataclass(frozen=True)
class Curve:
    """Segments of one row by rising place.

    Attributes:
        by: "loss by position" or "perplexity by length".
        segments: What was measured; they need not touch.
        spread: Nats by which the mean over n tokens varies with the text, times ``sqrt(n)``; 0 where all segments
            are of the same tokens.
    """

    by: str
    segments: tuple[Segment, ...]
    spread: float

    def between(self, begin: float, end: float) -> Segment | None:
        """Return all that lies from ``begin`` to ``end``; else the last segment that ends there; else None."""
        before = [one for one in self.segments if one.end <= end]
        inside = [one for one in before if one.begin >= begin] or before[-1:]
        if not inside or inside[-1].end <= begin:
            return None
        nll_sum, n_tokens = math.fsum(one.nll_sum for one in inside), sum(one.n_tokens for one in inside)
        return Segment(inside[0].begin, inside[-1].end, nll_sum, n_tokens)


def loss_curve(records: Sequence[Record], original: int) -> Curve | None:
    """Return the curve of one row.

    From the buckets of its longest record that has them, if an eighth of the original length holds one. Else from its
    perplexities: the first 16k tokens less the first 8k leave those between; where only the last tokens of each length
    were scored, or the same ones at every length, each length is a segment of its own.

    Args:
        records: Of one model, method and training.
        original: The original length, in tokens.

    Returns:
        None if no record is of a protocol that tells it.
    """
    protocol = next((name for name in _PROTOCOLS if any(one.protocol == name for one in records)), None)
    if protocol is None:
        return None
    lengths = {one.context_length: one for one in records if one.protocol == protocol}
    rising = [lengths[length] for length in sorted(lengths)]
    widths = {length: one.position_bucket for length, one in lengths.items() if one.position_bucket}
    if protocol == "truncated" and widths and widths[max(widths)] <= original / 8:
        return _from_buckets(lengths[max(widths)], original)
    near = max((one for one in rising if one.context_length <= original), default=rising[0], key=_length)
    spread = 0.0 if protocol == "sliding_window" else _spread_of_interval(near)
    return Curve("perplexity by length", tuple(_segments(rising)), spread)


def _length(record: Record) -> int:
    return record.context_length


def _from_buckets(record: Record, original: int) -> Curve:
    width = record.position_bucket or 0
    segments = tuple(
        Segment(at * width, min((at + 1) * width, record.context_length), nll_sum, n_tokens)
        for at, (nll_sum, n_tokens) in enumerate(zip(record.position_nll, record.position_tokens, strict=True))
        if n_tokens
    )
    segments = (*segments[:-1], _as_far_as_measured(segments[-1], record.num_documents))
    # Beginnings are hard for want of context, and what is beyond may be broken: neither is the text's own variation.
    usual = [one for one in segments if one.begin >= original / 4 and one.end <= original]
    if len(usual) < _MIN_BUCKETS:
        return Curve("loss by position", segments, _spread_of_interval(record))
    tokens = statistics.fmean(one.n_tokens for one in usual)
    return Curve("loss by position", segments, statistics.stdev(one.mean for one in usual) * math.sqrt(tokens))


def _as_far_as_measured(last: Segment, num_documents: int) -> Segment:
    """Return the last bucket, ended where documents surely reach: the bucket is wider than what is left of them."""
    return replace(last, end=min(last.end, last.begin + math.ceil(last.n_tokens / num_documents)))


def _spread_of_interval(record: Record) -> float:
    error = (math.log(record.ci_high) - math.log(record.ci_low)) / (2 * _Z)
    return error * math.sqrt(record.n_tokens)


def _segments(rising: Sequence[Record]) -> list[Segment]:
    segments: list[Segment] = []
    nll_sum, n_tokens, begin = 0.0, 0, 0
    for one in rising:
        if one.protocol == "truncated":
            if one.n_tokens > n_tokens:
                new = (one.nll_sum - nll_sum, one.n_tokens - n_tokens)
                segments.append(Segment(begin, one.context_length, *new))
            nll_sum, n_tokens = one.nll_sum, one.n_tokens
        else:
            first = begin if one.last_k is None else one.context_length - one.last_k
            segments.append(Segment(first, one.context_length, one.nll_sum, one.n_tokens))
        begin = one.context_length
    return segments
