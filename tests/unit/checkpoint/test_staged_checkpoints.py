"""Staged rules on disk: the manifest carries them, and everything else is the base model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from attention_models import IDS, ORIGINAL, sharp_model
from hf_posenc import describe, load_extended, patch_model, save_extended
from hf_posenc.checkpoint.manifest import MANIFEST
from hf_posenc.checkpoint.plain_loading import plain_loading
from tiny_models import logits


def staged(family: str = "Llama") -> PreTrainedModel:
    return patch_model(sharp_model(family), "dynamic_yarn", 8, stage=32, beta_fast=16)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Phi3", "Gemma2", "GPTNeoX"])
def test_load_extended_gives_the_model_and_plain_transformers_its_base(family: str, tmp_path: Path) -> None:
    model = staged(family)
    expected, plain = logits(model, IDS), logits(sharp_model(family), IDS)
    save_extended(model, tmp_path / "model")
    loaded = load_extended(tmp_path / "model").eval()
    assert torch.equal(logits(loaded, IDS), expected)
    assert describe(loaded) == describe(model)
    with plain_loading():
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert base.config.max_position_embeddings == ORIGINAL
    assert torch.equal(logits(base, IDS), plain)
    assert torch.equal(logits(load_extended(save_extended(loaded, tmp_path / "again")).eval(), IDS), expected)


def test_what_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = staged()
    sharp_model("Llama").save_pretrained(tmp_path / "base")
    save_extended(model, tmp_path / "model")
    assert "context_extension.json" in caplog.text
    manifest = json.loads((tmp_path / "model" / MANIFEST).read_text())
    assert manifest["method"] == "dynamic_yarn"
    assert manifest["options"] == {"stage": 32, "beta_fast": 16.0}
    assert manifest["context_length"] == 8 * ORIGINAL
    ours, base = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "base"))
    assert {key: ours[key] for key in base} == base
    assert ours.keys() - base.keys() == {
        "rope_theta",
        "rope_scaling",
        "context_extension",
    }  # Transformers 4's, and ours


def test_an_adapter_brings_the_rule_to_its_base(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    sharp_model("Llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = get_peft_model(patch_model(base, "dynamic", 8, stage=32), LoraConfig(init_lora_weights=False)).eval()
    expected = logits(tuned, IDS)
    save_extended(tuned, tmp_path / "adapter")
    loaded = load_extended(tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded, IDS), expected)
    merged = save_extended(loaded.merge_and_unload(), tmp_path / "merged")
    torch.testing.assert_close(logits(load_extended(merged).eval(), IDS), expected, atol=1e-5, rtol=0)
