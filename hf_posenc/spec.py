"""The rotary settings that a model was trained with (``RopeSpec``), and checks of single values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import InvalidRequestError, InvalidTypeError


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    hint: str = "",
) -> float:
    """Return ``value`` as a finite float, or say what came, what is allowed and, if there is one, the hint."""
    more = f" {hint}" if hint else ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidTypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}).{more}")
    if not _is_finite(value):
        raise InvalidRequestError(f"{name} must be a finite number, got {value!r}.{more}")
    if at_least is not None and not value >= at_least:
        raise InvalidRequestError(f"{name} must be >= {at_least:g}, got {value:g}.{more}")
    if above is not None and not value > above:
        raise InvalidRequestError(f"{name} must be greater than {above:g}, got {value:g}.{more}")
    if below is not None and not value < below:
        raise InvalidRequestError(f"{name} must be below {below:g}, got {value:g}.{more}")
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
        raise InvalidRequestError(f"{name} must be a whole number of tokens, got {value!r}.")
    return int(number)


@dataclass(frozen=True)
class RopeSpec:
    """The rotary embedding a model was trained with.

    Attributes:
        rotary_dim: Features of a head that rotate; where odd, Transformers rotates one more to make pairs.
        rope_theta: Base of the geometric series of frequencies.
        original_max_position_embeddings: Tokens the model was trained on.
        unrotated_pairs: The last, slowest pairs, that are never rotated (Transformers' ``proportional``).
    """

    rotary_dim: int
    rope_theta: float
    original_max_position_embeddings: int
    unrotated_pairs: int = 0

    def __post_init__(self) -> None:
        check_length("rotary_dim", self.rotary_dim)
        if not 0 <= self.unrotated_pairs < self.num_pairs:
            raise InvalidRequestError(
                f"of {self.num_pairs} pairs {self.unrotated_pairs} are said never to be rotated: at least one must."
            )
        check_number("rope_theta", self.rope_theta, above=1)
        length = check_length("original_max_position_embeddings", self.original_max_position_embeddings)
        object.__setattr__(self, "original_max_position_embeddings", length)  # 2048.0 is 2048

    @property
    def num_pairs(self) -> int:
        """Pairs of features that cos and sin are made for."""
        return (self.rotary_dim + 1) // 2

    @property
    def rotated_pairs(self) -> int:
        """The rotated pairs."""
        return self.num_pairs - self.unrotated_pairs
