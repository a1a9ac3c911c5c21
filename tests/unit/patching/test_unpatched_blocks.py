"""What a block of ``unpatched`` and an ``unpatch_model`` leave behind: notes, learned values, and what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_posenc import describe, load_extended, patch_model, save_extended, unpatch_model, unpatched
from hf_posenc.checkpoint.manifest import read_manifest
from tiny_models import logits, make_model, token_ids

IDS = token_ids(100)


def test_a_block_of_unpatched_keeps_the_name_of_the_base_model(tmp_path: Path) -> None:
    model = make_model("Llama")
    patch_model(model, "dynamic_yarn", 4)
    save_extended(model, tmp_path / "first", base_model="org/base")
    loaded = load_extended(tmp_path / "first")
    with unpatched(loaded):
        assert describe(loaded)["method"] == "none"
    save_extended(loaded, tmp_path / "second")
    assert (read_manifest(tmp_path / "second") or {})["base_model"] == "org/base"


def test_an_adapter_answers_short_texts_as_the_base_model(tmp_path: Path) -> None:
    make_model("Llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    extended = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    patch_model(extended, "yarn", 4)
    settings = LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    save_extended(get_peft_model(extended, settings), tmp_path / "adapter")
    model = load_extended(tmp_path / "adapter")
    before = logits(model, IDS)
    assert (before - logits(base, IDS)).abs().max() > 1e-3
    with unpatched(model):
        assert not torch.equal(logits(model, IDS), logits(base, IDS))  # the rule is out, the adapter is not
        with model.disable_adapter():
            assert torch.equal(logits(model, IDS), logits(base, IDS))
    assert torch.equal(logits(model, IDS), before)


def test_a_block_of_unpatched_keeps_what_an_encoding_learned() -> None:
    model = make_model("Llama")
    patch_model(model, "t5_bias", 4)
    plain = logits(model, IDS)
    with torch.no_grad():
        table = dict(model.named_parameters())["model.positional_encoding.table.weight"]
        table.add_(torch.randn(table.shape, generator=torch.Generator().manual_seed(1)))
    learned = logits(model, IDS)
    assert (learned - plain).abs().max() > 1e-3
    with unpatched(model):
        assert (logits(model, IDS) - learned).abs().max() > 1e-3
    assert torch.equal(logits(model, IDS), learned)


def test_a_loaded_extension_is_saved_after_a_second_one_was_taken_out(tmp_path: Path) -> None:
    model = make_model("Llama")
    patch_model(model, "yarn", 4)
    save_extended(model, tmp_path / "yarn")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "yarn")
    patch_model(loaded, "dynamic_yarn", 2, on_scaled="replace")
    unpatch_model(loaded)
    loaded.save_pretrained(tmp_path / "again")
    assert (read_manifest(tmp_path / "again") or {})["method"] == "yarn"
    patched_once = make_model("Llama")
    patch_model(patched_once, "yarn", 4)
    unpatch_model(patched_once)
    patched_once.save_pretrained(tmp_path / "plain")
    assert read_manifest(tmp_path / "plain") is None


def test_what_was_patched_inside_a_block_is_not_lost_without_a_word() -> None:
    model = patch_model(make_model("Llama"), "yarn", 4)
    with pytest.raises(ValueError, match=r"already patched \(linear, factor 2\)"), unpatched(model):
        patch_model(model, "linear", 2)
    assert describe(model)["method"] == "linear"
    unpatch_model(model)
