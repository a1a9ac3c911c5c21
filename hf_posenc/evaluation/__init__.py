"""Measuring what a model makes of long texts."""

from __future__ import annotations

from pathlib import Path

from hf_posenc.evaluation.effective_length import Reach, reach, reach_lines
from hf_posenc.evaluation.key_tokens import KeyTokens
from hf_posenc.evaluation.pairs import Ratio, paired_interval
from hf_posenc.evaluation.perplexity import perplexity
from hf_posenc.evaluation.plans import PROTOCOLS
from hf_posenc.evaluation.records import Record, read_records
from hf_posenc.retrieval import RetrievalRecord, read_retrieval_records, retrieval

METRIC = str(Path(__file__).with_name("metric.py"))  # for evaluate.load, which takes a file

__all__ = [
    "METRIC",
    "PROTOCOLS",
    "KeyTokens",
    "Ratio",
    "Reach",
    "Record",
    "RetrievalRecord",
    "paired_interval",
    "perplexity",
    "reach",
    "reach_lines",
    "read_records",
    "read_retrieval_records",
    "retrieval",
]
