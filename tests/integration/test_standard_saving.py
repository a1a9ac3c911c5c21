"""What Trainer, TRL, PEFT and accelerate save of a patched model, read again in processes of their own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from distributed_runs import FSDP2, LAUNCHER
from folders import HELPERS
from hf_posenc import describe, load_extended, unpatch_model
from hf_posenc.checkpoint.manifest import MANIFEST, read_manifest
from hf_posenc.doctor.diagnosis import diagnose
from reload_logits import WITH_US
from sharp_checkpoints import (
    IDS,
    METHODS,
    ORIGINAL,
    TARGET,
    TEXTS,
    by_peft,
    by_trainer,
    five_steps,
    patched_base,
    uploads_to,
)
from tiny_llama import make_tiny_tokenizer
from tiny_models import logits

# TRL's defaults use names that the newest Transformers has others for.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")


def by_trl(base: Path, method: str, folder: Path, *, packing: bool = False, peft_config: Any = None) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**five_steps(folder.parent / "run"), max_length=200, packing=packing, bf16=False)
    trainer = SFTTrainer(
        patched_base(base, method),
        args,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=make_tiny_tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(str(folder))
    return trainer.model


def by_trl_packing(base: Path, method: str, folder: Path) -> Any:
    return by_trl(base, method, folder, packing=True)


def by_trl_lora(base: Path, method: str, folder: Path) -> Any:
    return by_trl(base, method, folder, peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))


def by_merging(base: Path, method: str, folder: Path) -> Any:
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(patched_base(base, method), settings).merge_and_unload()
    model.save_pretrained(folder)
    return model


def by_accelerate(base: Path, method: str, folder: Path) -> Any:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(patched_base(base, method))
    accelerator.save_model(model, folder)
    return accelerator.unwrap_model(model)


def by_pushing(base: Path, method: str, folder: Path) -> Any:
    """save_pretrained(push_to_hub=True), up to the upload itself: there is no Hub here."""
    model = patched_base(base, method)
    with uploads_to(folder) as request:
        kwargs = {"repo_id": "someone/model", "commit_message": "a message"}
        # Of a Path, Transformers 5.0 takes no name to push to.
        model.save_pretrained(str(folder.with_name("pushed")), push_to_hub=True, **kwargs)
    assert request == {"repo_id": "someone/model", "commit_message": "a message"}
    assert (folder.with_name("pushed") / MANIFEST).is_file()
    return model


def test_what_is_pushed_is_what_was_asked_for(base: Path, tmp_path: Path) -> None:
    """It was saved a second time for pushing, without the state_dict and the variant."""
    model = patched_base(base, "yarn")
    weights = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with uploads_to(tmp_path / "uploaded"):
        pushing = {"variant": "zero", "push_to_hub": True, "repo_id": "a/b"}
        model.save_pretrained(str(tmp_path / "model"), state_dict=weights, **pushing)
    uploaded = load_file(tmp_path / "uploaded" / "model.zero.safetensors")
    assert all(not value.any() for value in uploaded.values())
    assert (tmp_path / "uploaded" / MANIFEST).is_file()
    assert "_upload_modified_files" not in vars(model)


WAYS: tuple[Callable[[Path, str, Path], Any], ...] = (
    by_trainer,
    by_trl,
    by_trl_packing,
    by_trl_lora,
    by_peft,
    by_merging,
    by_accelerate,
    by_pushing,
)


ADAPTERS = ("by_trl_lora", "by_peft")
SAVED = [(way.__name__, method) for way in WAYS for method in METHODS]
SAVED += [("by_trainer-checkpoint", method) for method in METHODS]


@dataclass
class Reloaded:
    """What was saved, and the logits of it: live, and of fresh processes without and with hf_posenc imported."""

    root: Path
    live: dict[str, torch.Tensor]
    plain: dict[str, torch.Tensor]
    with_us: dict[str, torch.Tensor]

    def folder(self, way: str, method: str) -> Path:
        return self.root / f"{way}-{method}" / way


@pytest.fixture(scope="module")
def reloaded(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Reloaded:
    root = tmp_path_factory.mktemp("saved")
    found = Reloaded(root, {}, {}, {})
    for way in WAYS:
        for method in METHODS:
            folder = found.folder(way.__name__, method)
            folder.parent.mkdir()
            model = way(base, method, folder)
            found.live[str(folder)] = logits(model.eval(), IDS)
            if (checkpoint := folder.with_name(folder.name + "-checkpoint")).is_dir():
                moved = found.folder(checkpoint.name, method)
                moved.parent.mkdir()
                checkpoint.rename(moved)
                found.live[str(moved)] = found.live[str(folder)]
    save_file({"ids": IDS}, root / "ids.safetensors")
    for out, words in ((found.plain, []), (found.with_us, [WITH_US])):
        script = HELPERS / "reload_logits.py"
        file = root / f"logits{len(words)}.safetensors"  # one each: what is read may still be the file itself
        command = [sys.executable, str(script), str(root / "ids.safetensors"), str(file), *words, *found.live]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        out.update(load_file(file))
        out["stderr"] = done.stderr  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(("way", "method"), SAVED)
def test_what_was_saved_is_read_back(reloaded: Reloaded, way: str, method: str) -> None:
    folder = str(reloaded.folder(way, method))
    live = reloaded.live[folder]
    torch.testing.assert_close(reloaded.with_us[folder], live, rtol=1e-4, atol=1e-4)
    off = (reloaded.plain[folder] - live).abs().max()
    if METHODS[method] == "static" and way not in ADAPTERS:
        assert off < 1e-4
        assert reloaded.plain[f"{folder}.length"] == TARGET
    else:  # no file of plain Transformers or PEFT can say it; at least none claims the length
        assert off > 0.1
        assert reloaded.plain[f"{folder}.length"] == ORIGINAL


@pytest.mark.parametrize(("way", "method"), SAVED)
def test_the_folder_says_what_it_is(reloaded: Reloaded, way: str, method: str) -> None:
    folder = reloaded.folder(way, method)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert (manifest["method"], manifest["context_length"], manifest["original_max_position_embeddings"]) == (
        method,
        TARGET,
        ORIGINAL,
    )
    assert manifest["tokens_trained"] is None  # whoever trained it did not say
    tokenizer = folder / "tokenizer_config.json"
    assert tokenizer.is_file() == (
        way in ("by_trainer", "by_trainer-checkpoint", "by_trl", "by_trl_packing", "by_trl_lora")
    )
    if tokenizer.is_file():
        assert json.loads(tokenizer.read_text())["model_max_length"] == TARGET
    found = diagnose(folder)
    assert found.sound, found.findings
    if way in ADAPTERS:
        assert json.loads((folder / "adapter_config.json").read_text())["context_extension"]["method"] == method
    else:
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_theta"] == 10000.0  # Transformers 4's serialization beside Transformers 5's
        assert "rope_scaling" in config


def test_peft_alone_is_warned_that_something_is_missing(reloaded: Reloaded) -> None:
    assert "['context_extension']" in str(reloaded.plain["stderr"])
    assert "Unexpected keyword arguments" not in str(reloaded.with_us["stderr"])


def test_what_is_put_in_while_loading_is_said(reloaded: Reloaded) -> None:
    said = str(reloaded.with_us["stderr"])
    for way, method in SAVED:
        if METHODS[method] != "static" and way not in ADAPTERS:
            assert f"{reloaded.folder(way, method)}: {method} to {TARGET} tokens" in said
    assert "yarn to" not in str(reloaded.plain["stderr"])


@pytest.mark.filterwarnings("ignore")  # of TRL's own
@pytest.mark.parametrize("method", METHODS)
def test_trl_compares_with_a_reference_that_is_extended_too(base: Path, method: str, tmp_path: Path) -> None:
    """The first loss of DPO is ln 2, as of a model and a reference that agree. The reference was the plain base."""
    from trl import DPOConfig, DPOTrainer

    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    rows = {
        "prompt": [text[:150] for text in TEXTS[:8]],  # past the original length
        "chosen": [text[:50] for text in TEXTS[8:16]],
        "rejected": [text[:50] for text in TEXTS[16:]],
    }
    args = DPOConfig(**five_steps(tmp_path, max_steps=1, logging_steps=1), max_length=256, bf16=False)
    model = patched_base(base, method)
    before = logits(model.eval(), IDS)
    trainer = DPOTrainer(model, args=args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer)
    assert describe(trainer.ref_model) == describe(model)
    torch.testing.assert_close(logits(trainer.ref_model.eval(), IDS), before, rtol=1e-5, atol=1e-5)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_trl_loads_all_other_models_as_they_are(base: Path) -> None:
    from trl.trainer.utils import create_model_from_path, get_config_model_id

    model = patched_base(base, "yarn")
    name = get_config_model_id(model.config)
    assert name == str(base)
    assert describe(create_model_from_path(str(base)))["method"] == "none"
    assert describe(create_model_from_path(name))["method"] == "yarn"
    plain = get_config_model_id(unpatch_model(model).config)
    assert describe(create_model_from_path(plain))["method"] == "none"


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", ["", "2", "3"], ids=["fsdp2", "zero2", "zero3"])
def test_trainer_saves_what_it_sharded(base: Path, method: str, stage: str, tmp_path: Path) -> None:
    """Two processes train under FSDP2 or DeepSpeed, and Trainer saves: one writes, and writes the extension."""
    program = str(HELPERS / "trainer_of_several.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if stage:
        pytest.importorskip("deepspeed")
        environment["DS_ACCELERATOR"] = "cpu"
    else:
        environment |= FSDP2
    command = [*LAUNCHER, program, str(base), method, str(tmp_path), *([stage] if stage else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    assert diagnose(tmp_path / "model").sound
    loaded = load_extended(tmp_path / "model")
    expected = patched_base(base, method)
    untrained = logits(expected.eval(), IDS)
    expected.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=False)  # tied weights
    torch.testing.assert_close(logits(loaded.eval(), IDS), logits(expected, IDS), rtol=1e-5, atol=1e-5)
    assert (logits(loaded, IDS) - untrained).abs().max() > 1e-2
