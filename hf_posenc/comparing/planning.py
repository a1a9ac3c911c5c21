"""What will be measured, how long each row takes, and what a time budget leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.cli.compare_arguments import CompareArguments
from hf_posenc.comparing.candidates import Candidate, find_candidates
from hf_posenc.comparing.timing import Timings, time_candidates
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.documents import hash_token_ids, select_documents, to_token_ids
from hf_posenc.evaluation.records import Record
from hf_posenc.patching.api import describe
from hf_posenc.retrieval.cell_records import RetrievalRecord
from hf_posenc.retrieval.haystack import read_haystack
from hf_posenc.retrieval.prompts import PromptMaker
from hf_posenc.retrieval.tasks import TASKS
from hf_posenc.utils.units import duration_name, length_name

AnyRecord = Record | RetrievalRecord


@dataclass(frozen=True)
class Step:
    """One row: what to measure, and the seconds it will take; 0 where its results are there."""

    candidate: Candidate
    seconds: float
    is_there: bool = False

    @property
    def name(self) -> str:
        return "unpatched" if self.candidate.row is None else self.candidate.name


@dataclass(frozen=True)
class Plan:
    """What will be measured.

    Attributes:
        original: The original length, in tokens.
        target: The length asked for.
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
            took = "there already" if step.is_there else duration_name(step.seconds)
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
        """Return the plan without its dearest rows, so that it takes at most ``budget`` seconds.

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
            dear = max(steps[1:], key=lambda step: step.seconds)
            steps.remove(dear)
            left_out[dear.name] = f"over the budget of {duration_name(budget)}: it takes {duration_name(dear.seconds)}"
        return replace(self, steps=tuple(steps), left_out=left_out)


def make_plan(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    what: CompareArguments,
    known: Sequence[AnyRecord] = (),
) -> Plan:
    """Find the methods that suit a model, and time them.

    Args:
        model: A loaded model, not extended by hf_posenc.
        tokenizer: Its tokenizer.
        documents: Texts to measure on.
        what: What is asked for.
        known: Results that are there already.

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
    asked = ("context_length", "original_max_position_embeddings", "sliding_window", "on_scaled")
    candidates, left_out = find_candidates(
        model, {name: getattr(what, name) for name in asked}, what.methods, what.rope_scaling
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
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], what: CompareArguments, lengths: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the context length of each prompt of a row, and the tokens it has for the answer."""
    if not what.tasks:
        return []
    maker = PromptMaker(tokenizer, read_haystack(tokenizer, documents), "auto")
    each = len(set(what.depths)) * what.samples
    depths = {task: what.depths[0] if TASKS[task].has_depth else None for task in what.tasks}
    answers = {task: maker.make(task, lengths[-1], depth, 0).max_new_tokens for task, depth in depths.items()}
    return [(length, answers[task]) for task in answers for length in lengths for _ in range(each)]


def _step(
    one: Candidate,
    timings: Timings,
    ids: Sequence[torch.Tensor],
    prompts: Sequence[tuple[int, int]],
    what: CompareArguments,
    known: Sequence[AnyRecord],
) -> Step:
    law, target = timings.laws[one.name], int(what.context_length)
    mine = [record for record in known if record.model == what.model_name and _is_of(record, one)]
    text = hash_token_ids(row[:target] for row in ids)
    read = any(isinstance(record, Record) and record.text_hash == text for record in mine)
    answered = sum(isinstance(record, RetrievalRecord) for record in mine)
    todo = prompts[answered:]
    seconds = 0.0 if read else law.seconds(target) * len(ids)
    seconds += sum(law.seconds(length) + answer * timings.decode_step for length, answer in todo)
    return Step(one, seconds, is_there=read and not todo)


def _is_of(record: AnyRecord, one: Candidate) -> bool:
    """Say whether a record seems to be of a row; what is measured again is decided where it is measured."""
    if record.method != one.method or record.tokens_trained:
        return False
    if one.row is None or one.rule is None:
        return True
    reached = round(record.factor * (record.original_max_position_embeddings or 0))
    return record.options == one.rule.changed_options() and reached == one.row["context_length"]
