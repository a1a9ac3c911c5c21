"""The length that a model reads and retrieves, row by row: its effective context, and the cost of short texts."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_posenc.evaluation.intervals import Share, Z, share_right
from hf_posenc.evaluation.records import AnyRecord, Record, RetrievalRecord
from hf_posenc.evaluation.rows import is_unpatched, namer, row_key, task_name, training_words
from hf_posenc.utils.units import length_name

NOT_MEASURED = "loss not measured"
RETRIEVED = 0.85  # of the answers, or of the model's own share at the original length: from here a length is retrieved
_LEAST_OWN = 0.1  # with a smaller share at its original length a model does not do the task, and reaches nothing
MOST_TOLERATED = 20.0  # percent of perplexity: no more passes as the text's own variation
_MOST = math.log1p(MOST_TOLERATED / 100)  # nats
_NOTABLE = 1.0  # percent of perplexity on short texts: from here another method is worth naming
_LEAST = math.log(1.01)  # nats: less than 1 % of perplexity is no worse, however sure
_MIN_BUCKETS = 4  # fewer do not say how much they vary
# Protocols that a curve can be read from; the first of them that was measured is taken.
CURVE_PROTOCOLS = ("truncated", "last_k", "sliding_window")


@dataclass(frozen=True)
class LossReach:
    """The length up to which the loss holds.

    Attributes:
        length: The longest length at which it is no worse, in tokens; None if it is worse at the original already.
        is_longest: Whether nothing longer was measured.
        by: What it was judged by: "loss by position" or "perplexity by length".
        tolerance: Percent of perplexity that is no worse: what the text itself varies by.
        change: Percent of perplexity at that length (or the original) above the reference.
        reference: "unpatched", or "itself" where there is no unpatched row on the same text.
        doubt: Why the verdict is not sure, in words; empty where it is.
        tokens_needed: About how many tokens, scored, would make it sure; None where it is.
    """

    length: int | None
    is_longest: bool
    by: str
    tolerance: float
    change: float
    reference: str
    doubt: str = ""
    tokens_needed: int | None = None


@dataclass(frozen=True)
class OwnLevel:
    """The retrieval of a model at the longest length up to the original: ``of`` is "unpatched" or "itself"."""

    share: float
    length: int
    of: str


@dataclass(frozen=True)
class RetrievalReach:
    """The length up to which one task is retrieved, and the share of right answers there.

    Attributes:
        task: Its name, and how many questions of a text if several.
        length: The longest length that is retrieved, in tokens; None if the shortest is not.
        is_longest: Whether nothing longer was measured.
        shortest: The shortest that was measured.
        share: Share at ``length``, or at the shortest length.
        needed: The share from which a length is retrieved.
        own: The share at the original length that ``needed`` is 85 % of; None where it is 85 % of all answers.
    """

    task: str
    length: int | None
    is_longest: bool
    shortest: int
    share: Share
    needed: float
    own: OwnLevel | None


@dataclass(frozen=True)
class Reach:
    """One row: a model as it was extended and trained.

    ``target`` is how far it was extended to read, None for a row that was not extended. ``loss`` is a reason in words
    where it cannot be judged. ``short_cost`` is the percent of perplexity above the unpatched row at ``short_length``,
    the longest up to the original; None where that was not measured, and for the unpatched row itself.
    """

    name: str
    is_unpatched: bool
    original: int | None
    target: int | None
    loss: LossReach | str
    retrieval: tuple[RetrievalReach, ...]
    short_cost: float | None
    short_length: int | None

    def line(self) -> str:
        """Return the row in one line."""
        judged = self.judged_by()
        loss = f"{_loss_words(self)} ({judged})" if judged else _loss_words(self)
        parts = [loss, *map(_retrieval_words, self.retrieval)]
        if not self.retrieval:
            parts.append("retrieval not measured")
        return f"{self.name}: {', '.join([*parts, *self.short_words()])}"

    def loss_sentence(self) -> str:
        """Return the length that it reads, the cost of short texts and the next step; empty if no loss was measured."""
        if self.loss == NOT_MEASURED:
            return ""
        sentence = f"{self.name}: {', '.join([_loss_words(self), *self.short_words()])}."
        return " ".join([sentence, *self.next_step()])

    def judged_by(self) -> str:
        """Return the basis of the verdict on the loss, in words; empty if there is no verdict."""
        loss = self.loss
        if isinstance(loss, str):
            return ""
        if loss.doubt:
            return loss.doubt
        how = f"{loss.by}, within {loss.tolerance:.{0 if loss.tolerance >= 10 else 1}f} %"
        return f"{how}, against itself: no unpatched row" if loss.reference == "itself" else how

    def next_step(self) -> list[str]:
        """Return the next step, as a sentence; empty if nothing is left to do or the loss was not judged."""
        loss = self.loss
        if isinstance(loss, str):
            return []
        if loss.tokens_needed is not None:
            return [f"Measure about {loss.tokens_needed:,} tokens to be sure."]
        if self.is_unpatched:
            ends = loss.length is not None and not loss.is_longest
            return ["To read further, extend it: hf-posenc plan says how."] if ends else []
        if loss.length is None:
            return ["Fine-tune it (hf-posenc finetune), or take dynamic_yarn, which leaves short texts as they are."]
        if self.target is not None and loss.length < self.target:
            longer = f"Measure texts of {length_name(self.target)} too."
            return [longer if loss.is_longest else "Fine-tune it (hf-posenc finetune), or extend it less."]
        if (self.short_cost or 0.0) >= _NOTABLE:
            return ["Where short texts matter, dynamic_yarn leaves them as they are."]
        return []

    def short_words(self) -> list[str]:
        """Return the cost of short texts, without a full stop; empty for the unpatched row."""
        if self.is_unpatched:
            return []
        if self.short_cost is None or self.short_length is None:
            return ["cost on short texts not measured"]
        cost = round(self.short_cost, 1) + 0.0  # no minus before a zero
        return [f"short texts ({length_name(self.short_length)}) {'cost' if cost >= 0 else 'gain'} {abs(cost):.1f} %"]

    def retrieval_sentences(self) -> list[str]:
        """Return the length at which it retrieves, in a sentence for each task that was measured."""
        return [f"{self.name}: {_retrieval_words(found)}." for found in self.retrieval]


def reach(records: Sequence[AnyRecord]) -> list[Reach]:
    """Return the length that each row reads, the unpatched row first, then in order of appearance.

    The loss reaches N tokens if two means are no worse than that of the unpatched model on the same text over the
    second half of its original length: the mean over the last eighth before N, and that over all from the original
    length to N, so that an easy page does not hide a broken stretch before it. How hard a text is varies along
    it: worse is what exceeds the 95 % interval of that variation (of the buckets' means, or as the records'
    intervals say it) and 1 % of perplexity. A half, not an eighth, as the reference, for the same reason: one easy
    page would condemn every method.

    Retrieval reaches N if at least 85 % of the answers were right there and at every shorter length measured (RULER,
    arXiv:2404.06654, section 4: what Llama 2 7B does at 4k). A model that is not that good at a task, however short the
    text, is held against itself: then it is 85 % of what the unpatched model gets right at the longest length up to the
    original, or the row itself where that was not measured (the effective length of NoLiMa, arXiv:2502.05167). Not so
    below 10 % right: 85 % of nearly nothing would call a length retrieved at which nearly nothing is.

    A row that was measured on several texts, or in several ways, has a line for each: losses of different texts make
    no curve.

    Args:
        records: From ``perplexity`` and ``retrieval``, of any number of models; of repeats (equal ``run_key``) the last
            counts.
    """
    groups: dict[tuple[object, ...], list[AnyRecord]] = {}
    for record in records:
        groups.setdefault(row_key(record), []).append(record)
    name_of = namer(records)
    rows = []
    for group in groups.values():
        for number, run in enumerate(_runs(group), 1):
            of_training = "" if run[0].tokens_trained == 0 else training_words(run[0])
            name = ", ".join(filter(None, (name_of(run[0]), of_training, f"run {number}" if number > 1 else "")))
            rows.append(_reach_of(name, run, records))
    return sorted(rows, key=lambda row: not row.is_unpatched)


def reach_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return ``reach`` as a line for each row."""
    return [row.line() for row in reach(records)]


def _runs(group: Sequence[AnyRecord]) -> list[list[AnyRecord]]:
    """Return the records of a row by the documents they are of; answers, each to a text of its own, go with the first.

    No record names its documents. Those of one protocol are of the same ones if they are as many, and if no length was
    measured twice.
    """
    runs: list[list[Record]] = [[]]
    for record in group:
        if isinstance(record, Record):
            run = next((one for one in reversed(runs) if all(_may_go_with(record, other) for other in one)), None)
            if run is None:
                runs.append(run := [])
            run.append(record)
    answers = [one for one in group if isinstance(one, RetrievalRecord)]
    return [[*run, *(answers if run is runs[0] else ())] for run in runs]


def _may_go_with(record: Record, other: Record) -> bool:
    if (record.protocol, record.last_k) != (other.protocol, other.last_k):
        return True
    if record.context_length == other.context_length:
        return record.run_key == other.run_key
    return record.num_documents == other.num_documents


def _reach_of(name: str, group: Sequence[AnyRecord], records: Sequence[AnyRecord]) -> Reach:
    first = group[0]
    own = [record for record in group if isinstance(record, Record)]
    base = [] if is_unpatched(first) else _unpatched_of(own, records)
    cost, short = _short_cost(own, base)
    return Reach(
        name=name,
        is_unpatched=is_unpatched(first),
        original=first.original_max_position_embeddings,
        target=None if is_unpatched(first) else _target(first),
        loss=_loss_reach(own, base or own, "unpatched" if base or is_unpatched(first) else "itself"),
        retrieval=tuple(_retrieval_reach(group, records)),
        short_cost=cost,
        short_length=short,
    )


def _target(record: AnyRecord) -> int | None:
    """Return the length that the row was extended to; None if that is unknown or not more than it was trained on."""
    original = record.original_max_position_embeddings
    return round(original * record.factor) if original is not None and record.factor > 1 else None


def _unpatched_of(own: Sequence[Record], records: Sequence[AnyRecord]) -> list[Record]:
    """Return the unpatched model's records of what a row has too: those computed as it was, where there are any."""
    found = {_text_key(record): [record] for record in own}
    for one in records:
        if isinstance(one, Record) and is_unpatched(one) and _text_key(one) in found:
            found[_text_key(one)].append(one)
    best = []
    for mine, *plain in found.values():
        alike = [one for one in plain if (one.dtype, one.attn_implementation) == (mine.dtype, mine.attn_implementation)]
        best += alike or plain
    return best


def _text_key(record: Record) -> tuple[object, ...]:
    text = (record.model, record.text_hash, record.tokenizer_hash, record.bos, record.n_tokens)
    scored = (record.protocol, record.stride, record.last_k, record.average, json.dumps(record.key_tokens))
    return (*text, record.context_length, *scored)


def _short_cost(own: Sequence[Record], base: Sequence[Record]) -> tuple[float | None, int | None]:
    plain = {_text_key(one): one.perplexity for one in base}
    short = [
        one
        for one in own
        if _text_key(one) in plain and one.context_length <= (one.original_max_position_embeddings or 0)
    ]
    if not short:
        return None, None
    last = max(short, key=lambda one: one.context_length)
    return 100 * (last.perplexity / plain[_text_key(last)] - 1), last.context_length


def _loss_reach(own: Sequence[Record], base: Sequence[Record], reference: str) -> LossReach | str:
    if not own:
        return NOT_MEASURED
    original = own[0].original_max_position_embeddings
    if original is None:
        return "loss cannot be judged (the original length is not known)"
    protocols = {one.protocol for one in base}
    curve = loss_curve([one for one in own if one.protocol in protocols], original)
    plain = loss_curve(base, original)
    if curve is None or plain is None:
        return "loss cannot be judged (no protocol of the beginning of texts, last_k or sliding_window)"
    usual, at_original = plain.between(original / 2, original), curve.between(original / 2, original)
    if usual is None or at_original is None:
        span = f"from {length_name(original // 2)} to {length_name(original)}"
        return f"loss cannot be judged (no length {span} was measured)"
    judge = _Judge(usual, plain.spread)
    tried = {at_original.end: [at_original]}
    for end in (segment.end for segment in curve.segments if segment.end > at_original.end):
        windows = (curve.between(end * 7 / 8, end), curve.between(at_original.end, end))
        tried[end] = [window for window in windows if window is not None]
    good = [end for end, windows in tried.items() if all(map(judge.is_no_worse, windows))]
    holds = at_original.end in good
    length = max(good) if holds else at_original.end
    excused, excess = judge.excused(tried[length][0]), judge.excess(tried[length][0])
    doubt, needed = "", None
    if excused > _MOST and excess <= excused:
        doubt, needed = _too_little_text(excused, max(one.n_tokens for one in (*own, *base)))
    return LossReach(
        length=length if holds else None,
        is_longest=length == max(tried),
        by=curve.by if curve.by == plain.by else "perplexity by length",
        tolerance=100 * math.expm1(min(excused, _MOST)),
        change=100 * math.expm1(excess),
        reference=reference,
        doubt=doubt,
        tokens_needed=needed,
    )


def _too_little_text(excused: float, n_tokens: int) -> tuple[str, int]:
    """Say that a text varies too much along its length, and how much would be enough: noise falls as 1/sqrt(n).

    Args:
        excused: Nats that the text explains.
        n_tokens: Tokens that were scored.
    """
    needed = n_tokens * (excused / math.log1p(MOST_TOLERATED / 100)) ** 2
    step = 10 ** max(math.floor(math.log10(needed)) - 1, 0)
    chance = f"with {n_tokens:,} tokens scored, {100 * math.expm1(excused):.0f} % more or less is chance"
    enough = math.ceil(needed / step) * step
    return f"too little text: {chance}; about {enough:,} tokens are needed", enough


@dataclass(frozen=True)
class _Judge:
    """The standard for losses: the usual loss, and the variation of the mean over some tokens with the text."""

    usual: Segment
    spread: float

    def excess(self, segment: Segment) -> float:
        """Return nats above the usual."""
        return segment.mean - self.usual.mean

    def excused(self, segment: Segment) -> float:
        """Return the nats that the text explains."""
        return max(_LEAST, Z * self.spread * math.sqrt(1 / self.usual.n_tokens + 1 / segment.n_tokens))

    def is_no_worse(self, segment: Segment) -> bool:
        return self.excess(segment) <= min(self.excused(segment), _MOST)


def _retrieval_reach(group: Sequence[AnyRecord], records: Sequence[AnyRecord]) -> list[RetrievalReach]:
    retrievals = [record for record in group if isinstance(record, RetrievalRecord)]
    return [
        _task_reach([one for one in retrievals if _prompted_alike(one) == alike], records)
        for alike in dict.fromkeys(map(_prompted_alike, retrievals))
    ]


def _task_reach(own: Sequence[RetrievalRecord], records: Sequence[AnyRecord]) -> RetrievalReach:
    first, shares = own[0], _shares(own)
    unpatched = [
        record
        for record in records
        if isinstance(record, RetrievalRecord)
        and is_unpatched(record)
        and _prompted_alike(record) == _prompted_alike(first)
    ]
    levels = (_own_level(unpatched, "unpatched"), _own_level(own, "itself"))
    level = next((one for one in levels if one is not None), None)
    if level is not None and not _LEAST_OWN <= level.share < RETRIEVED:
        level = None
    needed = RETRIEVED if level is None else RETRIEVED * level.share
    good: list[int] = []
    for length, share in shares.items():
        if share.value < needed:
            break
        good.append(length)
    at = good[-1] if good else min(shares)
    longest = bool(good) and at == max(shares)
    task = task_name(first.task, first.questions_per_text)
    return RetrievalReach(task, good[-1] if good else None, longest, min(shares), shares[at], needed, level)


def _prompted_alike(record: RetrievalRecord) -> tuple[object, ...]:
    return record.model, record.task, record.questions_per_text, record.tokenizer_hash, record.chat


def _own_level(records: Sequence[RetrievalRecord], of: str) -> OwnLevel | None:
    short = [record for record in records if record.context_length <= (record.original_max_position_embeddings or 0)]
    if not short:
        return None
    length, share = list(_shares(short).items())[-1]
    return OwnLevel(share.value, length, of)


def _shares(records: Sequence[RetrievalRecord]) -> dict[int, Share]:
    """Return the share of each length, rising."""
    asked = {(record.context_length, record.text_hash): record for record in records}  # of a repeat, the last
    found: dict[int, list[RetrievalRecord]] = {}
    for (length, _), one in sorted(asked.items()):
        found.setdefault(length, []).append(one)
    return {length: share_right(each) for length, each in found.items()}


def _loss_words(row: Reach) -> str:
    loss = row.loss
    if isinstance(loss, str):
        return loss
    sure = ", as far as so little text tells" if loss.doubt else ""
    if loss.length is None:
        return f"worse than unpatched at {length_name(row.original or 0)} already, by {loss.change:.0f} %{sure}"
    least = "at least " if loss.is_longest else ""
    return f"reads to {least}{length_name(loss.length)}{_of_target(row, loss)}{sure}"


def _of_target(row: Reach, loss: LossReach) -> str:
    """Say how a verdict relates to how far the row was extended to read."""
    if row.target is None or loss.length is None or loss.length == row.target:
        return ""
    if loss.length > row.target:
        return f", past its target of {length_name(row.target)}"
    if loss.is_longest:
        return f", the longest measured; its target is {length_name(row.target)}"
    return f", short of its target of {length_name(row.target)}"


def _retrieval_words(found: RetrievalReach) -> str:
    one, level = found.share, found.own
    of = "" if one.n_texts == one.n_questions else f" of {one.counted}"
    share = f"{100 * one.value:.0f} % right{of}, interval {one.interval}"
    needed = f">= {100 * found.needed:.0f} %"
    if level is not None:
        whose = "its own" if level.of == "itself" else "the unpatched model's"
        needed += f", {100 * RETRIEVED:.0f} % of {whose} {100 * level.share:.0f} % at {length_name(level.length)}"
    if found.length is None:
        return f"retrieves at no length ({found.task} {needed}; at {length_name(found.shortest)} {share})"
    most = "at least " if found.is_longest else ""
    return f"retrieves to {most}{length_name(found.length)} ({found.task} {needed}; there {share})"


@dataclass(frozen=True)
class Segment:
    """Losses in nats, summed over tokens at positions ``begin`` to ``end - 1`` of all documents."""

    begin: int
    end: int
    nll_sum: float
    n_tokens: int

    @property
    def mean(self) -> float:
        return self.nll_sum / self.n_tokens


@dataclass(frozen=True)
class Curve:
    """Segments of one row by rising position.

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
        before = [segment for segment in self.segments if segment.end <= end]
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
        records: Records of one model, method and training.
        original: The original length, in tokens.

    Returns:
        None if no record is of a protocol that tells it.
    """
    protocol = next((name for name in CURVE_PROTOCOLS if any(record.protocol == name for record in records)), None)
    if protocol is None:
        return None
    lengths = {record.context_length: record for record in records if record.protocol == protocol}
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
    usual = [segment for segment in segments if segment.begin >= original / 4 and segment.end <= original]
    if len(usual) < _MIN_BUCKETS:
        return Curve("loss by position", segments, _spread_of_interval(record))
    tokens = statistics.fmean(one.n_tokens for one in usual)
    return Curve("loss by position", segments, statistics.stdev(one.mean for one in usual) * math.sqrt(tokens))


def _as_far_as_measured(last: Segment, num_documents: int) -> Segment:
    """Return the last bucket, ended where documents surely reach: the bucket is wider than what is left of them."""
    return replace(last, end=min(last.end, last.begin + math.ceil(last.n_tokens / num_documents)))


def _spread_of_interval(record: Record) -> float:
    error = (math.log(record.ci_high) - math.log(record.ci_low)) / (2 * Z)
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
