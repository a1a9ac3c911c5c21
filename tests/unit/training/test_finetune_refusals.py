"""What `finetune` refuses before it trains or writes anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from hf_posenc.training import finetune
from tiny_runs import SEQ, Build, config, make_documents, make_tokenizer


def refused(model: Any, folder: Path, message: str, *, documents: Any = None, **changes: Any) -> None:
    arguments = {name: changes.pop(name) for name in ("eval_documents", "tokens_trained") if name in changes}
    texts = make_documents() if documents is None else documents
    settings = config(folder, **{"eval_documents": 0, **changes})
    with pytest.raises(ValueError, match=message):
        finetune(model, make_tokenizer(), texts, settings, **arguments)


def test_the_models_own_folder(tmp_path: Path, tiny_llama: Build, monkeypatch: pytest.MonkeyPatch):
    tiny_llama().save_pretrained(tmp_path / "base")
    weights = (tmp_path / "base/model.safetensors").read_bytes()
    monkeypatch.chdir(tmp_path)
    for loaded_from, written_to in ((str(tmp_path / "base"), "base"), ("base", str(tmp_path / "x/../base"))):
        model = AutoModelForCausalLM.from_pretrained(loaded_from)
        refused(model, Path(written_to), "output_dir '.*base' is the folder the model was loaded from")
    assert (tmp_path / "base/model.safetensors").read_bytes() == weights
    assert not (tmp_path / "base/finetune.json").exists()


@pytest.mark.filterwarnings("ignore:Could not find a config file")  # peft 0.20, of a base without a name
def test_a_model_with_nothing_to_train(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]
):
    adapted = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"]))
    refused(adapted, tmp_path / "run", "has adapters that are trained already. Leave lora out", lora=True)
    tiny_llama().save_pretrained(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    refused(tiny_llama().requires_grad_(False), tmp_path / "run", "no trainable parameters: all are frozen")
    assert not (tmp_path / "run").exists()
    small = config(tmp_path / "run", token_budget=2 * SEQ, eval_documents=0)
    trainable = PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter", is_trainable=True)
    finetune(trainable, tokenizer, documents, small)
    assert "library_name: peft" in (tmp_path / "run/README.md").read_text()


def test_blocks_longer_than_the_target(tmp_path: Path, tiny_llama: Build):
    refused(tiny_llama(), tmp_path / "run", "seq_len 129 is longer than the target length, 128 tokens", seq_len=129)
    assert not (tmp_path / "run").exists()


def test_a_budget_below_one_step(tmp_path: Path, tiny_llama: Build):
    said = f"token_budget {2 * SEQ - 1} is less than one step, {2 * SEQ} tokens. Give it more, or lower"
    refused(tiny_llama(), tmp_path / "run", said, token_budget=2 * SEQ - 1)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_an_end_says_so(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor], caplog: pytest.LogCaptureFixture
):
    small = config(tmp_path / "run", token_budget=2 * SEQ, eval_documents=0)
    finetune(tiny_llama(), tokenizer, documents, small)
    assert "no end-of-sequence token" not in caplog.text
    tokenizer.eos_token = None
    finetune(tiny_llama(), tokenizer, documents, dataclasses.replace(small, output_dir=str(tmp_path / "other")))
    assert "end-of-sequence" in caplog.text


@pytest.mark.parametrize("wrong", [128, 5000, -1])
def test_token_ids_outside_the_vocabulary(tmp_path: Path, tiny_llama: Build, wrong: int):
    bad = [torch.arange(1, 60), torch.tensor([5, wrong, 6])]
    said = f"document 1 holds token id {wrong}, but the model's vocabulary has 128 ids, 0 to 127"
    refused(tiny_llama(), tmp_path / "run", said, documents=bad)
    with pytest.raises(ValueError, match=f"held-out {said}"):
        finetune(tiny_llama(), make_tokenizer(), make_documents(), config(tmp_path / "run"), eval_documents=bad)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_another_model(tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]):
    refused(
        tiny_llama(vocab_size=64),
        tmp_path / "run",
        "document 0 holds token id 64, ",
        documents=[torch.arange(90)],
    )
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    with pytest.raises(ValueError, match=r"eos_token_id.*128,.*128"):
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path / "run"))


def test_a_count_of_tokens_that_cannot_be(tmp_path: Path, tiny_llama: Build):
    refused(tiny_llama(), tmp_path / "run", "tokens_trained must be a whole number >= 0, got -1", tokens_trained=-1)


def test_a_model_that_was_left_on_the_cpu_is_pointed_out(
    tmp_path: Path, tiny_llama: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(UserWarning, match=r"trained there.*model\.to\('cuda'\)"):
        refused(tiny_llama(), tmp_path, "output_dir|token_budget", token_budget=1)
    refused(tiny_llama(), tmp_path, "token_budget", token_budget=1, use_cpu=True)  # without a warning
