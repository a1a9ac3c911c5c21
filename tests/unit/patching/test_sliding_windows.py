"""Sliding windows on every layer: what is said of them, changed, undone and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_posenc import extend_config, load_extended, patch_model, save_extended, unpatch_model
from hf_posenc.cli.main import main
from model_types import config_class_of, tiny_config
from tiny_models import logits, make_model, native, token_ids

IDS = token_ids(200)  # past the window of 160, or of 128


def test_a_window_that_ends_before_the_target_is_pointed_out_with_its_reach() -> None:
    with pytest.warns(UserWarning, match=r"128.*2.*= 256.*sliding_window='off'"):
        patch_model(make_model("Mistral", sliding_window=128), "yarn", 4)


def test_warnings_name_the_users_line() -> None:
    for call in (patch_model, lambda model, *request: extend_config(model.config, *request)):
        with pytest.warns(UserWarning, match=r"128.*2") as caught:
            call(make_model("Mistral", sliding_window=128), "yarn", 4)
        assert {one.filename for one in caught} == {__file__}


def test_what_information_cannot_reach_is_refused() -> None:
    model = make_model("Mistral", sliding_window=120)
    with pytest.raises(ValueError, match=r"120.*2.*240.*256"):
        patch_model(model, "yarn", 4)
    with pytest.raises(ValueError, match="200"):
        patch_model(model, "yarn", 4, sliding_window=100)
    with pytest.raises(ValueError, match="'keep', 'off'"):
        patch_model(model, "yarn", 4, sliding_window="of")
    assert model.config.sliding_window == 120


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_where_there_is_no_such_window_there_is_nothing_to_change(family: str) -> None:
    with pytest.raises(ValueError, match="sliding window"):
        patch_model(make_model(family), "yarn", 4, sliding_window="off")


@pytest.mark.filterwarnings("ignore:config.sliding_window is 160")
@pytest.mark.parametrize(("requested", "window"), [("off", None), (160, 160), ("160", 160)])
def test_a_changed_window_is_that_of_a_model_built_with_it(requested: Any, window: int | None, tmp_path: Path) -> None:
    model = make_model("Mistral", sliding_window=32)
    plain = logits(model, IDS)
    patch_model(model, "yarn", 4, sliding_window=requested)
    reference = make_model("Mistral", sliding_window=window)
    expected = logits(native(reference, "yarn", 4), IDS)
    assert torch.equal(logits(model, IDS), expected)
    saved = AutoModelForCausalLM.from_pretrained(save_extended(model, tmp_path / "model"))
    assert saved.config.sliding_window == window
    assert torch.equal(logits(saved, IDS), expected)
    unpatch_model(model)
    assert model.config.sliding_window == 32
    assert torch.equal(logits(model, IDS), plain)


def test_an_adapter_carries_the_window(tmp_path: Path) -> None:
    make_model("Mistral", sliding_window=32).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    patch_model(base, "yarn", 4, sliding_window="off")
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(base, lora)
    loaded = load_extended(save_extended(adapted, tmp_path / "adapter")).eval()
    assert loaded.config.sliding_window is None
    assert torch.equal(logits(loaded, IDS), logits(adapted.eval(), IDS))


def test_the_flag(tmp_path: Path) -> None:
    make_model("Mistral", sliding_window=32).save_pretrained(tmp_path / "base")
    from tiny_llama import make_tiny_tokenizer

    make_tiny_tokenizer().save_pretrained(tmp_path / "base")
    argv = ["patch", str(tmp_path / "base"), str(tmp_path / "out"), "--factor", "4", "--sliding-window", "off"]
    assert main(argv) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["sliding_window"] is None


@pytest.mark.parametrize("model_type", ["ministral", "qwen2"])
def test_windows_that_layers_are_built_with_are_not_changed(model_type: str) -> None:
    """Their forward takes the mask of each layer's type, so a window in the config alone would be lost or missed."""
    config = tiny_config(config_class_of(model_type))
    config.num_hidden_layers, config.sliding_window, config.layer_types = 2, 160, ["sliding_attention"] * 2
    model = AutoModelForCausalLM.from_config(config).eval()
    for window in ("off", 192):
        with pytest.raises(ValueError, match=r"keeps the window that it is built with .* 160 tokens"):
            patch_model(model, "yarn", 4, sliding_window=window, original_max_position_embeddings=64)
    with pytest.warns(UserWarning, match=r"config.sliding_window is 160") as caught:
        patch_model(model, "yarn", 4, original_max_position_embeddings=64)
    assert "'off'" not in str(caught[0].message)
    logits(model, IDS)
