"""Which records are of one row of a report: one model, extended and trained in one way."""

from __future__ import annotations

import json
from collections.abc import Callable

from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.retrieval.records import RetrievalRecord

AnyRecord = Record | RetrievalRecord


def row_key(record: AnyRecord) -> tuple[object, ...]:
    """Return what is equal among the records of one row, and of no other."""
    options = json.dumps(record.options, sort_keys=True)
    who = (record.model, record.dtype, record.attn_implementation, record.label)
    return (*who, record.method, record.factor, options, record.tokens_trained)


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
