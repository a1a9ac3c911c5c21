"""Adapters of patched models, and models on the Hub: what is put in, what is refused, and what the doctor says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
)

from hf_posenc import describe, load_extended, patch_model, save_extended
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.checkpoint.manifest import MANIFEST
from hf_posenc.checkpoint.pretrained import check_may_read
from hf_posenc.doctor.diagnosis import diagnose
from hf_posenc.errors import HubUnreachableError
from sharp_checkpoints import (
    FACTOR,
    IDS,
    METHODS,
    TARGET,
    by_peft,
    patched_base,
)
from tiny_llama import make_tiny_tokenizer
from tiny_models import logits

# TRL's defaults use names that the newest Transformers has others for.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")


@pytest.mark.parametrize("way", ["peft", "transformers"])
def test_an_adapter_loaded_onto_a_model_extends_it(base: Path, way: str, tmp_path: Path) -> None:
    tuned = by_peft(base, "yarn", tmp_path / "adapter").eval()
    plain: Any = AutoModelForCausalLM.from_pretrained(base)
    if way == "peft":
        settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
        plain = get_peft_model(plain, settings, adapter_name="first")
        plain.load_adapter(str(tmp_path / "adapter"), "second")
        plain.set_adapter("second")
    else:
        plain.load_adapter(str(tmp_path / "adapter"))
    assert describe(plain)["method"] == "yarn"
    torch.testing.assert_close(logits(plain.eval(), IDS), logits(tuned, IDS), rtol=1e-5, atol=1e-5)


def test_accelerate_warns_of_adapters(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    Accelerator(cpu=True).save_model(get_peft_model(patched_base(base, "yarn"), settings), tmp_path)
    assert "its extension" in caplog.text
    assert not (tmp_path / MANIFEST).exists()


def test_an_adapter_does_not_go_onto_another_rule(base: Path, tmp_path: Path) -> None:
    by_peft(base, "yarn", tmp_path / "adapter")
    other = patched_base(base, "linear")
    with pytest.raises(ValueError, match=r"'linear',.*'yarn'"):
        PeftModel.from_pretrained(other, str(tmp_path / "adapter"))


def test_transformers_own_adapters(base: Path, tmp_path: Path) -> None:
    """from_pretrained on an adapter's folder, and add_adapter with save_pretrained."""
    model = patched_base(base, "yarn")
    model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert describe(again) == describe(model)
    torch.testing.assert_close(logits(again, IDS), logits(model.eval(), IDS), rtol=1e-5, atol=1e-5)
    save_extended(model, tmp_path / "extended")
    loaded = load_extended(tmp_path / "extended")
    torch.testing.assert_close(logits(loaded.eval(), IDS), logits(model.eval(), IDS), rtol=1e-5, atol=1e-5)


def test_doctor_on_an_adapter_without_a_manifest(base: Path, tmp_path: Path) -> None:
    by_peft(base, "yarn", tmp_path)
    (tmp_path / MANIFEST).unlink()
    found = diagnose(tmp_path)
    assert not found.sound  # adapter_config.json still says what it was trained on
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    del config["context_extension"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = diagnose(tmp_path)
    assert found.sound
    assert "cannot be known" in " ".join(f"{finding.what} {finding.why}" for finding in found.findings)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": TARGET}))
    found = diagnose(tmp_path)  # trained on 256 tokens, with a base of 64
    assert not found.sound
    assert any(finding.code == "adapter-without-extension" for finding in found.findings)


@pytest.mark.parametrize("written", ["[1", "[]"])
def test_damaged_settings_of_an_adapter_are_named(written: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(written)
    for look in (diagnose, describe, load_model):
        with pytest.raises(ValueError, match=r"adapter_config\.json' (is not JSON|holds no JSON object)"):
            look(tmp_path)


def in_the_cache(folder: Path, cache: Path, name: str) -> Path:
    """Put a folder where huggingface_hub keeps what it downloaded of a model."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    return snapshot


@pytest.mark.parametrize("method", METHODS)
def test_a_model_on_the_hub_is_found_extended(
    base: Path, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the cache of the Hub, by name: only from_pretrained looked there."""
    model = patched_base(base, method)
    expected = logits(model.eval(), IDS)
    save_extended(model, tmp_path / "model", make_tiny_tokenizer())
    in_the_cache(tmp_path / "model", tmp_path / "cache", "someone/model")
    by_peft(base, method, tmp_path / "adapter")
    in_the_cache(tmp_path / "adapter", tmp_path / "cache", "someone/adapter")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("someone/model", "someone/adapter"):
        assert describe(name)["method"] == method
        assert diagnose(name).sound
        assert describe(load_extended(name))["method"] == method
    for loaded in (load_extended("someone/model"), load_model("someone/model", dtype="float32")[0]):
        torch.testing.assert_close(logits(loaded.eval(), IDS), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(HubUnreachableError, match="'someone/other'"):
        load_extended("someone/other")


def test_an_adapter_is_found_in_another_cache(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_peft(base, "yarn", tmp_path / "adapter")
    in_the_cache(tmp_path / "adapter", tmp_path / "cache", "someone/adapter")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert describe(load_extended("someone/adapter", cache_dir=tmp_path / "cache"))["method"] == "yarn"


def test_an_adapter_takes_the_revision_of_its_base(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_peft(base, "yarn", tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    settings |= {"base_model_name_or_path": "someone/base", "revision": "v1"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    asked: list[tuple[str, Any]] = []

    def load(source: str, **kwargs: Any) -> Any:
        asked.append((source, kwargs.get("revision")))
        return AutoModelForCausalLM.from_pretrained(base)

    monkeypatch.setattr("hf_posenc.checkpoint.extended.load_weights", load)
    monkeypatch.setattr("hf_posenc.checkpoint.extended.is_saved_by_us", lambda source: False)
    assert describe(load_extended(tmp_path))["method"] == "yarn"
    assert asked == [("someone/base", "v1")]


def test_a_cached_adapter_needs_no_hub(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_peft(base, "yarn", tmp_path / "adapter")
    in_the_cache(tmp_path / "adapter", tmp_path / "cache", "someone/adapter")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *args, **kwargs: pytest.fail("it was asked"))
    check_may_read("someone/adapter", {})


def test_a_merged_model_in_the_folder_of_its_adapter_is_a_model(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = by_peft(base, "yarn", tmp_path)
    model.merge_and_unload().save_pretrained(tmp_path)
    assert "there before" in caplog.text
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]["factor"]) == (10000.0, FACTOR)
    (tmp_path / "adapter_config.json").unlink()
    assert describe(load_extended(tmp_path))["method"] == "yarn"


@pytest.mark.parametrize("task", ["QUESTION_ANS", "FEATURE_EXTRACTION"])
def test_adapters_of_other_tasks_come_back_as_they_were(base: Path, task: str, tmp_path: Path) -> None:
    auto = {"QUESTION_ANS": AutoModelForQuestionAnswering, "FEATURE_EXTRACTION": AutoModel}[task]
    auto.from_pretrained(base).save_pretrained(tmp_path / "base")  # its head, and for answers its decoder, is drawn
    model = patch_model(auto.from_pretrained(tmp_path / "base"), "yarn", FACTOR)
    settings = LoraConfig(task_type=task, target_modules=["q_proj"], init_lora_weights=False)
    tuned: Any = get_peft_model(model, settings)
    tuned.save_pretrained(str(tmp_path / "adapter"))
    again = load_extended(tmp_path / "adapter")
    assert type(again) is type(tuned)
    assert type(again.get_base_model()) is type(model)
    hidden = (one.eval()(IDS, output_hidden_states=True).hidden_states[-1] for one in (tuned, again))
    torch.testing.assert_close(*hidden, rtol=1e-5, atol=1e-5)


def test_a_plain_adapter_on_an_extended_base_is_reported(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(str(tmp_path))
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path))
    assert "the adapter does not say" not in caplog.text
    PeftModel.from_pretrained(patched_base(base, "yarn"), str(tmp_path))
    assert "adapter does" in caplog.text
