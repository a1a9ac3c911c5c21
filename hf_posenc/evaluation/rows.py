"""Which records are of one row of a report: one model, extended and trained in one way."""

from __future__ import annotations

import json

from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.retrieval.records import RetrievalRecord

AnyRecord = Record | RetrievalRecord


def row_key(record: AnyRecord) -> tuple[object, ...]:
    """Return what is equal among the records of one row, and of no other."""
    options = json.dumps(record.options, sort_keys=True)
    who = (record.model, record.dtype, record.attn_implementation, record.label)
    return (*who, record.method, record.factor, options, record.tokens_trained)


def is_unpatched(record: AnyRecord) -> bool:
    """Say whether a record is of a model as it was published."""
    return record.method == "none" and record.tokens_trained == 0
