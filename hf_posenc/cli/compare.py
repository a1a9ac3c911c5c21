"""``hf-posenc compare``: the plan with its cost, the sweep, the table, what to take, and the next commands."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.checkpoint.loading import load_model
from hf_posenc.cli.shared_arguments import ModelArguments
from hf_posenc.comparing.candidates import ROPE_SCALING, STATIC
from hf_posenc.comparing.config import CompareConfig
from hf_posenc.comparing.planning import Plan, Step, make_plan
from hf_posenc.comparing.recommending import Recommendation, recommend
from hf_posenc.evaluation import perplexity, reach_lines, read_records
from hf_posenc.evaluation.passes import default_bucket
from hf_posenc.evaluation.records import AnyRecord, check_output, read_retrieval_records
from hf_posenc.evaluation.rows import extended_as, refuse_extended
from hf_posenc.exports import STACKS
from hf_posenc.methods.registry import DEFAULT_METHOD
from hf_posenc.patching.rope_scaling import read_rope_scaling
from hf_posenc.report import text_table
from hf_posenc.retrieval.measuring_retrieval import retrieval
from hf_posenc.utils.console import LONG
from hf_posenc.utils.dtypes import slow_dtype_advice
from hf_posenc.utils.units import duration_name, length_name


def compare(name: str, documents: Sequence[str], what: CompareConfig, loading: ModelArguments) -> None:
    """Print the plan; unless it is a dry run, measure each row, and print the results and what to take.

    Args:
        name: The model: a name on the Hub, a folder or a ``.gguf`` file.
        documents: The user's texts.
        what: The request.
        loading: How the model is loaded.

    Raises:
        ValueError: As ``make_plan``; the budget is too short; or the model is extended already.
    """
    began = time.perf_counter()
    known: list[AnyRecord] = []
    if what.output is not None:
        check_output(what.output)
        known = [*read_records(what.output), *read_retrieval_records(what.output)]
    what.model_name = what.model_name or name
    model, tokenizer = load_model(name, **vars(loading))
    refuse_extended(model, name, on_scaled="refuse")
    plan = make_plan(model, tokenizer, documents, what, known)
    if what.budget is not None:
        plan = plan.within(what.budget)
    print(plan.text(), flush=True)
    if plan.seconds > LONG and what.budget is None:
        advice = (
            slow_dtype_advice(model)
            + "--budget 10m leaves out the most expensive rows, or give a shorter --context-length"
        )
        print(f"This takes long on this machine. Shorter: {advice}.", flush=True)
    if what.dry_run:
        return
    sweep = _Sweep(model, tokenizer, documents, what, plan)
    rows = sweep.measure(None if what.budget is None else what.budget - (time.perf_counter() - began))
    records = [record for row in rows.values() for record in row]
    print("\n".join(["", text_table(records), "", *reach_lines(records), "", *sweep.notes]))
    taken = recommend(rows, {step.candidate.name: step.candidate.kind for step in plan.steps})
    print("\n".join([*taken.lines, "", *_next(name, what, model, taken)]))
    if what.output is not None:
        print(f"\nin {what.output}; a page with plots: hf-posenc report {shlex.quote(what.output)} --output-dir report")


class _Sweep:
    """The rows of a plan, measured one after the other."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        documents: Sequence[str],
        what: CompareConfig,
        plan: Plan,
    ) -> None:
        self.model, self.tokenizer, self.documents, self.what, self.plan = model, tokenizer, documents, what, plan
        self.notes: list[str] = []

    def measure(self, budget: float | None) -> dict[str, list[AnyRecord]]:
        """Return the records of each row by its name; rows that no longer fit into ``budget`` seconds are left out.

        The unpatched model and one method are measured in any case.
        """
        began, rows = time.perf_counter(), dict[str, list[AnyRecord]]()
        promised = 0.0
        for step in self.plan.steps:
            spent = time.perf_counter() - began
            late = max(spent / promised, 1.0) if promised else 1.0
            if budget is not None and len(rows) >= 2 and spent + late * step.seconds > budget:
                self.notes.append(f"left out, for time is up: {step.name}")
                continue
            rows[step.candidate.name] = self._row(step)
            promised += step.seconds
        took = duration_name(time.perf_counter() - began)
        self.notes.append(f"measured in {took} (estimated {duration_name(promised)})")
        return rows

    def _row(self, step: Step) -> list[AnyRecord]:
        what, shared = self.what, self._shared()
        records: list[AnyRecord] = []
        with extended_as(self.model, step.candidate.row):
            records += perplexity(
                self.model,
                self.documents,
                self.plan.lengths,
                cut=what.cut,
                max_documents=what.max_documents,
                position_bucket=default_bucket(self.plan.original),
                **shared,
            )
            if what.tasks:
                prompts: dict[str, Any] = {"tasks": what.tasks, "depths": what.depths, "samples": what.samples}
                prompts["context_lengths"] = self.plan.retrieval_lengths
                records += retrieval(self.model, documents=self.documents, **prompts, **shared)
        return records

    def _shared(self) -> dict[str, Any]:
        what = self.what
        return {
            "tokenizer": self.tokenizer,
            "prefill_chunk": what.prefill_chunk,
            "output": what.output,
            "model_name": what.model_name,
            "progress": not what.hide_progress,
        }


def _next(name: str, what: CompareConfig, model: PreTrainedModel, taken: Recommendation) -> list[str]:
    """Return the commands that make, train and serve what is recommended.

    For a model that is best as it is: how to ask about longer texts, or, if it does not hold either, how to train it.
    """
    length = length_name(what.context_length)
    folder = f"{Path(name).name}-{length}"
    if taken.method == "none" and taken.holds:
        longer = ["--documents", "LONGER_TEXTS", "--context-length", 2 * int(what.context_length)]
        words = shlex.join(map(str, ["hf-posenc", "compare", name, *longer]))
        return [f"nothing to do: it reads {length} as it is. For longer texts, compare there:", f"  {words}"]
    if taken.method == "none" and taken.holds is None:
        return ["next: measure on more text, as the table alone does not tell how far it reads"]
    rule = _rule(DEFAULT_METHOD if taken.method == "none" else taken.method, what)
    tuned = ["--documents", "TRAINING_TEXTS", *rule, "--output-dir", f"{folder}-tuned"]
    commands = [["hf-posenc", "finetune", name, *tuned]]
    if taken.method != "none":
        commands = [["hf-posenc", "patch", name, folder, *rule], *commands]
        if stack := _stack_for(model):
            served = None if taken.served == ROPE_SCALING else taken.served
            instead = ["--as", served or DEFAULT_METHOD] if taken.kind > STATIC else []
            commands.append(["hf-posenc", "export", folder, "--to", stack, *instead])
    first = "next:" if taken.method != "none" else "no method helps without training; training is what is left:"
    return [first, *(f"  {shlex.join(map(str, words))}" for words in commands)]


def _rule(name: str, what: CompareConfig) -> list[Any]:
    """Return the flags that extend a model as a row was."""
    said = {
        "context_length": int(what.context_length),
        "original_max_position_embeddings": what.original_max_position_embeddings,
        "sliding_window": what.sliding_window if what.sliding_window != "keep" else None,
        "on_scaled": what.on_scaled if what.on_scaled != "refuse" else None,
    }
    rule = ["--method", name]
    if name == ROPE_SCALING and what.rope_scaling is not None:
        rule = ["--rope-scaling", what.rope_scaling]
        if read_rope_scaling(what.rope_scaling).factor is not None:
            del said["context_length"]
    flags = [(f"--{flag.replace('_', '-')}", value) for flag, value in said.items() if value is not None]
    return [*rule, *(word for pair in flags for word in pair)]


def _stack_for(model: PreTrainedModel) -> str | None:
    """Return the first server that is known to run models of this type."""
    config = model.config.get_text_config(decoder=True)
    return next((name for name, stack in STACKS.items() if config.model_type in stack.model_types), None)
