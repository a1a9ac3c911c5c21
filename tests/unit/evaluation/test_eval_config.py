"""The settings of an evaluation: declared once, and the same in Python, as flags of eval and as flags of compare."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_posenc.cli.eval import EvalArguments
from hf_posenc.comparing.config import CompareConfig
from hf_posenc.errors import InvalidRequestError, InvalidTypeError
from hf_posenc.evaluation import EvalConfig, KeyTokens, perplexity
from hf_posenc.evaluation.config import OutputConfig
from hf_posenc.patching.extension_config import ExtensionConfig
from hf_posenc.retrieving.config import RetrievalConfig
from hf_posenc.retrieving.measuring_retrieval import retrieval

LENGTHS: Any = [512, 2048]
LENGTHS_32: Any = [32, 64]


def test_a_config_has_the_names_and_defaults_of_the_function() -> None:
    parameters, config = inspect.signature(retrieval).parameters, RetrievalConfig()
    assert vars(config).keys() <= parameters.keys()
    for name in vars(config).keys() - {"tasks", "depths"}:  # by default one task there; depths are a tuple
        assert parameters[name].default == getattr(config, name), name


def test_perplexity_takes_a_config_or_its_fields(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model, texts = tiny_llama(), [torch.arange(1, 100)]
    settings: dict[str, Any] = {"protocol": "sliding_window", "stride": 16}
    by_fields = perplexity(model, texts, [32, 64], **settings, progress=False)
    by_config = perplexity(model, texts, EvalConfig(LENGTHS_32, ["sliding_window"], stride=16), progress=False)
    assert [field.nll_sum for field in by_fields] == [one.nll_sum for one in by_config]
    with pytest.raises(InvalidTypeError, match=r"'strde'\..*'stride'\?"):
        perplexity(model, texts, [32], strde=16)
    with pytest.raises(InvalidTypeError, match="EvalConfig"):
        perplexity(model, texts, EvalConfig(LENGTHS_32), stride=16)


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
        ({"logits_chunk": 0}, "logits_chunk must be a whole number >= 1, got 0"),
        ({"max_documents": 0}, "max_documents must be a whole number >= 1, got 0"),
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


@pytest.mark.parametrize(
    ("settings", "lengths", "measured"),
    [
        ({"protocol": "same_tokens", "context_lengths": [32, 64], "min_tokens": 8}, (20, 32, 33, 100), 2),
        ({"protocol": "rerope", "context_lengths": [64], "last_k": 40, "min_tokens": 8}, (20, 40, 41, 100), 2),
        ({"protocol": "pose", "context_lengths": [32], "min_tokens": 1, "stride": 8}, (1, 2, 100), 2),
    ],
)
def test_documents_with_nothing_to_score_are_left_out(
    settings: dict[str, Any], lengths: tuple[int, ...], measured: int, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    texts = [torch.arange(1, 1 + length) for length in lengths]
    with pytest.warns(UserWarning, match="are left out"):
        records = perplexity(tiny_llama(), texts, EvalConfig.of(**settings), progress=False)
    assert {record.num_documents for record in records} == {measured}


def test_values_of_another_type_are_refused_by_name(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model, texts = tiny_llama(), [torch.arange(1, 100)]
    with pytest.raises(InvalidRequestError, match=r"max_tokens: expected a number of tokens .*, got 'far'"):
        perplexity(model, texts, [512], protocol="pi", max_tokens="far")
    with pytest.raises(InvalidRequestError, match="last_k must be a whole number >= 0, got '16'"):
        perplexity(model, texts, [32], protocol="last_k", last_k="16")
    by_word, by_number = (
        perplexity(model, texts, [512], "sliding_window", stride=16, max_tokens=most, min_tokens=50, progress=False)
        for most in ("1k", 1024)
    )
    assert by_word[0].nll_sum == by_number[0].nll_sum
    for lengths in (4096, ["4k"]):
        with pytest.raises(InvalidTypeError, match="context_lengths must be"):
            retrieval(model, None, ["passkey"], lengths)  # type: ignore[arg-type]  # the mistake


def test_results_go_to_the_home_folder_where_that_is_asked_for(
    tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    perplexity(tiny_llama(), [torch.arange(1, 100)], [32], output="~/r.jsonl", progress=False)
    assert (tmp_path / "home" / "r.jsonl").is_file()
    assert not (tmp_path / "~").exists()
