"""The extension's target: the one place where these settings, their defaults and help texts are declared."""

from __future__ import annotations

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
    """The request for an extension: the arguments of ``patch_model`` as one object.

    It is complete and checked, as far as that goes without a model, when it is made: what ``preset`` or
    ``rope_scaling`` says is in ``method``, ``factor``, ``original_max_position_embeddings`` and ``options``.

    Attributes:
        method: The name of a method; None for the default.
        options: The method's own.
        model_values: What ``rope_scaling`` repeats of the model, such as its ``rope_theta``.

    Raises:
        TypeError: A method does not take an option, or a value is of the wrong type.
        ValueError: A method or preset is unknown, a value is out of range, or two that exclude each other are given.
    """

    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    model_values: Mapping[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        from hf_posenc.families.sliding_window import check_window
        from hf_posenc.methods.registry import DEFAULT_METHOD, get_method, make_method
        from hf_posenc.spec import check_length

        if not isinstance(self.options, Mapping):
            raise InvalidTypeError(f'options must be a dict such as {{"beta_fast": 16}}, got {self.options!r}.')
        if self.factor is not None and self.context_length is not None:
            raise InvalidRequestError(
                f"give {argument('factor')} or {argument('context_length')}, not both (got {self.factor} and "
                f"{self.context_length}): factor is context_length / original length."
            )
        for name in ("context_length", "original_max_position_embeddings"):
            if getattr(self, name) is not None:
                setattr(self, name, ContextLength(check_length(argument(name), getattr(self, name))))
        if self.on_scaled not in ("refuse", "replace"):
            raise InvalidRequestError(f"{argument('on_scaled')} must be 'refuse' or 'replace', got {self.on_scaled!r}.")
        self.sliding_window = check_window(self.sliding_window)  # type: ignore[assignment]  # a number of tokens too
        if self.rope_scaling is not None:
            self._expand_rope_scaling(self.rope_scaling)
        if self.preset is not None:
            self._expand_preset(self.preset)
        if self.method is not None:
            self.method = get_method(self.method).name
        options = {} if self.method is None else self.options  # without a name they are those of the model's method
        make_method(self.method or DEFAULT_METHOD, 1.0 if self.factor is None else self.factor, options)

    def _expand_rope_scaling(self, given: Mapping[str, Any] | str) -> None:
        from hf_posenc.patching.rope_scaling import EXAMPLE, read_rope_scaling

        dictionary = read_rope_scaling(given)
        decided = ("method", "factor", "original_max_position_embeddings", "preset", "options")
        dictionary.refuse_other(**{name: getattr(self, name) for name in decided})
        if dictionary.factor is None and self.context_length is None:  # no default is taken
            raise InvalidRequestError(
                f"{argument('rope_scaling')} of type {dictionary.method!r} has no factor, so it does not say how far. "
                f'Add "factor", as in {EXAMPLE}, or give {argument("context_length")}.'
            )
        if dictionary.factor is not None and self.context_length is not None:
            raise InvalidRequestError(
                f"{argument('rope_scaling')} has factor {dictionary.factor:g}, and {argument('context_length')} "
                f"{self.context_length} was given too: give one of the two."
            )
        self._take(dictionary)
        self.model_values = dictionary.model_values

    def _expand_preset(self, name: str) -> None:
        from hf_posenc.patching.presets import get_preset

        decided = ("method", "factor", "context_length", "original_max_position_embeddings", "options")
        preset = get_preset(name)
        preset.refuse_besides(**{each: getattr(self, each) for each in decided})
        self._take(preset)

    def _take(self, source: Any) -> None:
        """Take what a preset or a dictionary decides."""
        for name in ("method", "factor", "original_max_position_embeddings", "options"):
            setattr(self, name, getattr(source, name))

    @classmethod
    def of(cls, **arguments: Any) -> Self:
        """Return the request of ``patch_model``'s arguments: what is no setting is an option of the method."""
        settings = {each.name for each in fields(cls) if each.init} - {"options"}
        options = {name: value for name, value in arguments.items() if name not in settings}
        return cls(**{name: arguments[name] for name in arguments.keys() & settings}, options=options)


def rows_to_measure(
    methods: Sequence[str], extension: ExtensionConfig, rules: dict[str, Any]
) -> list[dict[str, Any] | None]:
    """Return the keywords of ``patch_model`` for each row of numbers; None leaves the model as it is.

    Args:
        methods: Names; "none" is the model as it is, which no names and no preset mean too.
        extension: How far, or by which preset or ``rope_scaling``.
        rules: The options of the method.

    Raises:
        TypeError, ValueError: A request is wrong (``ExtensionRequest``), or there is nothing that it is for.
    """
    says_method = extension.preset is not None or extension.rope_scaling is not None
    named = [method for method in methods if method != NO_METHOD]
    if not named and not says_method and (rules or extension != ExtensionConfig()):
        raise InvalidRequestError(
            "--factor, --context-length, --option and what else says how to extend need a --method, such as yarn, or a "
            "--preset."
        )
    to_check: list[str | None] = [*named] or ([None] if says_method else [])
    for method in to_check:
        try:
            ExtensionRequest(**vars(extension), method=method, options=rules)
        except UnknownOptionError as error:
            if len(named) == 1 or not rules:
                raise
            raise InvalidTypeError(
                f"{error} --option is for every --method of a command: measure {method!r} in one of its own, with the "
                "same --output."
            ) from None
    shared = {**vars(extension), **rules}
    rows = [None if method == NO_METHOD else {"method": method, **shared} for method in methods]
    if says_method and not named:
        rows.append({"method": None, **shared})
    return rows or [None]
