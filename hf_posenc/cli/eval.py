"""``hf-posenc eval``: perplexity or retrieval of each row, as a table and a file of records."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hf_posenc.cli.eval_auto import choose_method
from hf_posenc.cli.shared_arguments import (
    MODEL,
    DocumentArguments,
    ModelArguments,
    OptionArguments,
    parse,
    parse_options,
)
from hf_posenc.comparing.config import CompareConfig
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.config import EvalConfig, KeyTokens, OutputConfig, check_short_context
from hf_posenc.patching.extension_config import ExtensionConfig, rows_to_measure
from hf_posenc.retrieving.config import RetrievalConfig, check_retrieval
from hf_posenc.settings import refuse_given, same_field
from hf_posenc.utils.units import ContextLength, Duration

if TYPE_CHECKING:
    from hf_posenc.evaluation.records import AnyRecord

KEY_TOKENS = ("evaluator", "alpha", "beta", "short_context")
AUTO = "auto"
_OUTPUT = ("output", "label", "model_name")


@dataclass
class EvalArguments(OutputConfig, EvalConfig):
    """What is measured, and where the results go."""

    HELP_COMMON: ClassVar[tuple[str, ...]] = (
        "context_lengths",
        "method",
        "output",
        "max_documents",
        "cut",
        "budget",
    )

    method: list[str] = field(
        default_factory=list,
        metadata={
            "help": "methods from `hf-posenc list methods`; none: the unextended model; auto: recommend "
            "one of all that suit the model, or of those named after it; default: none or --preset"
        },
    )
    evaluator: str | None = field(
        default=None,
        metadata={"help": "longppl: model that chooses the key tokens; default: the measured model itself"},
    )
    alpha: float = same_field(KeyTokens, "alpha")
    beta: float = same_field(KeyTokens, "beta")
    short_context: ContextLength | None = same_field(KeyTokens, "short_context")
    budget: Duration | None = field(
        default=None,
        metadata={"help": "auto: longest time to take (90s, 20m, 1.5h): the most expensive rows are left out"},
    )
    dry_run: bool = field(
        default=False, metadata={"help": "auto: only show what would be measured, and how long it would take"}
    )


def evaluate(argv: Sequence[str]) -> None:
    """Measure perplexity or retrieval by context length, of a model as it is or extended by methods.

    Examples:
        hf-posenc eval MODEL --documents book.txt --context-lengths 512 2k 8k --method none yarn --output r.jsonl
        hf-posenc eval MODEL --tasks passkey --context-lengths 4k 8k --depths 0 50 100 --method none yarn --factor 2
        hf-posenc eval MODEL --documents book.txt --context-lengths 32k --method auto --budget 20m
    """
    known: list[Any] = [EvalArguments, DocumentArguments, RetrievalConfig]
    known += [ExtensionConfig, OptionArguments, ModelArguments]
    given, what, source, prompts, extension, options, loading = parse(
        "eval", evaluate.__doc__, argv, known, MODEL, defaults=_defaults
    )
    command = shlex.join(["hf-posenc", "eval", *argv])
    if AUTO in what.method:
        compared = compare_config(given.model, what, prompts, extension, options)
        choose_method(given.model, replace(compared, command=command), source, loading)
        return
    refuse_given(what, _usual(what), ("budget", "dry_run"), "is for --method auto; leave it out, or give that method")
    rows = rows_to_measure(what.method, extension, parse_options(options.option))
    settings = retrieval_settings(what, prompts) if prompts.tasks else perplexity_settings(what, prompts)
    settings["documents"] = None if prompts.tasks and not source.documents else source.stream().texts()
    settings["model_name"] = what.model_name or given.model
    settings["command"] = command
    from hf_posenc.checkpoint.loading import load_model, read_tokenizer
    from hf_posenc.checkpoint.manifest import tokens_trained
    from hf_posenc.evaluation import perplexity, reach_lines
    from hf_posenc.evaluation.key_tokens import load_evaluator
    from hf_posenc.evaluation.records import check_output
    from hf_posenc.evaluation.rows import extended_as, refuse_extended, try_rows
    from hf_posenc.reporting import text_table
    from hf_posenc.retrieving.measuring_retrieval import check_prompts, retrieval
    from hf_posenc.utils.processes import join_processes, leave_processes

    settings["tokens_trained"] = tokens_trained(given.model)
    if what.output is not None:
        check_output(what.output)
    if prompts.tasks:
        shown = {name: settings[name] for name in ("tasks", "context_lengths", "questions", "documents", "chat")}
        check_prompts(read_tokenizer(given.model), **shown)
    sharded = join_processes(loading.device)  # before loading, which puts the model on this process' GPU
    model, tokenizer = load_model(given.model, **vars(loading))
    if any(rows):
        refuse_extended(model, given.model, extension.on_scaled)
    try_rows(model, rows)
    settings |= {"tokenizer": tokenizer, "sharded": sharded}
    if not prompts.tasks and "longppl" in what.protocol:
        judge = None if what.evaluator is None else load_evaluator(what.evaluator, tokenizer, **vars(loading))
        settings["key_tokens"] = KeyTokens(judge, what.alpha, what.beta, what.short_context)
    records: list[AnyRecord] = []
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
        print(f"\nin {what.output}; a page with plots: hf-posenc report {shlex.quote(what.output)} --output-dir report")


def _defaults(given: argparse.Namespace) -> dict[str, Any]:
    """Return the default number of documents of ``--method auto``, whose rows are many."""
    return {"max_documents": 1} if AUTO in getattr(given, "method", ()) else {}


def _usual(what: EvalArguments) -> EvalArguments:
    return EvalArguments(context_lengths=what.context_lengths)


def compare_config(
    name: str, what: EvalArguments, prompts: RetrievalConfig, extension: ExtensionConfig, options: OptionArguments
) -> CompareConfig:
    """Return the settings of a comparison by ``--method auto``.

    Raises:
        ValueError: Several lengths, or a flag that it has no use for.
    """
    if len(what.context_lengths) != 1:
        raise InvalidRequestError("--method auto takes one length in --context-lengths: how far the model is to read.")
    used = {one.name for one in fields(CompareConfig)} - {"context_length", "methods"}
    parts = ((what, _usual(what)), (prompts, RetrievalConfig()), (extension, ExtensionConfig()))
    settings: dict[str, Any] = {}
    for given, usual in parts:
        others = [one.name for one in fields(given) if one.name not in (*used, "method", "context_lengths")]
        refuse_given(given, usual, others, "has no use with --method auto; leave it out")
        settings |= {one.name: getattr(given, one.name) for one in fields(given) if one.name in used}
    refuse_given(options, OptionArguments(), ("option",), "has no use with --method auto; leave it out")
    settings["model_name"] = what.model_name or name
    methods = [method for method in what.method if method != AUTO]
    return CompareConfig(what.context_lengths[0], methods, **settings)


def perplexity_settings(what: EvalArguments, retrieval: RetrievalConfig) -> dict[str, Any]:
    """Return the settings for ``perplexity``.

    Raises:
        ValueError: A length or number that cannot be, or a flag that nothing requested has a use for.
    """
    what.runs()
    if "longppl" not in what.protocol:
        refuse_given(what, _usual(what), KEY_TOKENS, "is for --protocol longppl; leave it out, or measure that")
    if "longppl" in what.protocol and what.short_context is not None:
        check_short_context(what.short_context, what.context_lengths)
    refuse_given(
        retrieval,
        RetrievalConfig(),
        ("depths", "samples", "questions", "chat"),
        "is for --tasks; leave it out, or give --tasks",
    )
    names = (*(one.name for one in fields(EvalConfig)), *_OUTPUT)
    return {**{name: getattr(what, name) for name in names}, "progress": not what.hide_progress}


def retrieval_settings(what: EvalArguments, retrieval: RetrievalConfig) -> dict[str, Any]:
    """Return the settings for ``retrieval``.

    Raises:
        ValueError: A flag that only perplexity has was given too, or a length, depth or number cannot be.
    """
    shared = ("context_lengths", "prefill_chunk")
    only_perplexity = (*(one.name for one in fields(EvalConfig) if one.name not in shared), *KEY_TOKENS)
    refuse_given(what, _usual(what), only_perplexity, "says how perplexity is measured; leave it or --tasks out")
    check_retrieval(retrieval.tasks, what.context_lengths, retrieval.depths, retrieval.samples, retrieval.questions)
    own = {name: getattr(what, name) for name in (*shared, *_OUTPUT)}
    return {**vars(retrieval), **own, "progress": not what.hide_progress}
