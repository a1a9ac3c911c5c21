"""Whether a model finds what is hidden in a long text."""

from __future__ import annotations

from hf_posenc.retrieval.cell_records import RetrievalRecord, read_retrieval_records, wilson_interval
from hf_posenc.retrieval.measuring import DEFAULT_DEPTHS, retrieval
from hf_posenc.retrieval.tasks import TASKS

__all__ = [
    "DEFAULT_DEPTHS",
    "TASKS",
    "RetrievalRecord",
    "read_retrieval_records",
    "retrieval",
    "wilson_interval",
]
