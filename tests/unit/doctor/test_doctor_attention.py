"""The doctor on rules that no config can say: folders whose manifest carries them, and models that run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from attention_models import IDS, sharp_model
from doctor_configs import edit_config
from hf_posenc import load_extended, patch_model, save_extended
from hf_posenc.cli.main import main
from hf_posenc.doctor import diagnose, write_mended
from tiny_models import logits, make_model
from tiny_runs import make_tokenizer

RULES = ("dynamic", "dynamic_yarn", "self_extend", "dca", "rerope", "leaky_rerope")


def saved(folder: Path, method: str = "dynamic_yarn", family: str = "Llama") -> Path:
    model = patch_model(make_model(family), method, 4)
    return save_extended(model, folder, make_tokenizer())


@pytest.mark.parametrize("method", RULES)
def test_a_folder_of_ours_is_sound_and_says_who_runs_the_rule(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "model", method)
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 256
    assert main(["doctor", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert f"manifest   {method} x4, 64 -> 256 tokens: the rule is in context_extension.json" in shown
    assert "with it    load_extended, hf-posenc eval and hf-posenc finetune run the rule" in shown
    assert "without    Transformers 4.57, 5.0, 5.23 and servers read the base model" in shown
    assert "5.23 loads no scaling, rope_theta 10000" in shown
    assert diagnose(folder).findings == ()


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Phi3", "Gemma2", "GPTNeoX"])
def test_other_families_are_sound(family: str, tmp_path: Path) -> None:
    model = patch_model(sharp_model(family), "dynamic_yarn", 4)
    folder = save_extended(model, tmp_path / "model")
    assert [finding for finding in diagnose(folder).findings if finding.severity != "note"] == []


@pytest.mark.parametrize(
    ("changes", "code", "what"),
    [
        ({"max_position_embeddings": 256}, "base-enlarged", "says 256 tokens, and was saved with the base model's 64"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "rope_scaling": None},
            "base-rescaled",
            "declares linear x4",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 5e5},
            "base-rescaled",
            "declares no scaling, rope_theta 500000, and was saved with no scaling, rope_theta 10000",
        ),
    ],
)
def test_a_config_that_was_changed_is_found_and_mended(
    changes: dict[str, object], code: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = patch_model(sharp_model("Llama"), "dynamic_yarn", 8)
    folder = save_extended(model, tmp_path / "model")
    expected = logits(model, IDS)
    before = json.loads((folder / "config.json").read_text())
    edit_config(folder, **changes)
    (found,) = [finding for finding in diagnose(folder).findings if finding.code.startswith("base-")]
    assert (found.code, found.severity) == (code, "error")
    assert what in found.what
    assert main(["doctor", str(folder)]) == 1
    write_mended(diagnose(folder), folder)
    assert diagnose(folder).findings == ()
    after = json.loads((folder / "config.json").read_text())
    assert {key: after[key] for key in before} == before
    assert torch.equal(logits(load_extended(folder).eval(), IDS), expected)


def test_a_scaled_base_is_not_taken_for_an_edit(tmp_path: Path) -> None:
    yarn = save_extended(patch_model(make_model("Llama"), "yarn", 2), tmp_path / "yarn")
    base = AutoModelForCausalLM.from_pretrained(yarn)
    folder = save_extended(patch_model(base, "dynamic_yarn", 4, on_scaled="replace"), tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_type"] == "yarn"
    assert diagnose(folder).sound
    edit_config(folder, max_position_embeddings=256)
    assert not diagnose(folder).sound


def test_a_tokenizer_that_cuts_is_found(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 64}))
    (found,) = diagnose(folder).findings
    assert found.code == "tokenizer-limit"
    assert "is 64, the manifest's target 256" in found.what


def test_live_looks_at_the_base_model(tmp_path: Path) -> None:
    diagnosis = diagnose(saved(tmp_path / "model"), live=True)
    assert diagnosis.sound
    loaded = dict(diagnosis.lines)["loaded"]
    assert "8 pairs in model.rotary_emb, 1 to 0.0003162 radians per token" in loaded


@pytest.mark.parametrize("method", RULES)
def test_a_live_model_says_that_its_attention_rotates_further(method: str) -> None:
    model: PreTrainedModel = patch_model(make_model("Llama"), method, 4)
    diagnosis = diagnose(model)
    lines = dict(diagnosis.lines)
    assert diagnosis.findings == ()
    assert f"method {method}, factor 4.0" in lines["declared"]
    assert lines["loaded"].startswith("8 pairs in model.rotary_emb, 1 to 0.0003162 radians per token, float32;")
    assert lines["loaded"].endswith(
        "the attention rotates queries and keys further as the rule says, and then calls sdpa"
    )
    assert lines["holds"] == "the rule, in every attention layer; saved, it is in the manifest alone"


def test_a_live_model_that_lost_its_rule_is_found() -> None:
    model = patch_model(make_model("Llama"), "dynamic_yarn", 4)
    model.model.rotary_emb.inv_freq.fill_(1.0)
    (found,) = diagnose(model).findings
    assert found.code == "not-what-it-says"
    assert "by other frequencies than the model's, which the attention counts on" in found.what
    other = patch_model(make_model("Llama"), "dynamic_yarn", 4)
    other.set_attn_implementation("eager")
    (found,) = diagnose(other).findings
    assert "the attention implementation is 'eager'" in found.what


def test_a_tokenizers_limit_is_raised_to_the_manifests_target(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 128}))
    target = json.loads((folder / "context_extension.json").read_text())["context_length"]
    write_mended(diagnose(folder), folder)
    assert json.loads(file.read_text())["model_max_length"] == target > 128
    assert diagnose(folder).sound
