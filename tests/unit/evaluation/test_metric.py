"""The metric of the evaluate library gives the numbers of ``perplexity``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import evaluate
from transformers import LlamaForCausalLM

from hf_posenc.evaluation import METRIC, perplexity
from tiny_llama import make_tiny_tokenizer


def test_evaluate_loads_it_and_gives_the_same_numbers(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    model, texts = tiny_llama(), ["abcdefgh" * 5, "zyxwvuts" * 5]
    settings = {"tokenizer": make_tiny_tokenizer(), "context_lengths": [16, 32], "progress": False}
    metric = evaluate.load(METRIC, cache_dir=str(tmp_path))
    result = metric.compute(predictions=texts, model=model, **settings)
    expected = perplexity(model, texts, **settings)
    assert result["perplexities"] == {record.context_length: record.perplexity for record in expected}
    assert [record["text_hash"] for record in result["records"]] == [record.text_hash for record in expected]
