"""The kinds of training data that ``task_mix`` names: those of this folder, one file for each, and registered ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, argument
from hf_posenc.mixtures.base import Kind
from hf_posenc.utils.registries import Registry

_REGISTRY: Registry[type[Kind]] = Registry("kind of training data", __name__)
_EXAMPLE = ["kv=0.3", "needles=0.2", "text=0.5"]
kinds = _REGISTRY.all
get_kind = _REGISTRY.get


def register_kind(cls: type[Kind]) -> type[Kind]:
    """Make a class known as a kind of training data; a decorator.

    Raises:
        ValueError: The name is taken.
    """
    _REGISTRY.add(cls, [cls.name], cls)
    return cls


def read_shares(given: Any) -> dict[str, float]:
    """Return the share of each kind in the tokens of a run.

    Args:
        given: ``["kv=0.3", "text=0.7"]``, the same in one word with commas, or a dict of shares by name.

    Raises:
        TypeError: It is something else.
        ValueError: A name is unknown or given twice, a share is no number above 0, or they do not sum to 1. As with the
            probabilities of ``datasets.interleave_datasets`` they are not divided by their sum: a sum of 0.9 is
            more often a share that was forgotten.
    """
    if isinstance(given, Mapping):
        pairs = [(name, share) for name, share in given.items()]
    else:
        words = [given] if isinstance(given, str) else given
        if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
            raise InvalidTypeError(
                f"{argument('task_mix')} must be a list of KIND=SHARE, such as {_EXAMPLE}, got {given!r}."
            )
        pairs = [_pair(part.strip()) for word in words for part in word.split(",") if part.strip()]
    shares: dict[str, float] = {}
    for name, share in pairs:
        get_kind(name)
        if name in shares:
            raise InvalidRequestError(f"{argument('task_mix')}: {name!r} is given twice.")
        shares[name] = _number(name, share)
    total = math.fsum(shares.values())
    if not shares:
        raise InvalidRequestError(f"{argument('task_mix')} is empty: give KIND=SHARE, such as {' '.join(_EXAMPLE)}.")
    if not math.isclose(total, 1, abs_tol=1e-6):
        scaled = [f"{name}={share / total:.4g}" for name, share in shares.items()]
        raise InvalidRequestError(
            f"the shares of {argument('task_mix')} must sum to 1, these sum to {total:.9g}. Divided by their sum they "
            f"are {' '.join(scaled)}."
        )
    return shares


def words_of(shares: Mapping[str, float]) -> list[str]:
    """Return shares as ``["kv=0.3", "text=0.7"]``."""
    return [f"{name}={share}" for name, share in shares.items()]


def kinds_of_steps(shares: Mapping[str, float], num_steps: int) -> list[str]:
    """Return the kind of each step: always the one that is farthest behind its share."""
    chosen: list[str] = []
    counts = dict.fromkeys(shares, 0)
    for step in range(1, num_steps + 1):
        chosen.append(max(shares, key=lambda name: shares[name] * step - counts[name]))
        counts[chosen[-1]] += 1
    return chosen


def _pair(word: str) -> tuple[str, str]:
    name, equals, share = word.partition("=")
    if not equals:
        raise InvalidRequestError(f"{argument('task_mix')} takes KIND=SHARE, such as kv=0.3, got {word!r}.")
    return name.strip(), share


def _number(name: str, share: Any) -> float:
    try:
        number = math.nan if isinstance(share, bool) else float(share)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidRequestError(
            f"{argument('task_mix')}: the share of {name!r} must be a number above 0, got {share!r}. To leave a kind "
            "out, do not name it."
        )
    return number
