"""A row of numbers: one model, extended and trained in one way. Which records are of it, and how to measure it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.records import AnyRecord
from hf_posenc.methods.registry import method_names, named_options
from hf_posenc.patching.api import describe, is_patched, patched, unpatched

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def row_key(record: AnyRecord) -> tuple[object, ...]:
    """Return the key that all records of one row share, and no others."""
    options = json.dumps(record.options, sort_keys=True)
    who = (record.model, record.dtype, record.attn_implementation, record.label)
    return (*who, record.method, record.factor, options, record.tokens_trained)


def short_model_names(models: Iterable[str]) -> dict[str, str]:
    """Return names of models as short as tells them apart: the last part of each name or path, more where two share it.

    Args:
        models: As records have them; of repeats the first counts.

    Returns:
        The short name of each, in order.
    """
    parts = {model: PurePath(model).parts or (model,) for model in models}
    names = {}
    for model, own in parts.items():
        others = [other for name, other in parts.items() if name != model]
        enough = (count for count in range(1, len(own)) if all(other[-count:] != own[-count:] for other in others))
        names[model] = str(PurePath(*own[-next(enough, len(own)) :]))
    return names


def rule_name(record: AnyRecord) -> str:
    """Return the name of a model's extension, such as ``yarn x4 (beta_fast=16)``."""
    name = "unpatched" if record.method == "none" else f"{record.method} x{record.factor:g}"
    if said := named_options(record.method, record.options):
        values = {key: json.dumps(value).strip('"') for key, value in said.items()}
        name += " (" + ", ".join(f"{k}={v if len(v) <= 20 else '...'}" for k, v in values.items()) + ")"
    return name


def namer(records: Sequence[AnyRecord]) -> Callable[[AnyRecord], str]:
    """Return a function that names the row of one of these records: its rule, its label, and further differences."""
    differing = [
        name for name in ("model", "dtype", "attn_implementation") if len({getattr(one, name) for one in records}) > 1
    ]
    models = short_model_names(record.model for record in records)

    def name_of(record: AnyRecord) -> str:
        besides: list[str] = [models[record.model] if name == "model" else getattr(record, name) for name in differing]
        return " · ".join(filter(None, (rule_name(record), record.label, *besides)))

    return name_of


def training_words(record: AnyRecord, count: Callable[[int], str] = "{:,}".format) -> str:
    """Return the amount of training of a row, such as "after 1,000 tokens"; empty for a model as it was published.

    Args:
        record: One of the row.
        count: How a number of tokens is written.
    """
    if record.tokens_trained is None:
        return "trained or not is not recorded"
    if record.tokens_trained:
        return f"after {count(record.tokens_trained)} tokens"
    return "" if is_unpatched(record) else "zero-shot"


def task_name(task: str, questions: int) -> str:
    """Return ``passkey``, or ``passkey, 100 questions of a text``."""
    return task if questions == 1 else f"{task}, {questions} questions of a text"


def is_unpatched(record: AnyRecord) -> bool:
    """Say whether a record is of a model as it was published."""
    return record.method == "none" and record.tokens_trained == 0


def refuse_extended(model: PreTrainedModel, name: str, on_scaled: str) -> None:
    """Raise if loading a folder brought a rule, as its manifest says, that another cannot or is not to replace.

    Raises:
        ValueError: With what to do.
    """
    description = describe(model)
    if description["method"] in method_names("instead_of_rope"):
        raise InvalidRequestError(
            f"{name!r} holds {description['method']} instead of RoPE, and its weights suit no other rule. Take it "
            "as it is: eval and lm-eval without --method."
        )
    if is_patched(model) and on_scaled != "replace":
        raise InvalidRequestError(
            f"{name!r} is extended already ({description['method']}, factor {description['factor']:g}), and factors "
            "do not multiply. Give the base model, or pass --on-scaled replace (eval without --method takes it as "
            "it is)."
        )


@contextmanager
def extended_as(model: PreTrainedModel, row: dict[str, Any] | None) -> Iterator[None]:
    """While open, a model is extended as a row says, instead of what loading brought; None leaves it as it is."""
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
            with extended_as(model, row):
                pass
