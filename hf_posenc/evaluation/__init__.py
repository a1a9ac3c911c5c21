"""Measuring what a model makes of long texts."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.evaluation.config import EvalConfig, KeyTokens
    from hf_posenc.evaluation.effective_length import Reach, reach, reach_lines
    from hf_posenc.evaluation.intervals import Ratio, paired_interval
    from hf_posenc.evaluation.measuring_perplexity import perplexity
    from hf_posenc.evaluation.protocols import PROTOCOLS
    from hf_posenc.evaluation.records import Record, read_records

METRIC = str(Path(__file__).with_name("metric.py"))  # for evaluate.load, which takes a file

_MODULES = {
    "EvalConfig": "config",
    "KeyTokens": "config",
    "PROTOCOLS": "protocols",
    "Ratio": "intervals",
    "Reach": "effective_length",
    "Record": "records",
    "paired_interval": "intervals",
    "perplexity": "measuring_perplexity",
    "reach": "effective_length",
    "reach_lines": "effective_length",
    "read_records": "records",
}

__all__ = [
    "METRIC",
    "PROTOCOLS",
    "EvalConfig",
    "KeyTokens",
    "Ratio",
    "Reach",
    "Record",
    "paired_interval",
    "perplexity",
    "reach",
    "reach_lines",
    "read_records",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
