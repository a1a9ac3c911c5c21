"""Presets: every one fits a model of its family, means what it says, and loads where hf_posenc is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from census import tiny_model
from tiny_models import logits, make_model, token_ids
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_posenc import describe, extend_config, patch_model, save_extended
from hf_posenc.presets import Preset, presets
from hf_posenc.registry import get_method, make_scaling

IDS = token_ids(60)


def model_for(preset: Preset, model_type: str) -> PreTrainedModel:
    """A small model that says it was trained on the preset's length."""
    model = tiny_model(model_type)
    model.config.max_position_embeddings = preset.original_max_position_embeddings
    return model


@pytest.mark.parametrize(
    ("name", "model_type"), [(name, kind) for name, preset in presets().items() for kind in preset.model_types]
)
def test_a_preset_is_what_its_numbers_say_and_loads_in_plain_transformers(
    name: str, model_type: str, tmp_path: Path
) -> None:
    preset = presets()[name]
    model = patch_model(model_for(preset, model_type), preset=name)
    window = preset.sliding_window or "keep"
    spelled_out = patch_model(
        model_for(preset, model_type), preset.method, preset.factor, sliding_window=window, **preset.options
    )
    assert torch.equal(logits(model, IDS), logits(spelled_out, IDS))
    there = describe(model)
    assert there["method"] == preset.method
    assert there["context_length"] == preset.factor * preset.original_max_position_embeddings
    plain = AutoModelForCausalLM.from_pretrained(save_extended(model, tmp_path / "model")).eval()
    assert plain.config.max_position_embeddings == there["context_length"]
    assert torch.equal(logits(plain, IDS), logits(model, IDS))


@pytest.mark.parametrize("preset", presets().values(), ids=presets())
def test_the_data_are_whole(preset: Preset) -> None:
    assert preset.method == get_method(preset.method).name
    make_scaling(preset.method, preset.factor, preset.options)
    assert preset.checkpoints
    assert all(name.count("/") == 1 for name in preset.checkpoints)
    assert len(preset.source) > 20


def test_a_preset_that_does_not_fit_is_refused() -> None:
    model = make_model("Llama", max_position_embeddings=4096)
    with pytest.raises(ValueError, match=r"unknown preset 'lama-2-yarn-16x'\. Did you mean 'llama-2-yarn-16x'"):
        patch_model(model, preset="lama-2-yarn-16x")
    with pytest.raises(ValueError, match=r"is for Qwen \(model_type qwen2, .*this model is 'llama'"):
        patch_model(model, preset="qwen3-yarn-4x")
    with pytest.raises(ValueError, match=r"decides factor, options \(it is yarn, factor 16\)"):
        patch_model(model, preset="llama-2-yarn-16x", factor=4, beta_fast=16)
    with pytest.raises(ValueError, match="decides method"):
        patch_model(model, "linear", preset="llama-2-yarn-16x")
    with pytest.raises(ValueError, match="trained on 8192 tokens, this one's config says 4096"):
        patch_model(model, preset="llama-3-to-3.1")
    assert describe(model)["method"] == "none"


def test_an_original_length_below_the_declared_one_is_the_presets() -> None:
    config = make_model("Mistral", max_position_embeddings=32768, sliding_window=4096).config
    extended = extend_config(config, preset="mistral-0.1-yarn-8x")
    assert extended.sliding_window == 65536
    assert extended.max_position_embeddings == 65536
    assert extended.rope_parameters["original_max_position_embeddings"] == 8192
