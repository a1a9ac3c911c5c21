"""How far a model is extended: the one place where these settings, their defaults and help texts are declared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, UnknownOptionError, argument
from hf_posenc.utils.units import ContextLength

NO_METHOD = "none"  # the model as it is


@dataclass
class ExtensionConfig:
    """How the model is extended.

    The names are those of ``patch_model``. The help text of a field is its documentation.
    """

    HELP_COMMON: ClassVar[tuple[str, ...]] = ("preset", "factor", "context_length")

    preset: str | None = field(
        default=None,
        metadata={
            "help": "a published setting from `hf-posenc list presets`, instead of --method, --factor and --option"
        },
    )
    rope_scaling: str | None = field(
        default=None,
        metadata={
            "help": "a rope_scaling dictionary of Transformers, vLLM or LLaMA-Factory, such as "
            """'{"rope_type": "yarn", "factor": 4.0}'; it replaces --method, --factor and --option"""
        },
    )
    factor: float | None = field(
        default=None,
        metadata={"help": "target length divided by original length; default: 4, unless a length is given"},
    )
    context_length: ContextLength | None = field(
        default=None, metadata={"help": "target length in tokens (32k = 32768); it replaces --factor"}
    )
    original_max_position_embeddings: ContextLength | None = field(
        default=None, metadata={"help": "tokens the model was trained on; default: the value in its config"}
    )
    # A number of tokens is taken too, and kept as its digits.
    sliding_window: str = field(
        default="keep",
        metadata={
            "help": "sliding window of a model that has one in every layer: keep, off or a number of tokens (16k)"
        },
    )
    on_scaled: Literal["refuse", "replace"] = field(
        default="refuse",
        metadata={"help": "a checkpoint that is extended already: refuse it, or replace its rule by the method"},
    )


@dataclass
class ExtensionRequest(ExtensionConfig):
    """What a model is to be extended by, and how far: the arguments of ``patch_model`` as one object.

    Attributes:
        method: A name or alias; None for the default, or what ``preset`` or ``rope_scaling`` says.
        options: The method's own.
    """

    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **arguments: Any) -> Self:
        """Return the request of ``patch_model``'s arguments: what is no setting is an option of the method."""
        settings = {each.name for each in fields(cls)} - {"options"}
        options = {name: value for name, value in arguments.items() if name not in settings}
        return cls(**{name: arguments[name] for name in arguments.keys() & settings}, options=options)


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
    named = [method for method in methods if method != NO_METHOD]
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


def resolve_rope_scaling(
    methods: Sequence[str], extension: ExtensionConfig, rules: dict[str, Any]
) -> tuple[list[str], ExtensionConfig, dict[str, Any]]:
    """Return a request whose ``rope_scaling``, if it has one, is given by method, factor, length and options too.

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

    dictionary = read_rope_scaling(extension.rope_scaling)
    named: list[str | None] = [method for method in methods if method != NO_METHOD]
    decided = ("factor", "original_max_position_embeddings", "preset")
    for method in named or [None]:
        dictionary.refuse_other(method=method, **{name: getattr(extension, name) for name in decided}, options=rules)
    dictionary.check_length_is_said(extension.context_length)
    known = dictionary.original_max_position_embeddings
    original = None if known is None else ContextLength(known)
    # The dictionary is kept, for what it repeats of the model.
    extension = dataclasses.replace(extension, factor=dictionary.factor, original_max_position_embeddings=original)
    return [*methods, *([] if named else [dictionary.method])], extension, dictionary.options


def rows_to_measure(
    methods: Sequence[str], extension: ExtensionConfig, rules: dict[str, Any]
) -> list[dict[str, Any] | None]:
    """Return the keywords of ``patch_model`` for each row of numbers; None leaves the model as it is.

    Args:
        methods: Names; "none" is the model as it is, which no names and no preset mean too.
        extension: How far, or by which preset.
        rules: The options of the method.

    Raises:
        TypeError, ValueError: As for ``check_request``, or there is nothing that the request is for.
    """
    methods, extension, rules = resolve_rope_scaling(methods, extension, rules)
    check_request(methods, extension, rules)
    shared = {**vars(extension), **rules}
    rows = [None if method == NO_METHOD else {"method": method, **shared} for method in methods]
    if extension.preset is not None:
        return [*rows, shared]
    if not any(rows) and (rules or extension != ExtensionConfig()):
        raise InvalidRequestError(
            "--factor, --context-length, --option and what else says how to extend need a --method, such as yarn, or a "
            "--preset."
        )
    return rows or [None]
