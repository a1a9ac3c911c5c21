"""``hf-posenc fit``: what it will take, the fit, what the rule is worth on held-out texts, and the checkpoint."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hf_posenc.cli.output_folders import check_folder, check_work_folder
from hf_posenc.cli.shared_arguments import MODEL, DocumentArguments, ModelArguments, parse, parse_options
from hf_posenc.fitting.config import WORK_FILES, FitConfig
from hf_posenc.utils.files import write_whole

if TYPE_CHECKING:
    from hf_posenc.fitting.fitting import FitResult


@dataclass
class FitArguments:
    """What is fitted, how, and for how long."""

    HELP_COMMON: ClassVar[tuple[str, ...]] = ("output",)

    output: str = field(metadata={"help": "folder to write the extended model to"})
    teacher_option: list[str] = field(
        default_factory=list,
        metadata={
            "help": "options of the teacher, such as --teacher-option chunk_size=4096",
            "action": "extend",
            "metavar": "K=V",
        },
    )


def fit(argv: Sequence[str]) -> None:
    """Fit a static method to a model, with all weights frozen, and compare it with the published ones.

    Examples:
        hf-posenc fit MODEL --documents books/ --context-length 32k --output longer
        hf-posenc fit MODEL --documents books/ --context-length 32k --output longer --budget 30m
    """
    known = (FitArguments, FitConfig, DocumentArguments, ModelArguments)
    given, where, what, source, loading = parse("fit", fit.__doc__, argv, known, MODEL)
    what.teacher_options = parse_options(where.teacher_option)
    what.check()
    check_folder(given.model, where.output, may_hold_files=False)
    output = Path(where.output).expanduser()
    work_dir = output.with_name(f"{output.name}.work")
    check_work_folder(work_dir, WORK_FILES)
    documents = source.texts()
    from hf_posenc.checkpoint.loading import load_model
    from hf_posenc.fitting.cost import cost_in_words
    from hf_posenc.fitting.fitting import fit_method, texts_to_fit

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
    _save(given.model, output, what, result)
    if result.records:  # the file in the work folder has those of requests before this one too
        lines = [record.to_json() + "\n" for row in result.records.values() for record in row]
        write_whole(output / "results.jsonl", "".join(lines))
    shutil.rmtree(work_dir)
    print(
        f"saved: {where.output}, which plain Transformers loads. To serve it: hf-posenc export {where.output} --to vllm"
    )


def _in_words(result: FitResult) -> str:
    """Return the rule, the table and the verdict."""
    from hf_posenc.report import text_table
    from hf_posenc.utils.units import duration_name

    divisors = " ".join(f"{value:.3g}" for value in result.options["long_factor"])
    whose = f"divisors of {result.facts['instead']}" if "instead" in result.facts else "divisors"
    lines = ["", f"{whose}: {divisors}", f"attention factor: {result.options['attention_factor']:.4f}"]
    if result.records:
        lines += ["", text_table([record for row in result.records.values() for record in row])]
    if result.numbers_found:
        length = next(iter(result.numbers_found.values())).context_length
        lines += ["", f"hidden numbers found in {length} tokens:"]
        lines += [f"  {name}: {found}" for name, found in result.numbers_found.items()]
    if result.verdict is not None:
        lines += ["", *result.verdict.lines]
        if result.verdict.better is False:
            taken = "it is saved instead" if "instead" in result.facts else "--take-best saves it instead"
            lines.append(f"{result.verdict.best} is the better one: {taken}")
    return "\n".join([*lines, "", f"fitted and measured in {duration_name(result.seconds)}"])


def _save(name: str, output: Path, config: FitConfig, result: FitResult) -> None:
    """Save the model with the rule, its weights as they are in the checkpoint."""
    from hf_posenc.checkpoint.extended import save_extended
    from hf_posenc.checkpoint.loading import load_model
    from hf_posenc.checkpoint.manifest import tokens_trained
    from hf_posenc.patching.api import patch_model
    from hf_posenc.utils.console import quiet
    from hf_posenc.utils.dtypes import CHECKPOINT

    trained = tokens_trained(name)
    model, tokenizer = load_model(name, dtype=CHECKPOINT, device="cpu")
    with quiet(patch_model.__module__):
        patch_model(model, tokenizer=tokenizer, **config.request("fitted", result.options))
    save_extended(model, output, tokenizer, tokens_trained=trained, base_model=name, fitted_on=result.facts)
