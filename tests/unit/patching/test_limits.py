"""The limits beside max_position_embeddings: keys that servers read, and what ``generate`` refuses a prompt by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from doctor_configs import edit_config
from hf_posenc import diagnose, extend_config, load_extended, patch_model, save_extended, unpatch_model
from hf_posenc.errors import InvalidRequestError
from hf_posenc.exports import export_command
from hf_posenc.patching.lengths import LENGTH_KEYS
from tiny_models import make_model
from tiny_runs import make_tokenizer

PROMPT = torch.arange(100)[None] % 59 + 1  # 0 is padding
OTHERS = [key for key in LENGTH_KEYS if key != "max_position_embeddings"]


@pytest.mark.parametrize("method", ["ntk", "yarn", "llama3", "linear"])
@pytest.mark.parametrize("key", OTHERS)
def test_a_length_key_of_other_programs_is_raised_and_put_back(key: str, method: str, tmp_path: Path) -> None:
    model = make_model("Llama")
    setattr(model.config, key, 64)
    patch_model(model, method, 4)
    assert getattr(model.config, key) == 256
    save_extended(model, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())[key] == 256
    assert getattr(extend_config(make_model("Llama", **{key: 64}).config, method, 4), key) == 256
    unpatch_model(model)
    assert (getattr(model.config, key), model.config.max_position_embeddings) == (64, 64)


def test_a_length_key_above_the_target_stays() -> None:
    model = make_model("Llama")
    model.config.max_seq_len = 1000
    patch_model(model, "yarn", 4, original_max_position_embeddings=64)
    assert model.config.max_seq_len == 1000


def test_a_length_key_that_was_lowered_after_saving_is_found_and_not_exported(tmp_path: Path) -> None:
    folder = save_extended(patch_model(make_model("Llama"), "yarn", 4), tmp_path / "model", make_tokenizer())
    export_command(folder, "vllm")
    edit_config(folder, max_sequence_length=64)
    (finding,) = [finding for finding in diagnose(folder).findings if finding.code == "length-key-below-target"]
    assert finding.severity == "warning"
    with pytest.raises(InvalidRequestError, match="max_sequence_length 64"):
        export_command(folder, "vllm")


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn"])
def test_generate_takes_a_prompt_past_the_former_limit(method: str, tmp_path: Path) -> None:
    model = make_model("Llama")
    model.generation_config = GenerationConfig(max_length=64, pad_token_id=0)
    with pytest.raises(ValueError, match="max_length"):
        model.generate(PROMPT)
    patch_model(model, method, 4)
    assert model.generate(PROMPT).shape[1] > 100
    save_extended(model, tmp_path / "model")
    load = load_extended if method == "dynamic_yarn" else AutoModelForCausalLM.from_pretrained
    assert load(tmp_path / "model").generation_config.max_length == 256
    unpatch_model(model)
    assert model.generation_config.max_length == 64


@pytest.mark.parametrize("limit", [20, 300, None])
def test_other_limits_of_generate_stay(limit: int | None) -> None:
    model = make_model("Llama")
    model.generation_config.max_length = limit
    patch_model(model, "yarn", 4)
    assert model.generation_config.max_length == limit
