"""Whether a model finds what is hidden in a long text."""

from __future__ import annotations

from hf_posenc.evaluation.retrieval.measure import DEFAULT_DEPTHS, retrieval
from hf_posenc.evaluation.retrieval.records import RetrievalRecord, read_retrieval_records, wilson_interval
from hf_posenc.evaluation.retrieval.tasks import TASKS

__all__ = [
    "DEFAULT_DEPTHS",
    "TASKS",
    "RetrievalRecord",
    "read_retrieval_records",
    "retrieval",
    "wilson_interval",
]
