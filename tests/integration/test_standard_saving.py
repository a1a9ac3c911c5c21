"""What Trainer, TRL, PEFT and accelerate save of a patched model, read again in processes of their own."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    modeling_utils,
)

from distributed_runs import FSDP2, LAUNCHER
from folders import HELPERS
from hf_posenc import describe, load_extended, patch_model, save_extended, unpatch_model
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.checkpoint.manifest import MANIFEST, read_manifest
from hf_posenc.checkpoint.standard_saving import plain_loading
from hf_posenc.doctor.checkup import diagnose
from reload_logits import WITH_US
from tiny_llama import make_tiny_llama, make_tiny_tokenizer
from tiny_models import logits

# TRL's defaults use names that the newest Transformers has others for.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")

ORIGINAL, FACTOR = 64, 4
TARGET = ORIGINAL * FACTOR
IDS = torch.arange(200)[None] * 7 % 90 + 2  # past the original length, where a lost extension shows
METHODS = {"yarn": "static", "dynamic_yarn": "staged", "dca": "distance"}
TEXTS = [" ".join(f"word {number} follows {number - 1}." for number in range(start, start + 30)) for start in range(24)]


def sharp_llama() -> PreTrainedModel:
    """The tiny Llama with an attention that is not nearly uniform, so that positions are felt."""
    model = make_tiny_llama(tie_word_embeddings=True)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    sharp_llama().save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def patched_base(base: Path, method: str) -> Any:
    return patch_model(AutoModelForCausalLM.from_pretrained(base), method, FACTOR)


def five_steps(output_dir: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **more,
    }


def by_trainer(base: Path, method: str, folder: Path) -> Any:
    """Trainer, whose last checkpoint is a folder of its own too."""
    model, tokenizer = patched_base(base, method), make_tiny_tokenizer()
    rows = Dataset.from_list([dict(tokenizer(text, truncation=True, max_length=200)) for text in TEXTS])
    tokenizer.pad_token = tokenizer.eos_token
    trainer = Trainer(
        model,
        TrainingArguments(**five_steps(folder.parent / "run", save_strategy="steps", save_steps=5)),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(folder))
    shutil.copytree(folder.parent / "run" / "checkpoint-5", folder.with_name(folder.name + "-checkpoint"))
    return model


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


def by_peft(base: Path, method: str, folder: Path) -> Any:
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(patched_base(base, method), settings)
    model.save_pretrained(str(folder))
    return model


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
    with uploads_to(folder) as told:
        kwargs = {"repo_id": "someone/model", "commit_message": "a message"}
        # Of a Path, Transformers 5.0 takes no name to push to.
        model.save_pretrained(str(folder.with_name("pushed")), push_to_hub=True, **kwargs)
    assert told == {"repo_id": "someone/model", "commit_message": "a message"}
    assert (folder.with_name("pushed") / MANIFEST).is_file()
    return model


@contextmanager
def uploads_to(folder: Path) -> Iterator[dict[str, Any]]:
    """Run Transformers' own pushing up to its requests to the Hub; what it would upload is copied to a folder."""
    told: dict[str, Any] = {}

    def create_repo(repo_id: str, **kwargs: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id)

    def upload(model: Any, working_dir: Any, repo_id: str, files_timestamps: Any, **kwargs: Any) -> None:
        told.update(repo_id=repo_id, commit_message=kwargs["commit_message"])
        shutil.copytree(working_dir, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedModel, "_upload_modified_files", upload)
        patch.setattr(modeling_utils, "create_and_tag_model_card", lambda *args, **kwargs: ModelCard("# A model"))
        patch.setattr(modeling_utils, "hf_api", lambda: SimpleNamespace(create_repo=create_repo), raising=False)
        patch.setattr(modeling_utils, "create_repo", create_repo, raising=False)  # Transformers 5.0
        yield told


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


one_process = pytest.mark.xdist_group("standard_saving")  # those of the fixture that takes half a minute


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


@one_process
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


@one_process
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


@one_process
def test_peft_alone_is_told_that_something_is_missing(reloaded: Reloaded) -> None:
    assert "Unexpected keyword arguments ['context_extension']" in str(reloaded.plain["stderr"])
    assert "Unexpected keyword arguments" not in str(reloaded.with_us["stderr"])


@one_process
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
    assert (type(name), name) == (str, str(base))
    assert describe(create_model_from_path(str(base)))["method"] == "none"
    assert describe(create_model_from_path(name))["method"] == "yarn"
    plain = get_config_model_id(unpatch_model(model).config)
    assert describe(create_model_from_path(plain))["method"] == "none"


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
    assert "saved WITHOUT its extension" in caplog.text
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


def test_a_rule_that_cannot_be_put_in_is_told_while_loading(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patched_base(base, "dynamic_yarn").save_pretrained(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "context_length": 1, "format": 1}))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert describe(plain)["method"] == "none"
    assert "dynamic_yarn, which context_extension.json says, was NOT put in" in caplog.text
    assert not diagnose(plain).sound


def test_loading_by_keyword(base: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert type(type(plain).from_pretrained(pretrained_model_name_or_path=str(base))) is type(plain)


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


_HOOKED = """
import importlib, importlib.util, sys
from pathlib import Path
from hf_posenc.utils.import_hooks import when_imported
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
(folder / "somewhere.py").write_text("raise RuntimeError('not yet')")
called = []
when_imported("somewhere", called.append)
assert importlib.util.find_spec("somewhere") is not None
try:
    import somewhere
except RuntimeError:
    pass
assert called == []
(folder / "somewhere.py").write_text("value = 'something else by now'")
importlib.invalidate_caches()
import somewhere
assert called == [somewhere] and somewhere.value
when_imported("somewhere", called.append)
assert called == [somewhere, somewhere]
"""


def test_a_hook_waits_for_the_import_itself(tmp_path: Path) -> None:
    """Looking for a module, or an import that fails, does not use it up."""
    words = [sys.executable, "-B", "-c", _HOOKED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_limit_that_the_bases_own_tokenizer_has_is_no_sign_of_an_extension(base: Path, tmp_path: Path) -> None:
    """Qwen2.5's tokenizers say 131072, and its models 32768."""
    shutil.copytree(base, tmp_path / "base")
    settings = json.loads((tmp_path / "base" / "tokenizer_config.json").read_text())
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": TARGET}))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(str(tmp_path / "adapter"))
    shutil.copy(tmp_path / "base" / "tokenizer_config.json", tmp_path / "adapter")
    assert diagnose(tmp_path / "adapter").sound


def test_accelerate_warns_of_adapters(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    Accelerator(cpu=True).save_model(get_peft_model(patched_base(base, "yarn"), settings), tmp_path)
    assert "without its extension" in caplog.text
    assert not (tmp_path / MANIFEST).exists()


def test_an_adapter_does_not_go_onto_another_rule(base: Path, tmp_path: Path) -> None:
    by_peft(base, "yarn", tmp_path / "adapter")
    other = patched_base(base, "linear")
    with pytest.raises(ValueError, match="method is 'linear', the manifest says 'yarn'"):
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


def test_doctor_fails_a_model_that_was_loaded_without_its_rule(base: Path, tmp_path: Path) -> None:
    patched_base(base, "dynamic_yarn").save_pretrained(tmp_path)
    with plain_loading():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = diagnose(plain)
    assert not found.sound
    assert any(finding.code == "extension-not-applied" for finding in found.findings)
    assert diagnose(load_extended(tmp_path)).sound


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


def test_a_manifest_that_another_model_was_saved_over_is_not_applied(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    patched_base(base, "dynamic_yarn").save_pretrained(folder)
    sharp_llama().save_pretrained(folder)
    assert describe(AutoModelForCausalLM.from_pretrained(folder))["method"] == "none"
    assert "another model was saved into the folder since" in caplog.text
    with pytest.raises(ValueError, match="another model was saved into the folder since"):
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
        assert f"extended by {method} to {TARGET} tokens" in caplog.text
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
        assert "extended by 'of_the_future', which this hf_posenc cannot read" in caplog.text
        assert [(one.code, one.severity) for one in found.findings] == [("unknown-extension", severity)]
        with pytest.raises(ValueError, match="which this hf_posenc cannot read"):
            patch_model(loaded, "yarn", 2)


def test_a_model_built_from_the_config_of_a_patched_one_says_what_it_lacks(base: Path) -> None:
    """It failed in its first forward with a KeyError of ours."""
    patched = patched_base(base, "dynamic_yarn").eval()
    other = AutoModelForCausalLM.from_pretrained(base, config=patched.config).eval()
    with pytest.raises(RuntimeError, match=r"from the config of a patched model.*set_attn_implementation\('sdpa'\)"):
        logits(other, IDS)
    other.set_attn_implementation("sdpa")
    patch_model(other, "dynamic_yarn", FACTOR)
    assert describe(other) == describe(patched)
    torch.testing.assert_close(logits(other, IDS), logits(patched, IDS))


@pytest.mark.parametrize("written", ["[1", "[]"])
def test_damaged_settings_of_an_adapter_are_named(written: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(written)
    for look in (diagnose, describe, load_model):
        with pytest.raises(ValueError, match=r"adapter_config\.json' (is not JSON|is no config|holds a list)"):
            look(tmp_path)


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder '\./nowhere'"):
        describe("./nowhere")


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
    with pytest.raises(FileNotFoundError, match=r"someone/other has no context_extension\.json"):
        load_extended("someone/other")


def test_a_merged_model_in_the_folder_of_its_adapter_is_a_model(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = by_peft(base, "yarn", tmp_path)
    model.merge_and_unload().save_pretrained(tmp_path)
    assert "an adapter was saved there before" in caplog.text
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]["factor"]) == (10000.0, FACTOR)
    (tmp_path / "adapter_config.json").unlink()
    assert describe(load_extended(tmp_path))["method"] == "yarn"


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


def test_a_plain_adapter_on_an_extended_base_is_told(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(str(tmp_path))
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path))
    assert "the adapter does not say" not in caplog.text
    PeftModel.from_pretrained(patched_base(base, "yarn"), str(tmp_path))
    assert "the adapter does not say that its base was extended in training" in caplog.text


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
