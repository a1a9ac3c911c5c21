"""``hf-posenc eval --method auto``: the plan with its cost, the rows, a recommendation, and the next commands."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.cli.shared_arguments import DocumentArguments, ModelArguments
from hf_posenc.comparing.config import CompareConfig
from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.registry import DEFAULT_METHOD
from hf_posenc.utils.console import LONG
from hf_posenc.utils.units import length_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_posenc.comparing.recommending import Recommendation
    from hf_posenc.evaluation.records import AnyRecord


def choose_method(name: str, what: CompareConfig, source: DocumentArguments, loading: ModelArguments) -> None:
    """Measure the methods that suit a model on the user's text, after a time estimate, and recommend one.

    Args:
        name: Name of the model, as the user gave it.
        what: What is compared.
        source: Where the texts come from.
        loading: How the model is loaded.
    """
    what.check()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidRequestError(
            "--method auto runs in one process, and this one was started with others (by torchrun or accelerate): each "
            "would measure everything. Start hf-posenc eval itself."
        )
    documents = source.stream().texts()
    from hf_posenc.checkpoint.loading import load_model
    from hf_posenc.comparing.comparison import make_plan, measure
    from hf_posenc.comparing.recommending import recommend
    from hf_posenc.evaluation import reach_lines, read_records
    from hf_posenc.evaluation.records import check_output, read_retrieval_records
    from hf_posenc.evaluation.rows import refuse_extended
    from hf_posenc.reporting import text_table
    from hf_posenc.utils.dtypes import slow_dtype_advice

    began = time.perf_counter()
    known: list[AnyRecord] = []
    if what.output is not None:
        file = check_output(what.output)
        known = [*read_records(file), *read_retrieval_records(file)]
    model, tokenizer = load_model(name, **vars(loading))
    refuse_extended(model, name, on_scaled="refuse")
    plan = make_plan(model, tokenizer, documents, what, known)
    if what.budget is not None:
        plan = plan.within(what.budget)
    print(plan.text(), flush=True)
    if plan.seconds > LONG and what.budget is None:
        advice = (
            slow_dtype_advice(model)
            + "--budget 10m leaves out the most expensive rows, or give a shorter length in --context-lengths"
        )
        print(f"This takes long on this machine. Shorter: {advice}.", flush=True)
    if what.dry_run:
        return
    left = None if what.budget is None else what.budget - (time.perf_counter() - began)
    rows, notes = measure(model, tokenizer, documents, what, plan, left)
    records = [record for row in rows.values() for record in row]
    print("\n".join(["", text_table(records), "", *reach_lines(records), "", *notes]))
    taken = recommend(rows, {step.candidate.name: step.candidate.kind for step in plan.steps})
    print("\n".join([*taken.lines, "", *next_commands(name, what, model, taken)]))
    if what.output is not None:
        print(f"\nin {what.output}; a page with plots: hf-posenc report {shlex.quote(what.output)} --output-dir report")


def next_commands(name: str, what: CompareConfig, model: PreTrainedModel, taken: Recommendation) -> list[str]:
    """Return the commands that make, train and serve what is recommended.

    For a model that is best as it is: how to ask about longer texts, or, if it does not hold either, how to train it.
    """
    from hf_posenc.comparing.candidates import ROPE_SCALING, STATIC

    length = length_name(what.context_length)
    here = Path(name).expanduser()
    folder = f"{(here.resolve() if here.exists() else here).name}-{length}"
    if taken.method == "none" and taken.holds:
        longer = ["--documents", "LONGER_TEXTS", "--context-lengths", 2 * int(what.context_length), "--method", "auto"]
        words = shlex.join(map(str, ["hf-posenc", "eval", name, *longer]))
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
    from hf_posenc.comparing.candidates import ROPE_SCALING
    from hf_posenc.patching.rope_scaling import read_rope_scaling

    given = {
        "context_length": int(what.context_length),
        "original_max_position_embeddings": what.original_max_position_embeddings,
        "sliding_window": what.sliding_window if what.sliding_window != "keep" else None,
        "on_scaled": what.on_scaled if what.on_scaled != "refuse" else None,
    }
    rule = ["--method", name]
    if name == ROPE_SCALING and what.rope_scaling is not None:
        rule = ["--rope-scaling", what.rope_scaling]
        if read_rope_scaling(what.rope_scaling).factor is not None:
            del given["context_length"]
    flags = [(f"--{flag.replace('_', '-')}", value) for flag, value in given.items() if value is not None]
    return [*rule, *(word for pair in flags for word in pair)]


def _stack_for(model: PreTrainedModel) -> str | None:
    """Return the first server that is known to run models of this type."""
    from hf_posenc.exports import STACKS

    config = model.config.get_text_config(decoder=True)
    return next((name for name, stack in STACKS.items() if config.model_type in stack.model_types), None)
