"""Measuring what a model makes of long texts."""

from __future__ import annotations

from hf_posenc.evaluation.perplexity import perplexity
from hf_posenc.evaluation.plans import PROTOCOLS
from hf_posenc.evaluation.records import Record, read_records

__all__ = ["PROTOCOLS", "Record", "perplexity", "read_records"]
