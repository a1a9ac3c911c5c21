"""The rows that will be measured, the time of each, the rows that a budget leaves out, and the measurement itself."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.comparing.candidates import Candidate, find_candidates
from hf_posenc.comparing.config import CompareConfig
from hf_posenc.comparing.timing import Timings, time_candidates
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.evaluation import perplexity
from hf_posenc.evaluation.config import EvalConfig
from hf_posenc.evaluation.documents import choose_texts, hash_token_ids, to_token_ids
from hf_posenc.evaluation.passes import default_bucket
from hf_posenc.evaluation.records import AnyRecord, Record, RetrievalRecord
from hf_posenc.evaluation.rows import extended_as
from hf_posenc.evaluation.windows import doublings
from hf_posenc.patching.api import describe
from hf_posenc.retrieving.haystack import read_haystack
from hf_posenc.retrieving.measuring_retrieval import retrieval
from hf_posenc.retrieving.prompts import PromptMaker
from hf_posenc.retrieving.tasks import get_task
from hf_posenc.utils.units import duration_name, length_name


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
    """A planned measurement.

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
            lengths = ", ".join(map(length_name, self.retrieval_lengths))
            lines.append(f"retrieval: {self.num_prompts} prompts a row, at {lengths}")
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
    if original is None:
        raise InvalidRequestError(
            "the config does not say what the model was trained on: pass "
            f"{argument('original_max_position_embeddings')}."
        )
    if target <= original:
        raise InvalidRequestError(
            f"the model reads {original} tokens as it is, so for {target} nothing has to be extended. Give a longer "
            "--context-length (or --original-max-position-embeddings, if its config says more than it was trained on)."
        )
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    read = EvalConfig.of([target], cut=what.cut, max_documents=what.max_documents)
    (ids,) = choose_texts(read.runs(), to_token_ids(documents, tokenizer, vocab_size), None, read).values()
    shared = ("context_length", "original_max_position_embeddings", "sliding_window", "on_scaled")
    candidates, left_out = find_candidates(
        model, {name: getattr(what, name) for name in shared}, what.methods, what.rope_scaling
    )
    lengths = [length for length in doublings(original, target) if what.tasks]
    prompts = _prompts(tokenizer, documents, what, lengths)  # first: a task may not fit into a length
    timings = time_candidates(model, candidates, ids[0], target, original)
    steps = [_step(one, timings, ids, prompts, what, known) for one in candidates]
    return Plan(
        original=original,
        target=target,
        lengths=tuple(sorted({max(original // 4, 2), max(original // 2, 2), *doublings(original, target)})),
        retrieval_lengths=tuple(lengths),
        num_documents=len(ids),
        num_prompts=len(prompts),
        steps=(steps[0], *sorted(steps[1:], key=lambda step: step.seconds)),
        left_out=left_out,
        timed=timings.lengths,
    )


def _prompts(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], what: CompareConfig, lengths: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the context length of each prompt of a row, and the tokens it has for the answer."""
    if not what.tasks:
        return []
    maker = PromptMaker(tokenizer, read_haystack(tokenizer, documents), "auto")
    each = len(set(what.depths)) * what.samples
    depths = {task: what.depths[0] if get_task(task).has_depth else None for task in what.tasks}
    answers = {
        (task, length): maker.make(task, length, depth, 0)[0].max_new_tokens
        for task, depth in depths.items()
        for length in lengths
    }
    return [(length, answer) for (_, length), answer in answers.items() for _ in range(each)]


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


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    what: CompareConfig,
    plan: Plan,
    budget: float | None = None,
) -> tuple[dict[str, list[AnyRecord]], list[str]]:
    """Measure the rows of a plan, one after the other.

    Args:
        model: The model, left as it was.
        tokenizer: Its tokenizer.
        documents: Texts to measure on.
        what: The request.
        plan: What ``make_plan`` made of it.
        budget: Seconds; rows that no longer fit are left out, but the unpatched model and one method are measured in
            any case.

    Returns:
        The records of each row by its name; and sentences: the rows that were left out, and how long it took.
    """
    shared: dict[str, Any] = {
        name: getattr(what, name) for name in ("prefill_chunk", "output", "model_name", "command")
    }
    shared |= {"tokenizer": tokenizer, "progress": not what.hide_progress}
    texts: dict[str, Any] = {name: getattr(what, name) for name in ("cut", "max_documents")}
    prompts: dict[str, Any] = {name: getattr(what, name) for name in ("tasks", "depths", "samples")}
    bucket, rows = default_bucket(plan.original), dict[str, list[AnyRecord]]()
    notes = []
    began, promised = time.perf_counter(), 0.0
    for step in plan.steps:
        spent = time.perf_counter() - began
        late = max(spent / promised, 1.0) if promised else 1.0
        if budget is not None and len(rows) >= 2 and spent + late * step.seconds > budget:
            notes.append(f"left out, for time is up: {step.name}")
            continue
        with extended_as(model, step.candidate.row):
            records: list[AnyRecord] = []
            records += perplexity(model, documents, plan.lengths, position_bucket=bucket, **texts, **shared)
            if what.tasks:
                lengths = plan.retrieval_lengths
                records += retrieval(model, documents=documents, context_lengths=lengths, **prompts, **shared)
        rows[step.candidate.name] = records
        promised += step.seconds
    took = duration_name(time.perf_counter() - began)
    return rows, [*notes, f"measured in {took} (estimated {duration_name(promised)})"]
