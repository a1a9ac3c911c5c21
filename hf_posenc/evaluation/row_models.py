"""A loaded model, extended for one row of numbers after the other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from transformers import PreTrainedModel

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.registry import method_names
from hf_posenc.patching.api import describe, is_patched, patched, unpatched


def refuse_extended(model: PreTrainedModel, name: str, on_scaled: str) -> None:
    """Raise if loading a folder brought a rule, as its manifest says, that another cannot or is not to replace.

    Raises:
        ValueError: With what to do.
    """
    there = describe(model)
    if there["method"] in method_names("instead_of_rope"):
        raise InvalidRequestError(
            f"{name!r} holds {there['method']} in the place of its RoPE, and its weights suit no other rule. Take it "
            "as it is: eval and lm-eval without --method."
        )
    if is_patched(model) and on_scaled != "replace":
        raise InvalidRequestError(
            f"{name!r} is extended already ({there['method']}, factor {there['factor']:g}), and factors do not "
            "multiply. Give the base model, or pass --on-scaled replace (eval without --method takes it as it is)."
        )


@contextmanager
def as_asked(model: PreTrainedModel, row: dict[str, Any] | None) -> Iterator[None]:
    """While open, a model is extended as a row asks, in place of what loading brought; None leaves it as it is."""
    if row is None:
        yield
        return
    with unpatched(model) if is_patched(model) else nullcontext(), patched(model, **row):
        yield


def try_rows(model: PreTrainedModel, rows: Sequence[dict[str, Any] | None]) -> None:
    """Patch for each row and undo it, so that what a model refuses is found before anything is measured."""
    for row in rows:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when it is patched to be measured
            with as_asked(model, row):
                pass
