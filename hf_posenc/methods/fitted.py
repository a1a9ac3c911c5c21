"""A rule that ``hf-posenc fit`` found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, MissingFileError, argument
from hf_posenc.methods.base import MANIFEST, Frequencies
from hf_posenc.methods.longrope import LongRope
from hf_posenc.methods.options import divisors, option, positive, tokens
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.files import read_json

# The options that a rule consists of.
RULE = (
    "long_factor",
    "short_factor",
    "attention_factor",
    "fitted_rope_theta",
    "fitted_original_length",
    "fitted_length",
)


def read_fitted_rule(source: str | Path) -> dict[str, Any]:
    """Return a fitted rule as options of the method ``fitted``.

    Args:
        source: A folder that ``hf-posenc fit`` wrote, or a JSON file: the manifest in it, or what ``FitResult.save``
            wrote.

    Raises:
        OSError: There is no such file.
        ValueError: It holds no fitted rule.
    """
    path = Path(source).expanduser()
    file = path / MANIFEST if path.is_dir() else path
    if not file.is_file():
        raise MissingFileError(
            f"there is no fitted rule in {str(source)!r}. Give a folder that `hf-posenc fit` wrote, the {MANIFEST} in "
            "it, or a file that FitResult.save wrote."
        )
    rule = read_json(file)
    if rule.get("method") != "fitted" or not isinstance(rule.get("options"), dict):
        raise InvalidRequestError(f"{str(file)!r} is no fitted rule: it holds method {rule.get('method')!r}.")
    if lacking := [name for name in RULE if name not in rule["options"]]:
        raise InvalidRequestError(f"{str(file)!r} is no fitted rule: it has no {', '.join(lacking)}.")
    return {name: rule["options"][name] for name in RULE}


def _source(name: str, value: Any) -> str:
    if not isinstance(value, (str, Path)):
        raise InvalidTypeError(f"{name} must be a folder that `hf-posenc fit` wrote, or a file in it, got {value!r}.")
    return str(value)


@register_method
@dataclass(frozen=True)
class Fitted(LongRope):
    """Divide each frequency by a number that was fitted to the model, with all its weights frozen."""

    name: ClassVar[str] = "fitted"
    paper: ClassVar[str] = "`hf-posenc fit`; lists of divisors are those of Ding et al. 2024, arXiv:2402.13753"
    summary: ClassVar[str] = "A divisor per pair and a temperature, fitted to one model by `hf-posenc fit`."
    example_options: ClassVar[Mapping[str, Any]] = {"long_factor": [1.0] * 32 + [4.0] * 32, "attention_factor": 1.05}
    rope_type: ClassVar[str | None] = None

    short_factor: tuple[float, ...] | None = option(
        None, divisors, "divisors up to the original length, one for each rotated pair; default: all 1", in_names=False
    )
    long_factor: tuple[float, ...] | None = option(
        None, divisors, "divisors past the original length, one for each rotated pair", in_names=False
    )
    attention_factor: float | None = option(None, positive, "multiplies cos and sin", in_names=False)
    source: str | None = option(
        None, _source, "a folder that `hf-posenc fit` wrote, or a JSON file of a rule; it gives all other options"
    )
    fitted_rope_theta: float | None = option(
        None, positive, "base of the RoPE of the model it was fitted to", in_names=False
    )
    fitted_original_length: int | None = option(
        None, tokens, "original length of that model, in tokens", in_names=False
    )
    fitted_length: int | None = option(None, tokens, "target length it was fitted for, in tokens", in_names=False)

    def __post_init__(self) -> None:
        if self.source is not None:
            for name, value in read_fitted_rule(_source("source", self.source)).items():
                if getattr(self, name) is not None and getattr(self, name) != value:
                    raise InvalidRequestError(f"give source or {name}, not both: {self.source!r} has one of its own.")
                object.__setattr__(self, name, value)
            object.__setattr__(self, "source", None)  # the rule itself is kept, not where it was
        super().__post_init__()

    @classmethod
    def default_factor_with(cls, options: Mapping[str, Any]) -> float:
        rule = cls(1.0, **options)
        if rule.fitted_length is None or rule.fitted_original_length is None:
            return cls.default_factor
        return rule.fitted_length / rule.fitted_original_length

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        if self.long_factor is None:
            raise InvalidRequestError(
                "method 'fitted' needs source, a folder that `hf-posenc fit` wrote for this model, or its lists."
            )
        fitted_to = {"rope_theta": self.fitted_rope_theta, "original length": self.fitted_original_length}
        own = {"rope_theta": spec.rope_theta, "original length": spec.original_max_position_embeddings}
        for name, value in fitted_to.items():
            if value is not None and value != own[name]:
                advice = ""
                if name == "original length":
                    advice = f", or pass {argument('original_max_position_embeddings', value)} if that is its own"
                raise InvalidRequestError(
                    f"this rule was fitted to a model with {name} {value:g}, and this one has {own[name]:g}: fit a "
                    f"rule to this model with `hf-posenc fit`{advice}."
                )
        target = self.factor * spec.original_max_position_embeddings
        if self.fitted_length is not None and target > self.fitted_length + 0.5:
            raise InvalidRequestError(
                f"this rule was fitted for {self.fitted_length} tokens, and {target:.0f} were requested: ask for at "
                "most as many, or fit one for more with `hf-posenc fit`."
            )
        return super().frequencies(spec, seq_len)
