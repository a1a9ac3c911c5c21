"""``hf-posenc patch``: load, extend, verify, save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.cli.output_folders import check_folder
from hf_posenc.cli.shared_arguments import (
    MODEL,
    ModelArguments,
    OptionArguments,
    PublishArguments,
    parse,
    parse_options,
)
from hf_posenc.errors import InvalidRequestError, MissingFileError
from hf_posenc.methods.registry import DEFAULT_METHOD, make_method
from hf_posenc.patching.extension_config import ExtensionConfig, ExtensionRequest

if TYPE_CHECKING:
    from hf_posenc.evaluation.records import Record


@dataclass
class PatchArguments:
    """How the model is extended."""

    method: str | None = field(
        default=None,
        metadata={"help": "a method from `hf-posenc list methods`; default: yarn, or that of --preset"},
    )
    results: str | None = field(
        default=None,
        metadata={"help": "results of `hf-posenc eval` with this method, for the table and curve of the model card"},
    )


def patch(argv: Sequence[str]) -> None:
    """Extend a model and save it so that plain Transformers loads it extended.

    Examples:
        hf-posenc patch MODEL longer-model --method yarn --factor 4
        hf-posenc patch MODEL longer-model --context-length 32k --option beta_fast=16 ramp=paper
        hf-posenc patch MODEL longer-model --factor 4 --results results.jsonl --push-to-hub me/longer-model
    """
    known = (PatchArguments, ExtensionConfig, OptionArguments, ModelArguments, PublishArguments)
    positional = {**MODEL, "output": "folder to write"}
    given, which, extension, options, loading, publishing = parse("patch", patch.__doc__, argv, known, positional)
    rules = parse_options(options.option)
    request = ExtensionRequest(**vars(extension), method=which.method, options=rules)
    if request.method is None:
        make_method(DEFAULT_METHOD, options=rules)  # refuses options that the default method does not take
    check_folder(given.model, given.output, may_hold_files=False)
    records = _records(which.results)
    from hf_posenc.checkpoint.loading import check_path, load_model
    from hf_posenc.checkpoint.manifest import tokens_trained
    from hf_posenc.evaluation.rows import refuse_extended
    from hf_posenc.patching.api import is_patched, patch_model, unpatch_model, verify_model
    from hf_posenc.patching.verification import extension_words
    from hf_posenc.publishing.saving import save_extended
    from hf_posenc.utils.console import quiet
    from hf_posenc.utils.dtypes import AUTO, CHECKPOINT

    check_path(Path(given.model).expanduser(), given.model)
    repository = publishing.make_repository()
    trained = tokens_trained(given.model)
    if loading.dtype == AUTO:
        loading.dtype = CHECKPOINT  # nothing is computed here but positions
    loading.device = loading.device or "cpu"
    model, tokenizer = load_model(given.model, **vars(loading))
    refuse_extended(model, given.model, extension.on_scaled)
    if is_patched(model):
        unpatch_model(model)
    with quiet(patch_model.__module__):  # it is printed below
        patch_model(model, which.method, **vars(extension), **rules, tokenizer=tokenizer)
    verification = verify_model(model)
    save_extended(
        model,
        given.output,
        tokenizer,
        tokens_trained=trained,
        base_model=given.model,
        records=records,
        card=True,
        push_to_hub=repository,
    )
    print(f"{extension_words(verification.extension)}\nverified: {verification.found}\nsaved: {given.output}")
    if repository is not None:
        print(f"pushed: {repository.url}")


def _records(path: str | None) -> list[Record]:
    """Return the perplexities of a file of results.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds no perplexity, or a line of it is no record.
    """
    if path is None:
        return []
    file = Path(path).expanduser()
    if not file.is_file():
        raise MissingFileError(f"--results: there is no file {path!r}. hf-posenc eval --output {path} writes it.")
    from hf_posenc.evaluation.records import read_records

    if not (records := read_records(file)):
        raise InvalidRequestError(f"--results: {path!r} holds no perplexity. hf-posenc eval measures some.")
    return records
