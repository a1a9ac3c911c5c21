"""What can be said of a command's arguments before a model is loaded, which takes minutes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_posenc.cli.eval_arguments import EvalArguments, RetrievalArguments
from hf_posenc.errors import InvalidRequestError, InvalidTypeError, UnknownOptionError, argument
from hf_posenc.patching.extension_config import ExtensionConfig
from hf_posenc.utils.units import ContextLength

KEY_TOKENS = ("evaluator", "alpha", "beta", "short_context")
NONE = "none"  # no method: the model as it is


def check_request(methods: Sequence[str], extension: ExtensionConfig, rules: dict[str, Any]) -> None:
    """Check a request for one or more methods, or a preset, as far as it goes without the model.

    Args:
        methods: Names; "none" is no method.
        extension: How far.
        rules: The options of the method.

    Raises:
        TypeError: A method does not take an option, or a value is of the wrong type.
        ValueError: A method or preset is unknown, a value is out of range, or two that exclude each other are given.
    """
    from hf_posenc.families.sliding_window import check_window
    from hf_posenc.methods.registry import make_method
    from hf_posenc.patching.presets import get_preset
    from hf_posenc.spec import check_length

    if extension.factor is not None and extension.context_length is not None:
        raise InvalidRequestError(
            f"give --factor or --context-length, not both (got {extension.factor:g} and {extension.context_length}): "
            "factor is context length / original length."
        )
    lengths = ("context_length", "original_max_position_embeddings")
    for name in lengths:
        if getattr(extension, name) is not None:
            check_length(argument(name), getattr(extension, name))
    check_window(extension.sliding_window)
    named = [method for method in methods if method != NONE]
    for method in named:
        try:
            make_method(method, 1.0 if extension.factor is None else extension.factor, rules)
        except UnknownOptionError as error:
            if len(named) == 1 or not rules:
                raise
            raise InvalidTypeError(
                f"{error} --option is for every --method of a command: measure {method!r} in one of its own, with the "
                "same --output."
            ) from None
    if extension.preset is not None:
        given = {name: getattr(extension, name) for name in ("factor", *lengths)}
        get_preset(extension.preset).refuse_besides(method=", ".join(named) or None, **given, options=rules)


def in_our_words(
    methods: Sequence[str], extension: ExtensionConfig, rules: dict[str, Any]
) -> tuple[list[str], ExtensionConfig, dict[str, Any]]:
    """Return a request with ``--rope-scaling``, where it is given, expressed by method, factor, length and options too.

    Args:
        methods: Names; "none" is no method.
        extension: How far.
        rules: The options of the method.

    Raises:
        TypeError, ValueError: The dictionary is wrong, does not say how far, or something else was given as well.
    """
    if extension.rope_scaling is None:
        return list(methods), extension, rules
    from hf_posenc.patching.rope_scaling import read_rope_scaling

    scaling = read_rope_scaling(extension.rope_scaling)
    named: list[str | None] = [method for method in methods if method != NONE]
    decided = ("factor", "original_max_position_embeddings", "preset")
    for method in named or [None]:
        scaling.refuse_other(method=method, **{name: getattr(extension, name) for name in decided}, options=rules)
    scaling.check_length_is_said(extension.context_length)
    known = scaling.original_max_position_embeddings
    original = None if known is None else ContextLength(known)
    # The dictionary stays, for what it repeats of the model.
    extension = dataclasses.replace(extension, factor=scaling.factor, original_max_position_embeddings=original)
    return [*methods, *([] if named else [scaling.method])], extension, scaling.options


def rows_to_measure(
    methods: Sequence[str], extension: ExtensionConfig, rules: dict[str, Any]
) -> list[dict[str, Any] | None]:
    """Return the arguments of ``patch_model`` for each row of numbers; None leaves the model as it is.

    Args:
        methods: Names; "none" is the model as it is, which is measured without any name and preset too.
        extension: How far, or by which preset.
        rules: The options of the method.

    Raises:
        TypeError, ValueError: As for ``check_request``, or settings without a method or preset to use them.
    """
    methods, extension, rules = in_our_words(methods, extension, rules)
    check_request(methods, extension, rules)
    settings = {**vars(extension), **rules}
    rows = [None if method == NONE else {"method": method, **settings} for method in methods]
    if extension.preset is not None:
        return [*rows, settings]
    if not any(rows) and (rules or extension != ExtensionConfig()):
        raise InvalidRequestError(
            "--factor, --context-length, --option and what else says how to extend need a --method, such as yarn, or a "
            "--preset."
        )
    return rows or [None]


def perplexity_settings(what: EvalArguments, questions: RetrievalArguments) -> dict[str, Any]:
    """Return the arguments of ``perplexity``.

    Raises:
        ValueError: A length or number that cannot be, or a flag that nothing requested has a use for.
    """
    from hf_posenc.evaluation.key_tokens import check_short_context
    from hf_posenc.evaluation.plans import plan_runs
    from hf_posenc.evaluation.texts import Choice, check_bos, check_choice, check_sizes

    runs = plan_runs(what.protocol, what.context_lengths, what.stride, what.last_k, what.average)
    check_sizes(prefill_chunk=what.prefill_chunk, batch_size=what.batch_size)
    check_choice(runs, Choice(what.max_tokens, what.min_tokens, what.cut, what.max_documents))
    check_bos(runs, what.bos)
    key_token_settings(what)
    if "longppl" in what.protocol and what.short_context is not None:
        check_short_context(what.short_context, what.context_lengths)
    refuse_given(questions, RetrievalArguments(), ("depths", "samples", "chat"), "is for --tasks; leave it out, or ask")
    useless = {
        "stride": all(run.stride is None for run in runs) and "moves a window",
        "last_k": all(run.last_k is None for run in runs) and "scores the last tokens",
        "batch_size": all(run.window is None and run.protocol != "longppl" for run in runs) and "has several windows",
    }
    for name, does in useless.items():
        if does and getattr(what, name) is not None:
            raise InvalidRequestError(
                f"--{name.replace('_', '-')} is for a --protocol that {does}, not for {', '.join(what.protocol)}; "
                "leave it out, or measure such a one."
            )
    others = ("method", "hide_progress", *KEY_TOKENS)
    settings = {name: value for name, value in vars(what).items() if name not in others}
    return {**settings, "progress": not what.hide_progress}


def key_token_settings(what: EvalArguments) -> dict[str, Any]:
    """Return the arguments of ``load_key_tokens``.

    Raises:
        ValueError: One of the flags was given, but not the protocol they are for.
    """
    if "longppl" not in what.protocol:
        usual = EvalArguments(context_lengths=what.context_lengths)
        refuse_given(what, usual, KEY_TOKENS, "is for --protocol longppl; leave it out, or measure that")
    return {name: getattr(what, name) for name in KEY_TOKENS}


def refuse_given(what: Any, usual: Any, names: Sequence[str], why: str) -> None:
    """Raise if one of the flags has another value than the usual one."""
    for name in names:
        if getattr(what, name) != getattr(usual, name):
            raise InvalidRequestError(f"--{name.replace('_', '-')} {why}.")


def retrieval_settings(what: EvalArguments, questions: RetrievalArguments) -> dict[str, Any]:
    """Return the arguments of ``retrieval``.

    Raises:
        ValueError: A flag that only perplexity has was given too, or a length, depth or number cannot be.
    """
    from hf_posenc.retrieval.measuring import check_retrieval

    only_perplexity = (
        "protocol",
        "stride",
        "last_k",
        "max_tokens",
        "min_tokens",
        "average",
        "bos",
        "batch_size",
        "max_documents",
        "cut",
        *KEY_TOKENS,
    )
    usual = EvalArguments(context_lengths=what.context_lengths)
    refuse_given(what, usual, only_perplexity, "says how perplexity is measured; leave it or --tasks out")
    check_retrieval(questions.tasks, what.context_lengths, questions.depths, questions.samples)
    shared = ("context_lengths", "output", "prefill_chunk", "label", "model_name")
    return {**vars(questions), **{name: getattr(what, name) for name in shared}, "progress": not what.hide_progress}


def tokens_trained(model: str) -> int | None:
    """Return how many tokens a model was fine-tuned on, as its manifest says; 0 for one without, None if unknown."""
    from hf_posenc.checkpoint.manifest import find_manifest

    found = find_manifest(model)
    return 0 if found is None else found[0]["tokens_trained"]


def check_writable(output: str) -> None:
    """Check that a folder can be made, or be written to where it exists.

    Raises:
        ValueError: It is a file, or below one, or this user may not write there.
    """
    folder = Path(output).expanduser().resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise InvalidRequestError(
            f"{str(existing)!r} is a file, so {output!r} cannot be a folder. Give another to write to."
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidRequestError(
            f"{str(existing)!r} cannot be written to by this user. Give another folder than {output!r}."
        )


def check_folder(model: str, output: str, may_hold_files: bool = True) -> None:
    """Check a folder to write a model to.

    Raises:
        ValueError: It is a file or the model's own folder, or, unless it may, holds files that are not ours.
    """
    from hf_posenc.checkpoint.manifest import MANIFEST

    folder = Path(output).expanduser().resolve()
    if Path(model).expanduser().resolve() == folder:
        raise InvalidRequestError("the output folder is the model's own. Give another, so that the original is kept.")
    check_writable(output)
    if may_hold_files or not folder.is_dir() or (folder / MANIFEST).is_file():
        return
    if found := sorted(path.name for path in folder.iterdir()):
        raise InvalidRequestError(
            f"folder {output!r} is not empty and was not written by hf-posenc; it holds {', '.join(found[:8])}. "
            "Give a new folder, so that nothing is mixed up."
        )
