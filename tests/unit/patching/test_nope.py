"""Dropped positions: a model in which every token has position 0, and whose checkpoint says so everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc import load_extended, patch_model, save_extended, unpatch_model, verify_model
from hf_posenc.checkpoint.manifest import MANIFEST
from hf_posenc.patching.api import describe
from hf_posenc.patching.verification import RotaryMismatchError
from model_types import tiny_model
from patched_and_undone import assert_patched_saved_and_undone
from tiny_models import logits, make_model, token_ids

IDS = token_ids(100)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3", "GPTNeoX"])
def test_it_is_the_model_with_every_token_at_position_0(family: str) -> None:
    model = make_model(family)
    with torch.no_grad():
        # With positions that are all the same, Transformers would take each token for a document of its own.
        mask = torch.ones(1, 1, 100, 100, dtype=torch.bool).tril()
        expected = model(IDS, position_ids=torch.zeros_like(IDS), attention_mask=mask, use_cache=False).logits
    plain = logits(model, IDS)
    patch_model(model, "drope", 4)
    assert describe(model)["method"] == "nope"
    torch.testing.assert_close(logits(model, IDS), expected, rtol=0, atol=2e-6)
    assert not torch.equal(expected, plain)
    assert torch.equal(logits(unpatch_model(model), IDS), plain)


def test_without_a_longer_target_it_is_still_dropped(tmp_path: Path) -> None:
    model = patch_model(make_model("Llama"), "nope", 1)
    expected = logits(model, IDS)
    assert int(model.model.rotary_emb.inv_freq.count_nonzero()) == 0
    save_extended(model, tmp_path / "model")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval(), IDS), expected)
    assert describe(load_extended(tmp_path / "model")) == describe(model)


def test_a_temperature_is_on_cos(tmp_path: Path) -> None:
    model = patch_model(make_model("Llama"), "nope", 4, attention_factor=1.25)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(200).unsqueeze(0))
    assert (set(cos.flatten().tolist()), set(sin.flatten().tolist())) == ({1.25}, {0.0})
    save_extended(model, tmp_path / "model")
    assert describe(load_extended(tmp_path / "model"))["options"] == {"attention_factor": 1.25}


def test_a_config_that_lost_our_mark_is_read_as_lists_and_verified(tmp_path: Path) -> None:
    model = patch_model(make_model("Llama"), "nope", 4)
    folder = save_extended(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["context_extension"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / MANIFEST).unlink()
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    verify_model(loaded)
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


def test_one_pair_that_turns_after_all_is_found() -> None:
    model = patch_model(make_model("Llama"), "nope", 4)
    model.model.rotary_emb.original_inv_freq[3] = 1e-9
    with pytest.raises(RotaryMismatchError, match="not those"):
        verify_model(model)


def test_pairs_that_never_turned_are_not_taken_for_dropped_ones(tmp_path: Path) -> None:
    model = tiny_model("lfm3")  # the slower half of its pairs never rotates
    assert_patched_saved_and_undone(model, tmp_path / "model", "nope")
    again = load_extended(tmp_path / "model")
    patch_model(again, "linear", 4, on_scaled="replace")
    turning = again.model.rotary_emb.full_attention_inv_freq != 0
    assert turning.tolist() == [True] * 4 + [False] * 4
