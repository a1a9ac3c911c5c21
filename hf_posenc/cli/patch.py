"""``hf-posenc patch``: load, extend, verify, save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_posenc.cli.output_folders import check_folder
from hf_posenc.cli.shared_arguments import MODEL, ModelArguments, OptionArguments, parse, parse_options
from hf_posenc.methods.registry import DEFAULT_METHOD
from hf_posenc.patching.extension_config import ExtensionConfig, check_request, resolve_rope_scaling


@dataclass
class PatchArguments:
    """How the model is extended."""

    method: str | None = field(
        default=None, metadata={"help": "a method from `hf-posenc methods`; default: yarn, unless --preset is given"}
    )


def patch(argv: Sequence[str]) -> None:
    """Extend a model and save it so that plain Transformers loads it extended.

    Examples:
        hf-posenc patch MODEL longer-model --method yarn --factor 4
        hf-posenc patch MODEL longer-model --context-length 32k --option beta_fast=16 ramp=paper
    """
    known = (PatchArguments, ExtensionConfig, OptionArguments, ModelArguments)
    positional = {**MODEL, "output": "folder to write"}
    given, which, extension, options, loading = parse("patch", patch.__doc__, argv, known, positional)
    named = [which.method] if which.method else []
    named, extension, rules = resolve_rope_scaling(named, extension, parse_options(options.option))
    methods = named or ([] if extension.preset else [DEFAULT_METHOD])
    check_request(methods, extension, rules)
    check_folder(given.model, given.output, may_hold_files=False)
    from hf_posenc.checkpoint.extended import save_extended
    from hf_posenc.checkpoint.loading import load_model
    from hf_posenc.checkpoint.manifest import tokens_trained
    from hf_posenc.evaluation.rows import refuse_extended
    from hf_posenc.patching.api import is_patched, patch_model, unpatch_model, verify_model
    from hf_posenc.patching.verification import extension_words
    from hf_posenc.utils.console import quiet
    from hf_posenc.utils.dtypes import AUTO, CHECKPOINT

    trained = tokens_trained(given.model)
    if loading.dtype == AUTO:
        loading.dtype = CHECKPOINT  # nothing is computed here but positions
    model, tokenizer = load_model(given.model, **vars(loading))
    refuse_extended(model, given.model, extension.on_scaled)
    if is_patched(model):
        unpatch_model(model)
    with quiet(patch_model.__module__):  # it is printed below
        patch_model(model, methods[0] if methods else None, **vars(extension), **rules, tokenizer=tokenizer)
    verification = verify_model(model)
    save_extended(model, given.output, tokenizer, tokens_trained=trained, base_model=given.model)
    print(f"{extension_words(verification.extension)}\nverified: {verification.found}\nsaved: {given.output}")
