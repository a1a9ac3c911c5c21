"""The kinds of values that options of methods take besides those of ``hf_posenc.settings``, each with its check."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hf_posenc.errors import InvalidRequestError, InvalidTypeError
from hf_posenc.settings import Check, number
from hf_posenc.spec import check_length, check_number

positive = number(above=0)
tokens = check_length  # a whole number of tokens, or of anything else, of at least 1


def option(default: Any, check: Check, help: str, *, in_names: bool = True) -> Any:
    """Return the dataclass field of an option.

    Args:
        default: Its default; where that is None, None is allowed.
        check: Takes name and value, returns the value as it is kept, or raises TypeError or ValueError.
        help: What it does, with units; ``hf-posenc list methods`` and ``--option`` show it.
        in_names: Whether the names of rows in tables and plots say it, where it is not the default.
    """
    return dataclasses.field(default=default, metadata={"check": check, "help": help, "in_names": in_names})


def pair(name: str, value: Any) -> int:
    """The index of a pair of features after the fastest one, which is pair 0."""
    hint = "It is the index of a pair of features; pair 0, the fastest, is always kept."
    checked = check_number(name, value, at_least=1, hint=hint)
    if checked != int(checked):
        raise InvalidRequestError(f"{name} must be a whole number, the index of a pair of features, got {value!r}.")
    return int(checked)


def divisors(name: str, values: Any) -> tuple[float, ...]:
    """A list of numbers above 0, one for each pair of features."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidTypeError(f"{name} must be a list of numbers, one per pair of features, got {values!r}.")
    return tuple(check_number(f"{name}[{i}]", value, above=0) for i, value in enumerate(values))


def check_order(low: str, low_value: float, high: str, high_value: float) -> None:
    """Raise unless one option is greater than another."""
    if not high_value > low_value:
        raise InvalidRequestError(f"{high} must be greater than {low}, got {high_value:g} and {low_value:g}.")
