"""Which records are of one row of a report: one model, extended and trained in one way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import PurePath

from hf_posenc.evaluation.records import Record
from hf_posenc.retrieval.cell_records import RetrievalRecord

AnyRecord = Record | RetrievalRecord


def row_key(record: AnyRecord) -> tuple[object, ...]:
    """Return what is equal among the records of one row, and of no other."""
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


def training_words(record: AnyRecord, count: Callable[[int], str] = "{:,}".format) -> str:
    """Return how much a row was trained, such as "after 1,000 tokens"; empty for a model as it was published.

    Args:
        record: One of the row.
        count: How a number of tokens is written.
    """
    if record.tokens_trained is None:
        return "trained or not is not recorded"
    if record.tokens_trained:
        return f"after {count(record.tokens_trained)} tokens"
    return "" if is_unpatched(record) else "zero-shot"


def is_unpatched(record: AnyRecord) -> bool:
    """Say whether a record is of a model as it was published."""
    return record.method == "none" and record.tokens_trained == 0
