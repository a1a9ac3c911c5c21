"""Patched models saved and loaded in one process: copies, hooks, damage, models saved over others."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from hf_posenc import describe, load_extended, patch_model, save_extended, unpatch_model
from hf_posenc.checkpoint.manifest import MANIFEST, read_manifest
from hf_posenc.checkpoint.plain_loading import plain_loading
from hf_posenc.doctor.diagnosis import diagnose
from sharp_checkpoints import (
    FACTOR,
    IDS,
    METHODS,
    ORIGINAL,
    TARGET,
    TEXTS,
    by_trainer,
    five_steps,
    patched_base,
    sharp_llama,
)
from tiny_llama import make_tiny_tokenizer
from tiny_models import logits

# TRL's defaults use names that the newest Transformers has others for.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")


@pytest.mark.parametrize("method", METHODS)
def test_save_extended_writes_the_same(base: Path, method: str, tmp_path: Path) -> None:
    model = patched_base(base, method)
    model.save_pretrained(tmp_path / "standard")
    save_extended(model, tmp_path / "ours")
    for name in ("config.json", MANIFEST):
        ours, standard = (json.loads((tmp_path / way / name).read_text()) for way in ("ours", "standard"))
        assert {**standard, "tokens_trained": 0} == {**ours, "tokens_trained": 0}


@pytest.mark.parametrize("method", METHODS)
def test_a_second_rule_counts_from_the_original_length(base: Path, method: str, tmp_path: Path) -> None:
    """The third row of the issue: it counted from the target, 1024 to 4096 for 256 to 1024."""
    patched_base(base, method).save_pretrained(tmp_path / "saved")
    with plain_loading():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    patch_model(again, "yarn", FACTOR, on_scaled="replace")
    assert describe(again)["original_max_position_embeddings"] == ORIGINAL
    assert describe(again)["context_length"] == TARGET


@pytest.mark.parametrize("method", METHODS)
def test_a_config_saved_alone_does_not_hide_the_rule(base: Path, method: str, tmp_path: Path) -> None:
    model = patched_base(base, method)
    model.config.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["context_extension"]
    assert (said["method"], said["original_max_position_embeddings"]) == (method, ORIGINAL)


def test_unpatched_it_saves_as_any_model(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "before")
    unpatch_model(patch_model(model, "dynamic_yarn", FACTOR))
    model.save_pretrained(tmp_path / "after")
    assert sorted(file.name for file in (tmp_path / "after").iterdir()) == sorted(
        file.name for file in (tmp_path / "before").iterdir()
    )
    assert (tmp_path / "after" / "config.json").read_text() == (tmp_path / "before" / "config.json").read_text()
    assert "save_pretrained" not in vars(model)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_saves_itself(base: Path, copied: Callable[[Any], Any], tmp_path: Path) -> None:
    model = patched_base(base, "yarn")
    other = copied(model)
    with torch.no_grad():
        other.model.norm.weight.fill_(2.0)
    other.save_pretrained(tmp_path)
    again = load_extended(tmp_path)
    assert torch.equal(again.model.norm.weight, torch.full_like(again.model.norm.weight, 2.0))
    assert describe(again) == describe(model)
    unpatch_model(other)
    assert describe(model)["method"] == "yarn"
    assert "save_pretrained" in vars(model)


def test_trainer_resumes_from_its_checkpoint(base: Path, tmp_path: Path) -> None:
    """Transformers reads a checkpoint's config as one of no family, which fails on both serializations of yarn."""
    by_trainer(base, "yarn", tmp_path / "model")
    args = TrainingArguments(**five_steps(tmp_path / "run", max_steps=6))
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    rows = Dataset.from_list([dict(tokenizer(text, truncation=True, max_length=200)) for text in TEXTS])
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(patched_base(base, "yarn"), args, train_dataset=rows, data_collator=collator)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert trainer.state.global_step == 6


def test_another_process_writes_nothing(base: Path, tmp_path: Path) -> None:
    patched_base(base, "yarn").save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / MANIFEST).exists()


def test_what_cannot_be_said_is_warned_about(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = patched_base(base, "yarn")
    model.model.rotary_emb.inv_freq.mul_(1.1)
    model.save_pretrained(tmp_path)
    assert "WITHOUT" in caplog.text
    assert f"save_extended(model, {str(tmp_path)!r})" in caplog.text
    assert not (tmp_path / MANIFEST).exists()
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("written", "message"),
    [("{not JSON", "is damaged"), ('{"format": 99}', "written by a newer hf_posenc")],
)
def test_a_manifest_that_cannot_be_read_does_not_stop_loading(
    base: Path, written: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patched_base(base, "yarn").save_pretrained(tmp_path)
    (tmp_path / MANIFEST).write_text(written)
    assert describe(AutoModelForCausalLM.from_pretrained(tmp_path))["method"] == "yarn"  # its config says so too
    assert message in caplog.text
    with pytest.raises(ValueError, match=message):
        load_extended(tmp_path)


def test_a_rule_that_cannot_be_put_in_is_reported_while_loading(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patched_base(base, "dynamic_yarn").save_pretrained(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "context_length": 1, "format": 1}))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert describe(plain)["method"] == "none"
    assert "context_extension.json" in caplog.text
    assert not diagnose(plain).sound


def test_loading_by_keyword(base: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert type(type(plain).from_pretrained(pretrained_model_name_or_path=str(base))) is type(plain)


def test_the_limit_that_the_bases_own_tokenizer_has_is_no_sign_of_an_extension(base: Path, tmp_path: Path) -> None:
    """Qwen2.5's tokenizers say 131072, and its models 32768."""
    shutil.copytree(base, tmp_path / "base")
    settings = json.loads((tmp_path / "base" / "tokenizer_config.json").read_text())
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": TARGET}))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(str(tmp_path / "adapter"))
    shutil.copy(tmp_path / "base" / "tokenizer_config.json", tmp_path / "adapter")
    assert diagnose(tmp_path / "adapter").sound


def test_doctor_fails_a_model_that_was_loaded_without_its_rule(base: Path, tmp_path: Path) -> None:
    patched_base(base, "dynamic_yarn").save_pretrained(tmp_path)
    with plain_loading():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = diagnose(plain)
    assert not found.sound
    assert any(finding.code == "extension-not-applied" for finding in found.findings)
    assert diagnose(load_extended(tmp_path)).sound


def test_a_manifest_that_another_model_was_saved_over_is_not_applied(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    patched_base(base, "dynamic_yarn").save_pretrained(folder)
    sharp_llama().save_pretrained(folder)
    assert describe(AutoModelForCausalLM.from_pretrained(folder))["method"] == "none"
    assert "another model" in caplog.text
    with pytest.raises(ValueError, match="another model"):
        load_extended(folder)
    (found,) = diagnose(folder).findings
    assert (found.code, found.severity) == ("manifest-refused", "error")
    assert "--fix" not in found.todo  # which cannot mend it


@pytest.mark.parametrize("method", METHODS)
def test_a_decoder_saved_without_its_head_says_what_it_lacks(
    base: Path, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patched_base(base, method).model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    codes = {finding.code for finding in diagnose(tmp_path).findings}
    if METHODS[method] == "static":
        assert describe(loaded)["method"] == method
        assert "manifest-lost" not in codes
    else:
        assert describe(loaded)["method"] == "none"
        assert describe(loaded)["original_max_position_embeddings"] == ORIGINAL
        assert f"{method}" in caplog.text
        assert "manifest-lost" in codes


@pytest.mark.parametrize(
    ("mark", "severity"),
    [
        ("of another program", None),
        ({"method": "yarn"}, None),
        ({"method": "of_the_future", "factor": 4.0, "options": {}, "original_max_position_embeddings": 64}, "error"),
    ],
)
def test_a_mark_that_cannot_be_read_does_not_stop_loading(
    base: Path, mark: Any, severity: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """from_pretrained and doctor fell over it, with a KeyError."""
    shutil.copytree(base, tmp_path / "model")
    if severity is not None:
        mark = {**mark, "context_length": 256}
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "context_extension": mark}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(logits(loaded.eval(), IDS), logits(plain.eval(), IDS))
    found = diagnose(tmp_path / "model")
    if severity is None:
        assert found.sound
        assert describe(loaded) == describe(loaded.config) == describe(plain)
    else:
        assert "'of_the_future'," in caplog.text
        assert [(finding.code, finding.severity) for finding in found.findings] == [("unknown-extension", severity)]
        with pytest.raises(ValueError, match="hf_posenc"):
            patch_model(loaded, "yarn", 2)


def test_a_model_built_from_the_config_of_a_patched_one_says_what_it_lacks(base: Path) -> None:
    """It failed in its first forward with a KeyError of ours."""
    patched = patched_base(base, "dynamic_yarn").eval()
    other = AutoModelForCausalLM.from_pretrained(base, config=patched.config).eval()
    with pytest.raises(RuntimeError, match=r"set_attn_implementation\('sdpa'\)"):
        logits(other, IDS)
    other.set_attn_implementation("sdpa")
    patch_model(other, "dynamic_yarn", FACTOR)
    assert describe(other) == describe(patched)
    torch.testing.assert_close(logits(other, IDS), logits(patched, IDS))


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(FileNotFoundError, match=r"'\./nowhere'"):
        describe("./nowhere")


@pytest.mark.parametrize("method", METHODS)
def test_loaded_extended_it_is_saved_extended(base: Path, method: str, tmp_path: Path) -> None:
    save_extended(patched_base(base, method), tmp_path / "first", tokens_trained=1000, base_model="someone/base")
    for number, load in enumerate((load_extended, AutoModelForCausalLM.from_pretrained)):
        again: Any = load(tmp_path / "first")
        again.save_pretrained(tmp_path / f"again{number}")
        manifest = read_manifest(tmp_path / f"again{number}")
        assert manifest is not None
        assert (manifest["method"], manifest["base_model"]) == (method, "someone/base")
        assert manifest["tokens_trained"] is None  # whether it was trained on since is not known
        first, second = (
            json.loads((tmp_path / one / "config.json").read_text()) for one in ("first", f"again{number}")
        )
        assert second == first
        settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
        get_peft_model(again, settings).save_pretrained(str(tmp_path / f"adapter{number}"))
        assert describe(tmp_path / f"adapter{number}")["method"] == method


def test_a_patch_that_is_undone_leaves_a_loaded_extension(base: Path, tmp_path: Path) -> None:
    save_extended(patched_base(base, "yarn"), tmp_path / "yarn")
    model = load_extended(tmp_path / "yarn")
    unpatch_model(patch_model(model, "linear", 2, on_scaled="replace"))
    model.save_pretrained(tmp_path / "again")
    assert describe(tmp_path / "again")["method"] == "yarn"
