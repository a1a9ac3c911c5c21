"""What a model was trained with (``RopeSpec``) and what is asked of it (``RopeScaling``): frozen, checked when made."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_METHOD = "yarn"
RAMPS = ("code", "paper", "harmonic")
TEMPERATURES = ("rotary", "logits")
SCOPES = ("query", "sequence")
COMPUTATIONS = ("real", "complex")
# Encodings of another kind than the model's RoPE, which they take the place of.
ENCODINGS = frozenset({"sinusoidal", "learned", "relative_bias", "t5_bias", "alibi", "rope", "xpos"})
TRAINED_ENCODINGS = frozenset({"learned", "relative_bias", "t5_bias"})  # which have parameters
# What weights were trained with instead of their RoPE: they suit no rule for it.
INSTEAD_OF_ROPE = ENCODINGS | {"nope"}
ATTENTION_METHODS = ENCODINGS | {"dynamic_yarn", "self_extend", "dca", "rerope", "leaky_rerope"}
GROWTHS = ("linear", "geometric")
_WORDS = {"ramp": RAMPS, "temperature": TEMPERATURES, "scope": SCOPES, "growth": GROWTHS, "computation": COMPUTATIONS}


def check_number(name: str, value: Any, *, at_least: float | None = None, above: float | None = None) -> float:
    """Return ``value`` as a finite float, or say what came and what is allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}).")
    if not _is_finite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    if at_least is not None and not value >= at_least:
        raise ValueError(f"{name} must be >= {at_least:g}, got {value:g}.")
    if above is not None and not value > above:
        raise ValueError(f"{name} must be greater than {above:g}, got {value:g}.")
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def check_length(name: str, value: Any) -> int:
    """Return a length in tokens as a plain int >= 1; floats that are not whole are refused."""
    number = check_number(name, value, at_least=1)
    if number != int(number):
        raise ValueError(f"{name} must be a whole number of tokens, got {value!r}.")
    return int(number)


@dataclass(frozen=True)
class RopeSpec:
    """The rotary embedding a model was trained with.

    Attributes:
        rotary_dim: Features of a head that rotate; where odd, Transformers turns one more to make pairs.
        rope_theta: Base of the geometric series of frequencies.
        original_max_position_embeddings: Tokens the model was trained on.
        still_pairs: The last, slowest pairs, that never turn (Transformers' ``proportional``).
    """

    rotary_dim: int
    rope_theta: float
    original_max_position_embeddings: int
    still_pairs: int = 0

    def __post_init__(self) -> None:
        check_length("rotary_dim", self.rotary_dim)
        if not 0 <= self.still_pairs < self.num_pairs:
            raise ValueError(f"of {self.num_pairs} pairs {self.still_pairs} are said never to turn: at least one must.")
        check_number("rope_theta", self.rope_theta, above=1)
        check_length("original_max_position_embeddings", self.original_max_position_embeddings)

    @property
    def num_pairs(self) -> int:
        """Pairs of features that cos and sin are made for."""
        return (self.rotary_dim + 1) // 2

    @property
    def turning_pairs(self) -> int:
        """Those that turn."""
        return self.num_pairs - self.still_pairs


@dataclass(frozen=True)
class RopeScaling:
    """What is asked for: a method, how many times longer, and the method's own options.

    Which options a method takes is in ``registry.METHODS``; here only their values are checked.

    Attributes:
        method: Canonical name, such as ``"yarn"``.
        factor: Target length / original length, >= 1.
        attention_factor: Multiplies cos and sin, so logits grow by its square; None for the method's own.
        beta_fast: Turns over the original context from which a pair keeps its frequency.
        beta_slow: Turns up to which a pair's frequency is divided by ``factor``.
        truncate: Round the ends of YaRN's ramp outward, as its code does.
        ramp: YaRN's blend: ``"code"`` (linear in the pair's index), ``"paper"`` (linear in turns) or
            ``"harmonic"`` (PoSE: index ramp, wavelengths blended).
        temperature: What ``attention_factor`` reaches where only part of a head turns: ``"rotary"``, that part, as
            published and as Transformers has it, or ``"logits"``, all of the logit.
        mscale, mscale_all_dim: DeepSeek's pair; both given, they replace YaRN's temperature.
        low_freq_factor, high_freq_factor: Llama 3's turns, as ``beta_slow`` and ``beta_fast``.
        short_factor, long_factor: LongRoPE's divisors per pair, each one number per pair that turns.
        rope_theta: The new base, for ``abf``; for ``rope`` and ``xpos`` None for the model's own.
        scope: For ``dynamic``: ``"query"``, a scale for each query by where it stands, or ``"sequence"``,
            Transformers' rule, one scale for the whole forward.
        stage: Tokens of the first stage past the original length; None for the default share of it.
        growth: ``"linear"``, stages of one length, or ``"geometric"``, each longer than the one before by one ratio.
        group: For ``self_extend``: far tokens that share a position; None for what the target needs.
        window: For ``self_extend`` and ``rerope``: distance in tokens from which keys are far.
        leak: For ``leaky_rerope``: tokens beyond the window that count as one.
        chunk_size, local_window: For ``dca``, in tokens; None for 3/4 and 1/8 of the original length.
        sharpen: For ``dca``: its code's temperature.
        embedding_scale: For ``sinusoidal``: what multiplies its table; None for the ``initializer_range`` of the model.
        max_distance: For ``t5_bias`` and ``relative_bias``: tokens from which on all distances are one.
        num_buckets: For ``t5_bias``: classes of distances.
        bidirectional: For ``t5_bias``: half of the buckets are for keys after the query, as in T5's encoder.
        interleaved: For ``rope`` and ``xpos``: pairs are neighbouring features, not halves apart.
        computation: For ``rope`` and ``xpos``: ``"real"`` or ``"complex"`` numbers.
        partial_rotary_factor: For ``rope`` and ``xpos``: the share of a head that turns; None for the model's own.
        scale_base: For ``xpos``: tokens in which a pair's logits shrink by its decay.
        log_n: Multiply queries by ``max(1, ln(position + 1) / ln(original))``; only on the attention door.
    """

    method: str
    factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    ramp: str = "code"
    temperature: str = "rotary"
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    rope_theta: float | None = None
    scope: str = "query"
    stage: int | None = None
    growth: str = "linear"
    group: int | None = None
    window: int | None = None
    leak: float = 16.0
    chunk_size: int | None = None
    local_window: int | None = None
    sharpen: bool = False
    embedding_scale: float | None = None
    max_distance: int = 128
    num_buckets: int = 32
    bidirectional: bool = False
    interleaved: bool = False
    computation: str = "real"
    partial_rotary_factor: float | None = None
    scale_base: float = 512.0
    log_n: bool = False

    def __post_init__(self) -> None:
        self._set("factor", _check_factor(self.factor))
        for name in (
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "rope_theta",
            "embedding_scale",
            "partial_rotary_factor",
        ):
            if getattr(self, name) is not None:
                self._set(name, check_number(name, getattr(self, name), above=0))
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            self._set(low, check_number(low, getattr(self, low), above=0))
            self._set(high, check_number(high, getattr(self, high), above=0))
            if not getattr(self, high) > getattr(self, low):
                raise ValueError(
                    f"{high} must be greater than {low}, got {getattr(self, high):g} and {getattr(self, low):g}."
                )
        for name in ("truncate", "sharpen", "log_n", "bidirectional", "interleaved"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        for name, allowed in _WORDS.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if self.partial_rotary_factor is not None and self.partial_rotary_factor > 1:
            raise ValueError(f"partial_rotary_factor must be at most 1, got {self.partial_rotary_factor:g}.")
        for name in ("stage", "group", "window", "chunk_size", "local_window", "max_distance", "num_buckets"):
            if getattr(self, name) is not None:
                self._set(name, check_length(name, getattr(self, name)))
        self._set("leak", check_number("leak", self.leak, at_least=1))
        self._set("scale_base", check_number("scale_base", self.scale_base, above=0))
        if self.method == "t5_bias":
            self._check_buckets()
        for name in ("short_factor", "long_factor"):
            self._set(name, _check_factor_list(name, getattr(self, name)))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_buckets(self) -> None:
        exact = self.num_buckets // (4 if self.bidirectional else 2)
        if exact < 1 or self.max_distance <= exact:
            raise ValueError(
                f"max_distance must be greater than the {exact} distances that have a bucket each (num_buckets is "
                f"{self.num_buckets}, at least {4 if self.bidirectional else 2}), got {self.max_distance}."
            )

    def has_default_temperature(self) -> bool:
        """Return whether neither ``attention_factor`` nor DeepSeek's pair was given."""
        return self.attention_factor is None and self.mscale is None and self.mscale_all_dim is None

    @property
    def is_encoding(self) -> bool:
        """Whether it takes the place of the model's RoPE, rather than change it."""
        return self.method in ENCODINGS

    @property
    def on_attention_door(self) -> bool:
        """Whether the rule depends on where each query stands, which only the attention can do and no config say."""
        return self.method in ATTENTION_METHODS or (self.method == "dynamic" and self.scope == "query")

    @property
    def changes_rope_in_attention(self) -> bool:
        """Whether it is on the attention door and no encoding, so that what it does depends on the tokens read."""
        return self.on_attention_door and not self.is_encoding

    def changed_options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as JSON-able values."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("method", "factor")}
        defaults = RopeScaling(self.method)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if value != getattr(defaults, name)
        }


def _check_factor(factor: Any) -> float:
    hint = "It is target / original length: 4 makes a 4096-token model read 16384 (llama.cpp's 0.25 is the inverse)."
    try:
        return check_number("factor", factor, at_least=1)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} {hint}") from None


def _check_factor_list(name: str, values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list of numbers, one per pair of features, got {values!r}.")
    return tuple(check_number(f"{name}[{i}]", value, above=0) for i, value in enumerate(values))


def unknown_name(kind: str, name: Any, known: Iterable[str], spelled: Any = None) -> ValueError:
    """Return the error for a name that a table does not hold, with the nearest one that it does.

    Args:
        kind: What the table holds: "method", "preset", "recipe".
        name: As it was given.
        known: All names, in the order to show them in.
        spelled: How the table would write ``name``; None if it writes names as they are given.
    """
    known = list(known)
    hint = did_you_mean(name if spelled is None else spelled, known)
    return ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")


def did_you_mean(name: Any, known: Iterable[str], *, most: int = 1, shown: Callable[[str], str] = repr) -> str:
    """Return `` Did you mean 'yarn'?`` for a name that nothing known has, beginning with a space; "" if none is near.

    Args:
        name: As it was given.
        known: What it can be.
        most: Names suggested at most.
        shown: How a name is written in the message.
    """
    near = difflib.get_close_matches(str(name), list(known), n=most)
    return f" Did you mean {' or '.join(map(shown, near))}?" if near else ""
