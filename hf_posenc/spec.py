"""What a model was trained with (``RopeSpec``), and checks of single values."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


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
            raise ValueError(
                f"of {self.num_pairs} pairs {self.unrotated_pairs} are said never to be rotated: at least one must."
            )
        check_number("rope_theta", self.rope_theta, above=1)
        check_length("original_max_position_embeddings", self.original_max_position_embeddings)

    @property
    def num_pairs(self) -> int:
        """Pairs of features that cos and sin are made for."""
        return (self.rotary_dim + 1) // 2

    @property
    def rotated_pairs(self) -> int:
        """Those that are rotated."""
        return self.num_pairs - self.unrotated_pairs


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
