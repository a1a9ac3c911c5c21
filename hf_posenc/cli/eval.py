"""What ``hf-posenc eval`` does once its flags are read: load, measure each row, print."""

from __future__ import annotations

import os
from typing import Any

from hf_posenc.checkpoint.loading import load_model
from hf_posenc.cli.eval_arguments import EvalArguments, key_token_settings
from hf_posenc.cli.shared_arguments import ModelArguments
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation import Record, perplexity, reach_lines
from hf_posenc.evaluation.key_tokens import load_key_tokens
from hf_posenc.evaluation.records import RetrievalRecord, check_output
from hf_posenc.evaluation.rows import extended_as, refuse_extended, try_rows
from hf_posenc.report import text_table
from hf_posenc.retrieval.config import RetrievalConfig
from hf_posenc.retrieval.measuring_retrieval import retrieval
from hf_posenc.utils.processes import join_processes, leave_processes


def evaluate(
    model_name: str,
    rows: list[dict[str, Any] | None],
    settings: dict[str, Any],
    what: EvalArguments,
    prompts: RetrievalConfig,
    loading: ModelArguments,
    on_scaled: str,
) -> None:
    """Measure every row and print the table.

    Args:
        model_name: What ``load_model`` takes.
        rows: How the model is extended, for each row.
        settings: What ``perplexity`` or ``retrieval`` takes, but for model and tokenizer.
        what: The flags of ``eval``.
        prompts: The flags of retrieval.
        loading: How the model is loaded.
        on_scaled: ``"replace"`` to measure a model that is scaled already by another rule.

    Raises:
        ValueError: As ``perplexity`` and ``retrieval``, or there is no number to print.
    """
    settings["model_name"] = what.model_name or model_name
    if what.output is not None:
        check_output(what.output)
    sharded = join_processes(loading.device)  # before loading, which puts the model on this process' GPU
    model, tokenizer = load_model(model_name, **vars(loading))
    if any(rows):
        refuse_extended(model, model_name, on_scaled)
    try_rows(model, rows)
    settings |= {"tokenizer": tokenizer, "sharded": sharded}
    if not prompts.tasks and "longppl" in what.protocol:
        chosen = key_token_settings(what)
        settings["key_tokens"] = load_key_tokens(tokenizer=tokenizer, **chosen, **vars(loading))
    records: list[Record | RetrievalRecord] = []
    for row in rows:
        with extended_as(model, row):
            records += retrieval(model, **settings) if prompts.tasks else perplexity(model, **settings)
    if sharded:
        leave_processes()
    if os.environ.get("RANK", "0") != "0":  # torchrun and accelerate: the first process speaks for all
        return
    if not records:
        raise InvalidRequestError(
            "longppl found no key token in these documents, so there is no number. Lower --alpha or --beta, or give "
            "more or longer texts."
        )
    print("\n".join([text_table(records), "", *reach_lines(records)]))
    if what.output is not None:
        print(f"\nin {what.output}; a page with plots: hf-posenc report {what.output} --output-dir report")
