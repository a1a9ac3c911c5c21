"""Fine-tuning a model that is extended already: as it is, or refused where it contradicts the request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import SEQ, Build, config, make_documents, make_tokenizer
from transformers import LlamaForCausalLM

from hf_posenc.checkpoint import load_extended
from hf_posenc.patching import describe, patch_model, unpatch_model
from hf_posenc.training import FinetuneConfig, finetune
from hf_posenc.training.extending import extend

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def published(tiny_llama: Build) -> LlamaForCausalLM:
    """A model its publisher scaled, as Llama 3.1 is."""
    return tiny_llama(rope_parameters=dict(LLAMA3), max_position_embeddings=256)


def asked(**settings: Any) -> FinetuneConfig:
    return FinetuneConfig("nowhere", **settings)


def test_a_model_is_trained_as_it_is_and_again_after_reloading(tmp_path: Path, tiny_llama: Build):
    small = {"token_budget": 2 * SEQ, "eval_documents": 0}
    model = patch_model(tiny_llama(), "linear", 2)
    as_it_is = config(tmp_path / "a", factor=None, **small)
    assert describe(finetune(model, make_tokenizer(), make_documents(), as_it_is).model)["method"] == "linear"
    same = config(tmp_path / "b", method="linear", **small)
    again = finetune(load_extended(tmp_path / "a"), make_tokenizer(), make_documents(), same)
    assert (describe(again.model)["method"], describe(again.model)["factor"]) == ("linear", 2)


def test_a_plain_model_gets_yarn_unless_told(tiny_llama: Build):
    assert extend(tiny_llama(), asked())["method"] == "yarn"
    done = extend(tiny_llama(), asked(method="ntk", context_length=128, original_max_position_embeddings=32))
    assert (done["method"], done["factor"], done["original_max_position_embeddings"]) == ("ntk", 4, 32)


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"method": "yarn"},
        {"factor": 1.999},  # 128 of 64 tokens too
        {"context_length": 128},
        {"method": "yarn", "factor": 2.0, "options": {"beta_fast": 32, "beta_slow": 2}},  # one is the default
        {"original_max_position_embeddings": 64},
    ],
)
def test_what_agrees_is_taken(tiny_llama: Build, same: dict[str, Any]):
    model = patch_model(tiny_llama(), "yarn", 2, beta_slow=2)
    options = same.get("options", {"beta_slow": 2} if "method" in same else {})
    assert extend(model, asked(**{**same, "options": options}))["options"] == {"beta_slow": 2.0}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"method": "linear"}, "asked for: method linear"),
        ({"factor": 4.0}, "asked for: factor 4"),
        ({"context_length": 256}, "asked for: context_length 256"),
        ({"options": {"beta_fast": 16}}, "asked for: beta_fast 16.0"),
        ({"method": "yarn", "factor": 2.0}, "asked for: beta_slow 1.0"),  # a bare "yarn" has the default
        ({"original_max_position_embeddings": 32}, "asked for: original_max_position_embeddings 32"),
    ],
)
def test_what_contradicts_is_refused_and_the_advice_works(tiny_llama: Build, other: dict[str, Any], named: str):
    model = patch_model(tiny_llama(), "yarn", 2, beta_slow=2)
    with pytest.raises(ValueError, match=rf"extended already: yarn, factor 2, 128 tokens.*{named}\..*unpatch_model"):
        extend(model, asked(**other))
    extend(unpatch_model(model), asked(**other))


def test_a_published_scaling_is_not_trained_as_something_else(published: LlamaForCausalLM):
    with pytest.raises(ValueError, match=r"already: llama3, factor 4.*asked for: method yarn.*on_scaled='replace'"):
        extend(published, asked(method="yarn"))
    assert extend(published, asked())["method"] == "llama3"
    replaced = extend(published, asked(method="yarn", factor=8.0, on_scaled="replace"))
    assert (replaced["method"], replaced["context_length"]) == ("yarn", 512)


def test_a_scaling_that_hides_the_original_length_needs_it_said(tiny_llama: Build):
    model = tiny_llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ValueError, match="does not say how many tokens it was trained on"):
        extend(model, asked())
    told = asked(method="linear", factor=2.0, original_max_position_embeddings=64, on_scaled="replace")
    assert extend(model, told)["context_length"] == 128
