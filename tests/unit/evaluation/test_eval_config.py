"""The settings of an evaluation: declared once, and the same in Python, as flags of eval and as flags of compare."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from hf_posenc.cli.eval import EvalArguments
from hf_posenc.comparing.config import CompareConfig
from hf_posenc.evaluation import EvalConfig, KeyTokens, perplexity
from hf_posenc.evaluation.config import OutputConfig
from hf_posenc.patching.extension_config import ExtensionConfig
from hf_posenc.retrieval.config import RetrievalConfig
from hf_posenc.retrieval.measuring_retrieval import retrieval

LENGTHS: Any = [512, 2048]


@pytest.mark.parametrize(
    ("function", "config", "apart"),
    [
        (perplexity, EvalConfig(LENGTHS), {"context_lengths", "protocol"}),
        (retrieval, RetrievalConfig(), {"tasks", "depths"}),  # by default one task there; depths are a tuple
    ],
)
def test_a_config_has_the_names_and_defaults_of_the_function(
    function: Callable[..., Any], config: Any, apart: set[str]
) -> None:
    parameters = inspect.signature(function).parameters
    assert vars(config).keys() <= parameters.keys()
    for name in vars(config).keys() - apart:
        assert parameters[name].default == getattr(config, name), name


def test_the_flags_are_the_fields() -> None:
    flags = {one.name: one for one in dataclasses.fields(EvalArguments)}
    for kind in (EvalConfig, OutputConfig):
        for one in dataclasses.fields(kind):
            assert flags[one.name].metadata == one.metadata
    assert flags["alpha"].default == KeyTokens().alpha
    compared = vars(CompareConfig(LENGTHS[0]))
    for values in (EvalConfig(LENGTHS), OutputConfig(), ExtensionConfig(), RetrievalConfig()):
        shared = vars(values).keys() & compared.keys() - {"context_length", "max_documents", "tasks"}
        for name in shared:
            assert compared[name] == getattr(values, name), name


def test_runs_checks_what_needs_no_model() -> None:
    runs = EvalConfig(LENGTHS, ["truncated", "sliding_window"]).runs()
    assert [(run.protocol, run.context_length, run.stride) for run in runs] == [
        *[("truncated", length, None) for length in LENGTHS],
        *[("sliding_window", length, 256) for length in LENGTHS],
    ]
    for changes, message in (
        ({"logits_chunk": 0}, "logits_chunk must be at least 1, got 0"),
        ({"max_documents": 0}, "max_documents must be at least 1, got 0"),
        (
            {"protocol": ["pi"], "max_tokens": 600},
            r"max_tokens \(600\) must not be less than the longest context length \(2048\)",
        ),
        ({"min_tokens": 600}, r"min_tokens \(600\) is less than the longest context length \(2048\)"),
        ({"cut": True, "min_tokens": 4096}, "min_tokens has no meaning there"),
        ({"protocol": ["longlora"], "cut": True}, "protocol 'longlora' joins all documents"),
        ({"protocol": ["yarn"], "bos": "prepended"}, "protocol 'yarn' has a rule of its own for BOS tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(EvalConfig(LENGTHS), **changes).runs()
