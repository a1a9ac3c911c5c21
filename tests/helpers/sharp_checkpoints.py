"""A tiny Llama whose attention is not nearly uniform, extended past its original length, to be saved in every way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    modeling_utils,
)

from hf_posenc import patch_model
from tiny_llama import make_tiny_llama, make_tiny_tokenizer

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


def by_peft(base: Path, method: str, folder: Path) -> Any:
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(patched_base(base, method), settings)
    model.save_pretrained(str(folder))
    return model


@contextmanager
def uploads_to(folder: Path) -> Iterator[dict[str, Any]]:
    """Run Transformers' own pushing up to its requests to the Hub; what it would upload is copied to a folder."""
    request: dict[str, Any] = {}

    def create_repo(repo_id: str, **kwargs: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id)

    def upload(model: Any, working_dir: Any, repo_id: str, files_timestamps: Any, **kwargs: Any) -> None:
        request.update(repo_id=repo_id, commit_message=kwargs["commit_message"])
        shutil.copytree(working_dir, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedModel, "_upload_modified_files", upload)
        patch.setattr(modeling_utils, "create_and_tag_model_card", lambda *args, **kwargs: ModelCard("# A model"))
        patch.setattr(modeling_utils, "hf_api", lambda: SimpleNamespace(create_repo=create_repo), raising=False)
        patch.setattr(modeling_utils, "create_repo", create_repo, raising=False)  # Transformers 5.0
        yield request
