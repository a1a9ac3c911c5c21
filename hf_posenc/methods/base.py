"""The base classes of methods: the four kinds, and the interface that all other code uses.

A method is one class in one file of this folder, registered with ``@register_method``. An instance is the method at a
factor, with its options, which are the fields of the dataclass. The method in words, for people, is the file
``NAME.toml`` beside it (``hf_posenc.explain.method_words``).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.explained import InPlaceOfRope, ModelShape
from hf_posenc.methods.options import option, tokens
from hf_posenc.settings import check_settings, flag, word
from hf_posenc.spec import RopeSpec, check_number

if TYPE_CHECKING:
    from torch import nn

# Frequencies, float64 ``(num_pairs,)``, in radians per token, fastest pair first, 0 for pairs that are not rotated; and
# the attention factor, which multiplies cos and sin.
Frequencies = tuple[torch.Tensor, float]
# The divisor of a pair whose rotation a method stops: float32 makes it infinite, and so the frequency exactly 0.
STOPPED = 1e200
# The divisor, in a longrope list, of a pair that the model itself never rotates: larger, so that a config tells which.
NEVER_ROTATED = 1e300
# The file beside an extended checkpoint that says what was requested.
MANIFEST = "context_extension.json"
MANIFEST_ONLY = "the manifest only"
# What config.json calls the rule of a model trained with another encoding. Transformers and servers refuse a name that
# they do not know, and print it: the name says what to call. Under a name that they know they would run the model with
# RoPE, with which it was never trained.
_ENCODING_RULE = " takes the place of RoPE: load this checkpoint with hf_posenc.load_extended"
_EARLIER_ENCODING_RULE = "hf_posenc_"  # before the encoding's name, in files that were saved earlier


def encoding_rope_type(method: str) -> str:
    """Return the ``rope_type`` that config.json has for an encoding that takes the place of RoPE."""
    return method + _ENCODING_RULE


def encoding_of(rope_type: Any) -> str | None:
    """Return the encoding that a ``rope_type`` names; None for a rule of RoPE."""
    if not isinstance(rope_type, str):
        return None
    if rope_type.endswith(_ENCODING_RULE):
        return rope_type.removesuffix(_ENCODING_RULE)
    return rope_type.removeprefix(_EARLIER_ENCODING_RULE) if rope_type.startswith(_EARLIER_ENCODING_RULE) else None


def geometric_frequencies(spec: RopeSpec, rope_theta: float) -> torch.Tensor:
    """Return ``rope_theta ** (-2i / rotary_dim)`` for pair i, float64 ``(num_pairs,)``; 0 for unrotated pairs."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float64) / spec.rotary_dim
    inv_freq = torch.exp(-math.log(rope_theta) * exponents)
    inv_freq[spec.rotated_pairs :] = 0.0
    return inv_freq


def plain_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Return the model's own frequencies (Su et al. 2021, arXiv:2104.09864, section 3.2.2)."""
    return geometric_frequencies(spec, spec.rope_theta)


def plain_rope_parameters(spec: RopeSpec) -> dict[str, Any]:
    """Return Transformers' rule without scaling: the default one, or that under which some pairs are not rotated."""
    if not spec.unrotated_pairs:
        return {"rope_type": "default"}
    share = 2 * spec.rotated_pairs / spec.rotary_dim
    if int(share * spec.rotary_dim // 2) < spec.rotated_pairs:  # as Transformers counts them
        share = math.nextafter(share, 1.0)
    return {"rope_type": "proportional", "partial_rotary_factor": share}


class RotatedPart(Enum):
    """The rotated part of an attention, which decides where a temperature can be applied."""

    WHOLE_HEADS = auto()  # cos and sin reach whole logits
    PART_OF_HEADS = auto()  # cos and sin reach a part of each logit
    PART_OF_LATENT_HEADS = auto()  # multi-head latent attention, with a softmax scale that Transformers sets
    HEADS_AND_VALUES = auto()  # cos and sin multiply the output too


@dataclass(frozen=True)
class Method(abc.ABC):
    """One way to extend a model, at a factor. The fields besides ``factor`` are its options.

    Attributes:
        name: What users type and records say.
        aliases: Other names it answers to.
        paper: Where the rule comes from.
        summary: One plain sentence.
        on_disk: How a checkpoint says it, in words.
        rope_type: The ``rope_type`` of Transformers that is read back as this method; None if none is.
        rope_keys: Keys of such ``rope_parameters`` that Transformers reads besides base and original length.
        zero_shot: Whether it is of use without fine-tuning.
        default_factor: Where neither a factor nor a length is given.
        factor: Target length / original length, >= 1.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    on_disk: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    rope_type: ClassVar[str | None] = None
    rope_keys: ClassVar[frozenset[str]] = frozenset()
    zero_shot: ClassVar[bool] = True
    needs_options: ClassVar[bool] = False  # its defaults alone suit no model
    # Of a call in the documentation, on a model whose heads have 128 features.
    example_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    default_factor: ClassVar[float] = 4.0
    is_encoding: ClassVar[bool] = False  # it replaces the model's RoPE by other code; NoPE is none, its RoPE is at rest
    instead_of_rope: ClassVar[bool] = False  # weights trained with it suit no rule for RoPE: encodings, and NoPE
    has_parameters: ClassVar[bool] = False  # it is trained with the model

    factor: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", check_factor(self.factor))
        check_settings(self, named=str)
        self.check_options()

    def check_options(self) -> None:  # noqa: B027  # not abstract: most methods have nothing to check
        """Raise ValueError for options that do not go together; each alone is checked already."""

    @classmethod
    def option_fields(cls) -> dict[str, dataclasses.Field[Any]]:
        """Return the options by name: ``default``, and ``metadata`` with ``help`` and ``check``."""
        return {field.name: field for field in dataclasses.fields(cls) if "check" in field.metadata}

    def changed_options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as JSON-able values."""
        changed = {}
        for name, field in self.option_fields().items():
            if (value := getattr(self, name)) != field.default:
                changed[name] = list(value) if isinstance(value, tuple) else value
        return changed

    @classmethod
    def default_factor_with(cls, options: Mapping[str, Any]) -> float:
        """Return the factor of a request with these options that gives neither a factor nor a length."""
        return cls.default_factor

    @property
    def needs_hf_posenc(self) -> bool:
        """Whether only hf_posenc runs it: no config can express it, so a manifest beside the base's config does."""
        return False

    @property
    def runs_in_attention(self) -> bool:
        """Whether it changes each layer's attention by the position of the query, as no encoding does."""
        return self.needs_hf_posenc and not self.is_encoding

    @property
    def temperature_on_logits(self) -> bool:
        """Whether its attention factor is put on whole logits, by the softmax scale, and not on cos and sin."""
        return False

    @property
    def latent_temperature(self) -> float:
        """The factor of queries and of keys of multi-head latent attention, each, in the softmax scale."""
        return 1.0

    @property
    def ramp_turns(self) -> tuple[float, float] | None:
        """Turns up to which a pair is divided, and from which it is kept, of methods that blend between; else None."""
        return None

    def ramp_pairs(self, spec: RopeSpec) -> tuple[int, int] | None:
        """Return the pair up to which pairs are kept, and that from which they are divided in full.

        None of methods whose ramp is between numbers of rotations (``ramp_turns``), and of those without one.
        """
        return None

    @property
    def ramp_scale(self) -> float:
        """The divisor of a pair at the end of the ramp."""
        return self.factor

    @property
    def declares_target(self) -> bool:
        """Whether ``max_position_embeddings`` becomes the target; Transformers' dynamic wants the original length."""
        return True

    @property
    def caution(self) -> str | None:
        """The warning that a user gets whenever the method is applied; None for no warning."""
        return None

    @abc.abstractmethod
    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        """Return the closed form: ``inv_freq``, float64 ``(num_pairs,)``, and the attention factor.

        It is the reference that live modules are verified against; the values a model runs with are made by
        Transformers itself, in float32.

        Args:
            spec: What the model was trained with.
            seq_len: Tokens of a forward, for the rules of Transformers that depend on it; None for the original length.

        Raises:
            ValueError: An option does not fit the model.
        """

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        """Return the keys of Transformers' ``rope_parameters`` that express the method; here, longrope lists."""
        return self.longrope_parameters(spec)

    def longrope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        """Express the method as ``longrope``: what each plain frequency is divided by, twice the same list.

        Equal lists make the switch at the original length harmless, so the rule is exact with a KV cache.
        """
        plain = plain_frequencies(spec)
        scaled, attention_factor = self.frequencies(spec)
        if attention_factor == 1 and torch.allclose(scaled, plain, rtol=1e-9, atol=0):
            return plain_rope_parameters(spec)
        divisors = torch.where(scaled > 0, plain / scaled, STOPPED)[: spec.rotated_pairs].tolist()
        return longrope_lists(spec, self.factor, divisors, divisors, attention_factor)

    def temperature_for(self, rotated: RotatedPart) -> Self:
        """Return the method with its temperature where an attention of this kind can apply it.

        Args:
            rotated: What the attention rotates. Where it rotates values too, the attention factor becomes 1.

        Raises:
            ValueError: An option requests a temperature that this attention cannot apply.
        """
        if rotated is not RotatedPart.HEADS_AND_VALUES or "attention_factor" not in self.option_fields():
            return self
        if self.requests_temperature():
            raise InvalidRequestError(
                "the model rotates its values with its keys, so a temperature would scale them too: attention_factor "
                f"can only be 1, and {self.name} was requested with another temperature."
            )
        return dataclasses.replace(self, attention_factor=1.0)  # type: ignore[call-arg]  # an option, checked above

    def requests_temperature(self) -> bool:
        """Return whether an option requests an attention factor other than 1; a method's own default does not count."""
        return getattr(self, "attention_factor", None) not in (None, 1)

    @classmethod
    def read_options(cls, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that a config's ``rope_parameters`` of this method's ``rope_type`` give."""
        names = cls.option_fields().keys() & cls.rope_keys
        return {name: parameters[name] for name in sorted(names) if parameters.get(name) is not None}

    @classmethod
    def as_read(cls, factor: float, options: Mapping[str, Any]) -> Self:
        """Return the method with values from a config or a record, which are kept as they are.

        The checks of ``__post_init__`` are for requests. Published files hold values that no request should have and
        that Transformers runs, such as a ``beta_fast`` that equals ``beta_slow``, or a factor below 1.
        """
        method = object.__new__(cls)
        for field in dataclasses.fields(cls):
            value = options.get(field.name, field.default)
            object.__setattr__(method, field.name, tuple(value) if isinstance(value, list) else value)
        object.__setattr__(method, "factor", float(factor))
        return method


def longrope_lists(
    spec: RopeSpec, factor: float, short: list[float], long: list[float], attention_factor: float
) -> dict[str, Any]:
    """Return ``rope_parameters`` of two lists of divisors, one number for each pair that the model rotates."""
    unrotated = [NEVER_ROTATED] * spec.unrotated_pairs
    return {
        "rope_type": "longrope",
        **({"partial_rotary_factor": 1.0} if unrotated else {}),  # the lists say which pairs are rotated
        "factor": factor,
        "short_factor": [*short, *unrotated],
        "long_factor": [*long, *unrotated],
        "original_max_position_embeddings": spec.original_max_position_embeddings,
        # Always written: without it Transformers 4 takes the logarithm of the target, not of the original length.
        "attention_factor": float(attention_factor),
    }


def check_factor(factor: Any) -> float:
    """Return a factor as a float, or say what came and what is allowed."""
    hint = "It is target / original length: 4 makes a 4096-token model read 16384 (llama.cpp's 0.25 is the inverse)."
    return check_number("factor", factor, at_least=1, hint=hint)


@dataclass(frozen=True)
class StaticMethod(Method):
    """New frequencies, the same for every token: config.json says them, and Transformers makes them."""


@dataclass(frozen=True)
class Unscaled(StaticMethod):
    """The model's own frequencies; not one of the methods, but what reports and figures compare them with."""

    name: ClassVar[str] = "none"

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        return plain_frequencies(spec), 1.0


@dataclass(frozen=True)
class AttentionMethod(Method):
    """Runs in hf_posenc's attention; a saved config.json is the base model's, with a note of the extension."""

    on_disk: ClassVar[str] = MANIFEST_ONLY

    log_n: bool = option(False, flag, "multiply queries by max(1, ln(position + 1) / ln(original length))")

    @property
    def needs_hf_posenc(self) -> bool:
        return True

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        return {"rope_type": "default"}

    @abc.abstractmethod
    def plain_until(self, spec: RopeSpec) -> int:
        """Return up to how many tokens a text is read by the unpatched model."""

    def query_factors(self, spec: RopeSpec, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the factors of the queries at these positions, float64, same shape; None if there are none.

        ``log_n``: ``max(1, ln(p + 1) / ln(original))`` (Su 2021, kexue.fm/archives/8823; used by ReRoPE's code).
        """
        if not self.log_n:
            return None
        original = spec.original_max_position_embeddings
        factors = ((positions.double() + 1).log() / math.log(original)).clamp(min=1)
        return None if bool((factors == 1).all()) else factors


@dataclass(frozen=True)
class StagedMethod(AttentionMethod):
    """A static rule for each stage of the query's position; nothing is changed up to the original length."""

    stage: int | None = option(
        None, tokens, "tokens of the first stage past the original length; default: a quarter of that length"
    )
    growth: str = option(
        "linear", word("linear", "geometric"), "linear: stages of one length; geometric: each longer by one ratio"
    )

    @abc.abstractmethod
    def at(self, factor: float) -> StaticMethod:
        """Return the static rule of the stage that ends at ``factor`` times the original length."""

    def plain_until(self, spec: RopeSpec) -> int:
        return spec.original_max_position_embeddings

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        return self.at(self.factor).frequencies(spec)


Positions = Callable[[torch.Tensor], torch.Tensor]
PLAIN = "plain"


@dataclass(frozen=True)
class Region:
    """Keys that a query sees in one way: those at ``begin(query) <= key < end(query)``.

    All functions take int64 positions in a row, counted from its first token, and neither bound ever falls.

    Attributes:
        name: Name of the way keys are rotated; equal names share rotated keys.
        query: The position a query is rotated by.
        key: The position a key is rotated by.
        begin: The first key of a query.
        end: One past the last, not beyond the query itself.
    """

    name: str
    query: Positions
    key: Positions
    begin: Positions
    end: Positions

    @property
    def is_plain(self) -> bool:
        """Whether distances are what they are: queries and keys stay as the model rotated them."""
        return self.name == PLAIN


@dataclass(frozen=True)
class Regions:
    """A partition of the keys before a query.

    Attributes:
        regions: Each key before a query is in exactly one.
        plain_until: Tokens up to which it is plain RoPE.
        chunk: Queries between two multiples of it see the same keys of each region, but for those among themselves;
            None if the regions move with the query.
    """

    regions: tuple[Region, ...]
    plain_until: int
    chunk: int | None = None


@dataclass(frozen=True)
class DistanceMethod(AttentionMethod):
    """Other distances between a query and far keys; the frequencies are the model's own."""

    @abc.abstractmethod
    def regions(self, spec: RopeSpec) -> Regions:
        """Return the keys that a query sees, with their distances.

        Raises:
            ValueError: An option does not fit the model.
        """

    @abc.abstractmethod
    def settings(self, spec: RopeSpec) -> str:
        """Return in one sentence what it does at which distance, with the numbers it takes for this model."""

    def plain_until(self, spec: RopeSpec) -> int:
        return self.regions(spec).plain_until

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        self.regions(spec)  # raises on options that do not fit
        return plain_frequencies(spec), 1.0


def same(positions: torch.Tensor) -> torch.Tensor:
    """Return the positions."""
    return positions


def zero(positions: torch.Tensor) -> torch.Tensor:
    """Return position 0 for each."""
    return torch.zeros_like(positions)


def after(positions: torch.Tensor) -> torch.Tensor:
    """Return the position after each."""
    return positions + 1


def near_and_far(window: int, query: Positions, key: Positions, name: str) -> Regions:
    """Return plain RoPE up to a distance of ``window - 1``, and other positions from there on."""

    def border(positions: torch.Tensor) -> torch.Tensor:
        return (positions - window + 1).clamp(min=0)

    near = Region(PLAIN, same, same, border, after)
    return Regions((near, Region(name, query, key, zero, border)), window)


@dataclass(frozen=True)
class Encoding(InPlaceOfRope, Method):
    """A positional encoding that takes the place of the model's RoPE, whose rotation is stopped."""

    on_disk: ClassVar[str] = "the manifest only (plain Transformers refuses it)"
    zero_shot: ClassVar[bool] = False
    default_factor: ClassVar[float] = 1.0
    is_encoding: ClassVar[bool] = True

    @property
    def needs_hf_posenc(self) -> bool:
        return True

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        return torch.zeros(spec.num_pairs, dtype=torch.float64), 1.0

    @abc.abstractmethod
    def module(self, model: ModelShape) -> nn.Module:
        """Return the encoding as a module with newly initialised parameters (``hf_posenc.methods.encodings.modules``).

        Raises:
            ValueError: The encoding is not defined for these sizes of the model.
        """


@dataclass(frozen=True)
class Extension:
    """A method resolved against a model.

    Attributes:
        spec: What the model was trained with.
        method: The method; its ``factor`` is exactly ``context_length / original``.
        context_length: The target, in tokens.
        original_known: False for a checkpoint whose config does not say what it was trained on.
        sliding_window: What was requested for a window that every layer has: ``"keep"``, ``"off"`` or tokens.
    """

    spec: RopeSpec
    method: Method
    context_length: int
    original_known: bool = True
    sliding_window: str | int = "keep"

    FACTS: ClassVar[tuple[str, ...]] = (
        "method",
        "factor",
        "options",
        "original_max_position_embeddings",
        "context_length",
    )

    def describe(self) -> dict[str, Any]:
        """Return the extension as JSON-able facts, the words of records and manifests."""
        return {
            "method": self.method.name,
            "factor": self.method.factor,
            "options": self.method.changed_options(),
            "original_max_position_embeddings": (
                self.spec.original_max_position_embeddings if self.original_known else None
            ),
            "context_length": self.context_length,
        }

    def mark(self) -> dict[str, Any]:
        """Return the note on the extension in a model's config, for programs that have only the config."""
        return {**self.describe(), "rope_theta": self.spec.rope_theta}
