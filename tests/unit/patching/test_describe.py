"""What patch_model, verify_model, describe and repr say of a model."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_posenc import describe, extend_config, patch_model, save_extended, unpatch_model, verify_model
from tiny_llama import make_tiny_llama, make_tiny_tokenizer

YARN = {
    "method": "yarn",
    "factor": 4.0,
    "options": {},
    "original_max_position_embeddings": 64,
    "context_length": 256,
}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hf_posenc.patching.api" and r.levelno == logging.INFO]


@pytest.mark.parametrize(
    ("method", "verified"),
    [
        ("yarn", "1 rotary module within 6e-08 of the closed form"),
        ("dynamic_yarn", "run by 2 attention layers, 1 rotary module within 6e-08 of the model's own frequencies"),
        ("dca", "run by 2 attention layers, 1 rotary module within 6e-08 of the model's own frequencies"),
        ("alibi", "run by 2 attention layers"),
        ("sinusoidal", "it is added to the embeddings"),
    ],
)
def test_one_line_says_what_was_done(method: str, verified: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_posenc"):
        model = patch_model(make_tiny_llama(), method, 4)
    line = f"{method} x4: 64 -> 256 tokens; verified: {verified}; the tokenizer's limit is not changed"
    assert said(caplog) == [line]
    assert str(verify_model(model)) == line.rpartition(";")[0]


def test_the_tokenizers_limit_goes_with_the_model(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tiny_tokenizer()
    with caplog.at_level(logging.INFO, "hf_posenc"):
        model = patch_model(make_tiny_llama(), "yarn", 4, tokenizer=tokenizer)
    assert tokenizer.model_max_length == 256
    assert said(caplog)[0].endswith("; the tokenizer's limit is 256")
    unpatch_model(model)
    assert tokenizer.model_max_length == 64


def test_what_is_no_tokenizer_is_refused_before_anything_is_changed() -> None:
    model = make_tiny_llama()
    with pytest.raises(TypeError, match="processor, got"):
        patch_model(model, "yarn", 4, tokenizer=object())  # type: ignore[arg-type]
    assert describe(model)["method"] == "none"


def test_a_refused_request_leaves_the_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tiny_tokenizer()
    with pytest.raises(ValueError, match=">= 1"), caplog.at_level(logging.INFO, "hf_posenc"):
        patch_model(make_tiny_llama(), "yarn", 0.5, tokenizer=tokenizer)
    assert tokenizer.model_max_length == 64
    assert said(caplog) == []


def test_verify_of_a_staged_rule_compares_the_frequencies_it_counts_on() -> None:
    model = patch_model(make_tiny_llama(), "dynamic_yarn", 4)
    found = verify_model(model)
    assert found.attention_layers == 2
    (check,) = found.modules
    assert check.name == "model.rotary_emb"
    assert 0 < check.inv_freq_error < 1e-6
    assert verify_model(patch_model(make_tiny_llama(), "yarn", 4)).attention_layers == 0


def test_verify_without_data_says_so() -> None:
    with torch.device("meta"):
        model = make_tiny_llama()
    assert verify_model(patch_model(model, "yarn", 4)).found == "nothing, as there is no data yet"


def test_repr_shows_it(tmp_path: Path) -> None:
    model = patch_model(make_tiny_llama(), "yarn", 4)
    shown = "(rotary_emb): LlamaRotaryEmbedding(yarn x4: 64 -> 256 tokens)"
    assert shown in repr(model)
    assert shown in repr(copy.deepcopy(model))
    assert shown in repr(pickle.loads(pickle.dumps(model)))
    unpatch_model(model)
    assert "(rotary_emb): LlamaRotaryEmbedding()" in repr(model)


def test_describe_takes_a_model_a_config_or_a_folder(tmp_path: Path) -> None:
    make_tiny_llama().save_pretrained(tmp_path / "base")
    model: Any = patch_model(make_tiny_llama(), "yarn", 4)
    save_extended(model, tmp_path / "model")
    assert describe(model) == describe(model.config) == YARN
    assert describe(tmp_path / "model") == describe(str(tmp_path / "model" / "config.json")) == YARN
    assert describe(extend_config(make_tiny_llama().config, "yarn", 4)) == YARN
    assert describe(tmp_path / "base")["method"] == "none"
    staged = patch_model(make_tiny_llama(), "dynamic_yarn", 4)
    save_extended(staged, tmp_path / "staged")
    assert describe(tmp_path / "staged") == describe(staged) == {**YARN, "method": "dynamic_yarn"}
    unpatch_model(model)
    model.name_or_path = str(tmp_path / "base")
    adapter = get_peft_model(patch_model(model, "linear", 2), LoraConfig(task_type="CAUSAL_LM"))
    adapter.save_pretrained(str(tmp_path / "adapter"))
    assert describe(tmp_path / "adapter")["method"] == describe(adapter)["method"] == "linear"
    with pytest.raises(TypeError, match="Transformers model"):
        describe(3)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="nowhere"):
        describe(tmp_path / "nowhere")
