"""``hf-posenc fit``: what it will take, the fit, what the rule is worth on held-out texts, and the checkpoint."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_posenc.cli.output_folders import check_folder, check_work_folder
from hf_posenc.cli.shared_arguments import (
    MODEL,
    DocumentArguments,
    ModelArguments,
    PublishArguments,
    parse,
    parse_options,
)
from hf_posenc.errors import InvalidRequestError
from hf_posenc.fitting.config import WORK_FILES, FitConfig

if TYPE_CHECKING:
    from hf_posenc.evaluation.records import Record
    from hf_posenc.fitting.fitting import FitResult
    from hf_posenc.publishing.repository import Repository


@dataclass
class FitArguments:
    """What is fitted, how, and for how long."""

    HELP_COMMON: ClassVar[tuple[str, ...]] = ("output", "adapt")

    output: str = field(metadata={"help": "folder to write the extended model to"})
    adapt: list[str] = field(
        default_factory=list,
        metadata={
            "help": "fit no rule, but low-rank changes of the query and key projections to an existing one: rank=64; "
            "or rule (llama3), steps, queries, learning_rate, short_steps, short_rate",
            "action": "extend",
            "metavar": "K=V",
        },
    )
    save_adapter: bool = field(
        default=False, metadata={"help": "with --adapt: save a LoRA adapter, not the model with changed weights"}
    )
    teacher_option: list[str] = field(
        default_factory=list,
        metadata={
            "help": "options of the teacher, such as --teacher-option chunk_size=4096",
            "action": "extend",
            "metavar": "K=V",
        },
    )


def fit(argv: Sequence[str]) -> None:
    """Fit a static method to a model, or with --adapt its weights to a method, and compare it with published ones.

    Examples:
        hf-posenc fit MODEL --documents books/ --context-length 32k --output longer
        hf-posenc fit MODEL --documents books/ --context-length 32k --output longer --max-texts 2 --adapt rank=64
        hf-posenc fit MODEL --documents books/ --context-length 32k --output longer --budget 30m
        hf-posenc fit MODEL --documents books/ --context-length 32k --output longer --push-to-hub me/longer
    """
    known = (FitArguments, FitConfig, DocumentArguments, ModelArguments, PublishArguments)
    given, where, what, source, loading, publishing = parse("fit", fit.__doc__, argv, known, MODEL)
    what.teacher_options = parse_options(where.teacher_option, "--teacher-option", "chunk_size=4096")
    what.adapt_options = parse_options(where.adapt, "--adapt", "rank=64") if where.adapt else None
    if where.save_adapter and not where.adapt:
        raise InvalidRequestError("--save-adapter is for the changes of --adapt: give --adapt rank=64 too.")
    what.check()
    check_folder(given.model, where.output, may_hold_files=False)
    output = Path(where.output).expanduser()
    work_dir = output.with_name(f"{output.name}.work")
    check_work_folder(work_dir, WORK_FILES)
    documents = source.stream().texts()
    from hf_posenc.checkpoint.loading import check_path, load_model
    from hf_posenc.fitting.cost import cost_in_words
    from hf_posenc.fitting.fitting import fit_method, texts_to_fit
    from hf_posenc.publishing.provenance import document_source

    check_path(Path(given.model).expanduser(), given.model)
    repository = None if what.dry_run else publishing.make_repository()
    model, tokenizer = load_model(given.model, **vars(loading))
    num_texts = len(texts_to_fit(model, tokenizer, documents, what).fitted)
    print(cost_in_words(model, what, num_texts, where.output), flush=True)
    if what.dry_run:
        return
    try:
        result = fit_method(model, tokenizer, documents, what, work_dir=work_dir, model_name=given.model)
    except KeyboardInterrupt:
        print(f"what is done is kept in {work_dir}: the same command goes on from there", file=sys.stderr)
        raise
    print(_in_words(result))
    del model
    documents_in_words = document_source(vars(source)).words
    _save(given.model, output, what, result, documents_in_words, repository, as_adapter=where.save_adapter)
    shutil.rmtree(work_dir)
    loading = "load_extended" if where.save_adapter else "plain Transformers"
    export = shlex.join(["hf-posenc", "export", where.output, "--to", "vllm"])
    print(f"saved: {where.output}, which {loading} loads. To serve it: {export}")
    if repository is not None:
        print(f"pushed: {repository.url}")


def _in_words(result: FitResult) -> str:
    """Return the rule, the table and the verdict."""
    from hf_posenc.reporting import text_table
    from hf_posenc.utils.units import duration_name

    lines = []
    if result.adapter is None:
        divisors = " ".join(f"{value:.3g}" for value in result.options["long_factor"])
        whose = f"divisors of {result.facts['instead']}" if "instead" in result.facts else "divisors"
        lines += ["", f"{whose}: {divisors}", f"attention factor: {result.options['attention_factor']:.4f}"]
    else:
        how, (before, after) = result.adapter.settings, result.adapter.mean_errors
        lines += [
            "",
            f"weights changed for {result.method}: rank {how.rank}, {how.steps} steps in each layer, and "
            f"{how.short_steps} on short texts",
            f"relative squared error of the attention, on average over the layers: {before:.4f}, and {after:.4f} after",
        ]
    if result.records:
        lines += ["", text_table([record for row in result.records.values() for record in row])]
    if result.numbers_found:
        length = next(iter(result.numbers_found.values())).context_length
        lines += ["", f"hidden numbers found in {length} tokens:"]
        lines += [f"  {name}: {found}" for name, found in result.numbers_found.items()]
    if result.verdict is not None:
        lines += ["", *result.verdict.lines]
        if result.verdict.better is False and result.adapter is None:
            taken = "it is saved instead" if "instead" in result.facts else "--take-best saves it instead"
            lines.append(f"{result.verdict.best} is the better one: {taken}")
    return "\n".join([*lines, "", f"fitted and measured in {duration_name(result.seconds)}"])


def _save(
    name: str,
    output: Path,
    config: FitConfig,
    result: FitResult,
    documents: str,
    repository: Repository | None,
    *,
    as_adapter: bool,
) -> None:
    """Save the model with the rule and what was measured; without an adapter its weights are those of the checkpoint.

    Args:
        name: The model's.
        output: The folder.
        config, result: The fit.
        documents: What it was fitted on, in words.
        repository: What it is pushed to; None for nothing.
        as_adapter: Save the changes of the weights as an adapter; without, they are added to the weights.
    """
    from hf_posenc.checkpoint.loading import load_model
    from hf_posenc.checkpoint.manifest import tokens_trained
    from hf_posenc.patching.api import patch_model
    from hf_posenc.publishing.saving import save_extended
    from hf_posenc.utils.console import quiet
    from hf_posenc.utils.dtypes import CHECKPOINT

    trained = tokens_trained(name)
    model, tokenizer = load_model(name, dtype=CHECKPOINT, device="cpu")
    with quiet(patch_model.__module__):
        patch_model(model, tokenizer=tokenizer, **config.request(result.method, result.options))
    saved: Any = model
    if result.adapter is not None:
        saved = result.adapter.wrap(model)
        saved = saved if as_adapter else saved.merge_and_unload()
    save_extended(
        saved,
        output,
        tokenizer,
        tokens_trained=trained,
        base_model=name,
        fitted_on={**result.facts, "documents": documents},
        # The file in the work folder has those of requests before this one too.
        records=[record for row in result.records.values() for record in row if _is_saved(record, result)],
        card=True,
        push_to_hub=repository,
    )


def _is_saved(record: Record, result: FitResult) -> bool:
    """Return whether a record is kept for the card: all but those of the rule alone, if weights were changed for it."""
    if record.label or result.adapter is None:
        return True
    own = next(iter(result.records.values()))[0]
    return (record.method, record.options) != (own.method, own.options)
