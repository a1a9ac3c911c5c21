"""Fine-tuning a model that is extended already: as it is, or refused where it contradicts the request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from hf_posenc.checkpoint.extended import load_extended
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.patching.api import describe, patch_model, unpatch_model
from hf_posenc.training import FinetuneConfig, finetune
from tiny_models import make_model
from tiny_runs import SEQ, Build, config, load_as_the_card_says
from training_plans import extended_by

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


def requests(**settings: Any) -> FinetuneConfig:
    return FinetuneConfig("nowhere", **settings)


def test_a_model_is_trained_as_it_is_and_again_after_reloading(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]
):
    small = {"token_budget": 2 * SEQ, "eval_documents": 0}
    model = patch_model(tiny_llama(), "linear", 2)
    as_it_is = config(tmp_path / "a", factor=None, **small)
    assert describe(finetune(model, tokenizer, documents, as_it_is).model)["method"] == "linear"
    same = config(tmp_path / "b", method="linear", **small)
    again = finetune(load_extended(tmp_path / "a"), tokenizer, documents, same)
    assert (describe(again.model)["method"], describe(again.model)["factor"]) == ("linear", 2)


def test_a_plain_model_gets_yarn_unless_told(tiny_llama: Build):
    assert extended_by(requests(), tiny_llama())["method"] == "yarn"
    done = extended_by(requests(method="ntk", context_length=128, original_max_position_embeddings=32), tiny_llama())
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
    assert extended_by(requests(**{**same, "options": options}), model)["options"] == {"beta_slow": 2.0}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"method": "linear"}, "requested: method linear"),
        ({"factor": 4.0}, "requested: factor 4"),
        ({"context_length": 256}, "requested: context_length 256"),
        ({"options": {"beta_fast": 16}}, "requested: beta_fast 16.0"),
        ({"method": "yarn", "factor": 2.0}, "requested: beta_slow 1.0"),  # a bare "yarn" has the default
        ({"original_max_position_embeddings": 32}, "requested: original_max_position_embeddings 32"),
    ],
)
def test_what_contradicts_is_refused_and_the_advice_works(tiny_llama: Build, other: dict[str, Any], named: str):
    model = patch_model(tiny_llama(), "yarn", 2, beta_slow=2)
    with pytest.raises(ValueError, match=rf"2, 128.*{named}\..*unpatch_model"):
        extended_by(requests(**other), model)
    extended_by(requests(**other), unpatch_model(model))


def test_a_published_scaling_is_not_trained_as_something_else(published: LlamaForCausalLM):
    with pytest.raises(ValueError, match=r"llama3,.*4.*on_scaled='replace'"):
        extended_by(requests(method="yarn"), published)
    assert extended_by(requests(), published)["method"] == "llama3"
    replaced = extended_by(requests(method="yarn", factor=8.0, on_scaled="replace"), published)
    assert (replaced["method"], replaced["context_length"]) == ("yarn", 512)


def test_a_scaling_that_hides_the_original_length_needs_it_said(tiny_llama: Build):
    model = tiny_llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ValueError, match="many tokens"):
        extended_by(requests(), model)
    given = requests(method="linear", factor=2.0, original_max_position_embeddings=64, on_scaled="replace")
    assert extended_by(given, model)["context_length"] == 128


MISTRAL = "mistral-0.1-yarn-8x"  # yarn x8 of 8192 tokens, with a window of 65536 on every layer


def small_mistral(**changes: Any) -> PreTrainedModel:
    """A model with a window on every layer, of the lengths that Mistral 0.1 declares."""
    return make_model("Mistral", **{"max_position_embeddings": 32768, "sliding_window": 32768, **changes})


def test_a_preset_decides_as_patch_model_lets_it():
    expected = patch_model(small_mistral(), preset=MISTRAL)
    model = small_mistral()
    assert extended_by(requests(preset=MISTRAL), model) == describe(expected)
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.config.sliding_window == 65536
    without = small_mistral()
    extended_by(requests(preset=MISTRAL, sliding_window="off"), without)
    assert without.config.sliding_window is None
    for one, other in ((model, expected), (without, expected)):
        assert torch.equal(one.model.rotary_emb.inv_freq, other.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("window", ["off", 160, "160"])
def test_a_window_is_changed(window: Any):
    model = small_mistral(max_position_embeddings=64, sliding_window=32)
    extended_by(requests(factor=2.0, sliding_window=window), model)
    assert model.config.sliding_window == (None if window == "off" else 160)


@pytest.mark.parametrize(
    "same", [{}, {"preset": MISTRAL}, {"sliding_window": "64k"}, {"preset": MISTRAL, "sliding_window": 65536}]
)
def test_a_preset_and_a_window_that_agree_are_taken(same: dict[str, Any]):
    model = patch_model(small_mistral(), preset=MISTRAL)
    assert extended_by(requests(**same), model)["factor"] == 8
    off = patch_model(small_mistral(), preset=MISTRAL, sliding_window="off")
    assert extended_by(requests(preset=MISTRAL, sliding_window="off"), off)["factor"] == 8


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"sliding_window": "off"}, "requested: sliding_window off"),
        ({"sliding_window": 4096}, "requested: sliding_window 4096"),
        ({"preset": MISTRAL}, r"requested: factor 8, sliding_window 65536"),
    ],
)
def test_a_preset_and_a_window_that_contradict_are_refused(other: dict[str, Any], named: str):
    model = patch_model(small_mistral(), "yarn", 4, original_max_position_embeddings=8192)
    with pytest.raises(ValueError, match=rf"4, 32768.*{named}\."):
        extended_by(requests(**other), model)


def test_a_preset_of_another_family_is_refused(tiny_llama: Build):
    for model in (tiny_llama(), patch_model(tiny_llama(), "yarn", 2)):
        with pytest.raises(ValueError, match="'llama'"):
            extended_by(requests(preset=MISTRAL), model)


def test_a_run_by_a_preset_says_so_everywhere(tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]):
    small: dict[str, Any] = {"factor": None, "seq_len": SEQ, "token_budget": 2 * SEQ, "preset": MISTRAL, "lora": True}
    run = config(tmp_path / "run", eval_lengths=[64], sliding_window="off", **small)
    small_mistral(sliding_window=32).save_pretrained(tmp_path / "base")
    result = finetune(load_base(tmp_path), tokenizer, documents, run)
    assert {(record.method, record.factor) for record in result.records} == {("none", 1.0), ("yarn", 8.0)}
    manifest = read_manifest(tmp_path / "run")
    assert manifest is not None
    assert (manifest["method"], manifest["factor"], manifest["sliding_window"]) == ("yarn", 8.0, "off")
    card = (tmp_path / "run/README.md").read_text()
    assert "8192 tokens as trained, extended 8 times with `yarn`" in card
    as_told = load_as_the_card_says(tmp_path / "run", tmp_path / "base")
    assert as_told["base"].config.sliding_window is None
    for change, named in (
        ({"preset": None, "factor": 8.0}, f"preset was '{MISTRAL}', is now None"),
        ({"sliding_window": "64k"}, "sliding_window was 'off', is now '65536'"),
    ):
        again = config(
            tmp_path / "run",
            **{**small, "eval_lengths": [64], "sliding_window": "off", **change},
            resume_from_checkpoint=True,
        )
        with pytest.raises(ValueError, match=named):
            finetune(load_base(tmp_path), tokenizer, documents, again)


def load_base(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder / "base")
