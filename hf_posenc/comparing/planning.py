"""What will be measured, how long each row takes, and what a time budget leaves out.

The time of a pass over a long text is estimated from short passes, timed here, and the law by which they grow.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.comparing.candidates import STATIC, Candidate, find_candidates
from hf_posenc.comparing.config import CompareConfig
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.documents import hash_token_ids, select_documents, to_token_ids
from hf_posenc.evaluation.losses import document_losses, evaluation_mode
from hf_posenc.evaluation.records import AnyRecord, Record, RetrievalRecord
from hf_posenc.evaluation.rows import extended_as
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import describe
from hf_posenc.retrieval.haystack import read_haystack
from hf_posenc.retrieval.prompts import PromptMaker
from hf_posenc.retrieval.scoring import reply
from hf_posenc.retrieval.tasks import get_task
from hf_posenc.utils.units import duration_name, length_name

_LONG_ENOUGH = 1.0  # seconds of the shorter timed pass: above the noise, and attention has begun to show
_SHORTEST = 64
_DECODED = 8


@dataclass(frozen=True)
class Step:
    """One row: what to measure, and the seconds it will take; 0 where it has been measured already."""

    candidate: Candidate
    seconds: float
    is_measured: bool = False

    @property
    def name(self) -> str:
        return "unpatched" if self.candidate.row is None else self.candidate.name


@dataclass(frozen=True)
class Plan:
    """What will be measured.

    Attributes:
        original: The original length, in tokens.
        target: The requested length.
        lengths: Context lengths of the perplexity: from a quarter of the original on.
        retrieval_lengths: Those of the retrieval: from the original on.
        num_documents: How many are measured.
        num_prompts: Retrieval prompts of a row.
        steps: The unpatched model first, then by rising time.
        left_out: The reason for each method that is not measured.
        timed: Tokens of the two passes the times are from.
    """

    original: int
    target: int
    lengths: tuple[int, ...]
    retrieval_lengths: tuple[int, ...]
    num_documents: int
    num_prompts: int
    steps: tuple[Step, ...]
    left_out: Mapping[str, str]
    timed: tuple[int, int]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def text(self) -> str:
        """Return the plan in words."""
        texts = "1 text" if self.num_documents == 1 else f"{self.num_documents} texts"
        lines = [
            f"{self.original} -> {self.target} tokens (x{self.target / self.original:g}), without training",
            f"perplexity of {texts} at {', '.join(map(length_name, self.lengths))}",
        ]
        if self.num_prompts:
            at = ", ".join(map(length_name, self.retrieval_lengths))
            lines.append(f"retrieval: {self.num_prompts} prompts a row, at {at}")
        timed = " and ".join(map(str, self.timed))
        width = max(len(step.name) for step in self.steps)
        lines += ["", f"estimated time (from passes of {timed} tokens, linear + quadratic in the length):"]
        for step in self.steps:
            took = "there already" if step.is_measured else duration_name(step.seconds)
            lines.append(f"  {step.name:<{width}}  {took}")
        lines.append(f"  {'total':<{width}}  {duration_name(self.seconds)}")
        if self.left_out:
            lines += [
                "",
                "left out:",
                *(f"  {', '.join(names)}: {reason}" for reason, names in self._reasons().items()),
            ]
        return "\n".join(lines)

    def _reasons(self) -> dict[str, list[str]]:
        """Return the methods that are left out by the reason, which several may share."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            reasons.setdefault(reason, []).append(name)
        return reasons

    def within(self, budget: float) -> Plan:
        """Return the plan without its most expensive rows, so that it takes at most ``budget`` seconds.

        Raises:
            ValueError: Not even the unpatched model and one method fit.
        """
        steps, left_out = list(self.steps), dict(self.left_out)
        while sum(step.seconds for step in steps) > budget:
            if len(steps) == 2:
                raise InvalidRequestError(
                    f"a budget of {duration_name(budget)} is too short: {steps[0].name} and {steps[1].name} alone take "
                    f"about {duration_name(steps[0].seconds + steps[1].seconds)}. Give more, or a shorter "
                    "--context-length."
                )
            slowest = max(steps[1:], key=lambda step: step.seconds)
            steps.remove(slowest)
            left_out[slowest.name] = (
                f"over the budget of {duration_name(budget)}: it takes {duration_name(slowest.seconds)}"
            )
        return replace(self, steps=tuple(steps), left_out=left_out)


def make_plan(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    what: CompareConfig,
    known: Sequence[AnyRecord] = (),
) -> Plan:
    """Find the methods that suit a model, and time them.

    Args:
        model: A loaded model, not extended by hf_posenc.
        tokenizer: Its tokenizer.
        documents: Texts to measure on.
        what: The request.
        known: Earlier results.

    Raises:
        ValueError: The length is none to extend to, no document is long enough, or no method suits the model.
    """
    original = what.original_max_position_embeddings or describe(model)["original_max_position_embeddings"]
    target = int(what.context_length)
    if original is not None and target <= original:
        raise InvalidRequestError(
            f"the model reads {original} tokens as it is, so for {target} nothing has to be extended. Give a longer "
            "--context-length (or --original-max-position-embeddings, if its config says more than it was trained on)."
        )
    ids = select_documents(
        to_token_ids(model, documents, tokenizer), target, cut=what.cut, max_documents=what.max_documents
    )
    shared = ("context_length", "original_max_position_embeddings", "sliding_window", "on_scaled")
    candidates, left_out = find_candidates(
        model, {name: getattr(what, name) for name in shared}, what.methods, what.rope_scaling
    )
    lengths = [length for length in _doublings(original, target) if what.tasks]
    timings = time_candidates(model, candidates, ids[0], target, original)
    prompts = _prompts(tokenizer, documents, what, lengths)
    steps = [_step(one, timings, ids, prompts, what, known) for one in candidates]
    return Plan(
        original=original,
        target=target,
        lengths=tuple(sorted({max(original // 4, 2), max(original // 2, 2), *_doublings(original, target)})),
        retrieval_lengths=tuple(lengths),
        num_documents=len(ids),
        num_prompts=len(prompts),
        steps=(steps[0], *sorted(steps[1:], key=lambda step: step.seconds)),
        left_out=left_out,
        timed=timings.lengths,
    )


def _doublings(original: int, target: int) -> list[int]:
    lengths = [original]
    while 2 * lengths[-1] < target:
        lengths.append(2 * lengths[-1])
    return [*lengths, target]


def _prompts(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], what: CompareConfig, lengths: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the context length of each prompt of a row, and the tokens it has for the answer."""
    if not what.tasks:
        return []
    maker = PromptMaker(tokenizer, read_haystack(tokenizer, documents), "auto")
    each = len(set(what.depths)) * what.samples
    depths = {task: what.depths[0] if get_task(task).has_depth else None for task in what.tasks}
    answers = {task: maker.make(task, lengths[-1], depth, 0).max_new_tokens for task, depth in depths.items()}
    return [(length, answers[task]) for task in answers for length in lengths for _ in range(each)]


def _step(
    one: Candidate,
    timings: Timings,
    ids: Sequence[torch.Tensor],
    prompts: Sequence[tuple[int, int]],
    what: CompareConfig,
    known: Sequence[AnyRecord],
) -> Step:
    cost, target = timings.costs[one.name], int(what.context_length)
    mine = [record for record in known if record.model == what.model_name and _is_of(record, one)]
    text = hash_token_ids(row[:target] for row in ids)
    read = any(isinstance(record, Record) and record.text_hash == text for record in mine)
    answered = sum(isinstance(record, RetrievalRecord) for record in mine)
    todo = prompts[answered:]
    seconds = 0.0 if read else cost.of(target) * len(ids)
    seconds += sum(cost.of(length) + answer * timings.decode_step for length, answer in todo)
    return Step(one, seconds, is_measured=read and not todo)


def _is_of(record: AnyRecord, one: Candidate) -> bool:
    """Say whether a record seems to be of a row; what is measured again is decided where it is measured."""
    if record.method != one.method or record.tokens_trained:
        return False
    if one.row is None or one.rule is None:
        return True
    reached = round(record.factor * (record.original_max_position_embeddings or 0))
    return record.options == one.rule.changed_options() and reached == one.row["context_length"]


@dataclass(frozen=True)
class Cost:
    """What a pass over n tokens costs, in seconds or floating-point operations: ``linear * n + quadratic * n ** 2``."""

    linear: float
    quadratic: float

    def of(self, num_tokens: int) -> float:
        """Return the cost of a pass over so many tokens."""
        return self.linear * num_tokens + self.quadratic * num_tokens**2


def work_of(model: PreTrainedModel) -> Cost:
    """Return the floating-point operations of a model's forward, from its config and the sizes of its weights.

    Two a weight and token, the head on every token included, the embedding's look-up not. Attention: two for each
    feature of a score and two for each of a value, over half of all pairs of tokens. Of a mixture of experts all
    weights are counted, and every layer as one that reads everything; ``fit`` needs the ratio as a bound only.
    """
    rotary = RotaryModel(model)
    base, config = rotary.model, rotary.text_config
    weights = base.num_parameters(exclude_embeddings=True)
    head = config.vocab_size * config.hidden_size
    output: Any = base.get_output_embeddings()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    tied = output is None or output.weight is base.get_input_embeddings().weight  # a head of its own is in `weights`
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return Cost(2.0 * (weights + head * tied), 2.0 * width * config.num_hidden_layers)


def fit(work: Cost, short: tuple[int, float], long: tuple[int, float]) -> Cost:
    """Return the seconds of a pass by its length, through two timed passes, each (tokens, seconds).

    Attention does not run faster, by the operation, than products with weights. Where two passes say so all the same,
    what was timed is the cost of starting operations, and the longer pass is taken to have run both at one speed.
    """
    (n1, t1), (n2, t2) = short, long
    quadratic = (t2 / n2 - t1 / n1) / (n2 - n1)
    linear = t1 / n1 - quadratic * n1
    if linear < 0:  # the longer one ran out of a cache, or was disturbed
        return Cost(0.0, t2 / n2**2)
    if quadratic * work.linear < linear * work.quadratic:
        speed = t2 / work.of(n2)
        return Cost(speed * work.linear, speed * work.quadratic)
    return Cost(linear, quadratic)


@dataclass(frozen=True)
class Timings:
    """What was timed: the cost of each row, and seconds of one token written by the unpatched model.

    ``lengths`` are the tokens of the two timed passes.
    """

    costs: dict[str, Cost]
    lengths: tuple[int, int]
    decode_step: float


@torch.no_grad()
def time_candidates(
    model: PreTrainedModel, candidates: Sequence[Candidate], ids: torch.Tensor, target: int, original: int
) -> Timings:
    """Time short passes of each kind of candidate.

    A static rule costs what the unpatched model does. One that runs in attention is timed at a smaller scale: with
    an original length as much shorter as the pass is, it goes through as many stages or chunks as it will later.

    Args:
        model: The loaded model.
        candidates: From ``find_candidates``.
        ids: int64 ``(num_tokens,)``, of a text; what it says does not matter.
        target: The length to come, in tokens.
        original: The original length, in tokens.
    """
    work = work_of(model)
    with evaluation_mode(model):
        n1 = min(_SHORTEST, target // 2)
        document_losses(model, ids[:n1])  # the first one warms up
        while (t1 := _time_pass(model, ids[:n1])) < _LONG_ENOUGH and 4 * n1 <= target:
            n1 *= 2
        n2 = 2 * n1
        t2 = _time_pass(model, ids[:n2])
        costs = {}
        for one in candidates:
            if one.kind > STATIC:
                times = [(n, _time_smaller(model, one, ids[:n], target, original)) for n in (n1, n2)]
                costs[one.name] = fit(work, *times)
        # Again at the end: most rows hang on it, and something else may have run meanwhile.
        plain = fit(work, *((n, min(t, _time_pass(model, ids[:n]))) for n, t in ((n1, t1), (n2, t2))))
        costs |= {one.name: plain for one in candidates if one.kind <= STATIC}
        step = _decode_step(model, ids[:n1])
    return Timings(costs, (n1, n2), step)


def _time_pass(model: PreTrainedModel, ids: torch.Tensor) -> float:
    return _time(partial(document_losses, model, ids))


def _time(run: Callable[[], object]) -> float:
    """Return the least seconds of three runs, or of fewer that take long: what else the machine does only adds."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < 2 * _LONG_ENOUGH:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _time_smaller(model: PreTrainedModel, one: Candidate, ids: torch.Tensor, target: int, original: int) -> float:
    row = dict(one.row or {})
    small = {"original_max_position_embeddings": max(round(original * len(ids) / target), 8)}
    row |= {**small, "context_length": len(ids), "sliding_window": "keep"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with extended_as(model, row):
            return _time_pass(model, ids)


def _decode_step(model: PreTrainedModel, ids: torch.Tensor) -> float:
    prompt, answer = ids[:-1].tolist(), ids[-1:].tolist()
    few, many = (_time(partial(reply, model, prompt, answer, n)) for n in (1, 1 + _DECODED))
    return max(many - few, 0.0) / _DECODED
