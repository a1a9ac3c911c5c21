"""Models of other classes than causal language models: saved and loaded as what they are, or refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

from hf_posenc import describe, load_extended, patch_model, save_extended
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.checkpoint.pretrained import auto_class
from hf_posenc.cli.main import main
from tiny_llama import TINY_SIZES, make_tiny_tokenizer

IDS = torch.arange(1, 100)[None]
CLASSES = (LlamaForSequenceClassification, LlamaForTokenClassification, LlamaForQuestionAnswering, LlamaModel)


def make(model_class: Any) -> Any:
    torch.manual_seed(0)
    return model_class(LlamaConfig(**TINY_SIZES, num_labels=3, pad_token_id=0)).eval()


class RewardModel(LlamaForSequenceClassification):
    """A class of a user's own, with a head of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.scale = nn.Linear(3, 1)


class RenamedLlama(LlamaForCausalLM):
    """A class of a user's own, with the weights of the one it derives from."""


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    return model(IDS)[0]  # type: ignore[no-any-return]  # logits, or the states of a model without a head


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn"])
@pytest.mark.parametrize("model_class", CLASSES)
def test_it_comes_back_as_the_class_that_was_saved(model_class: Any, method: str, tmp_path: Path) -> None:
    model = patch_model(make(model_class), method, 4)
    again = load_extended(save_extended(model, tmp_path / "model"))
    assert type(again) is model_class
    assert describe(again) == describe(model)
    assert torch.equal(outputs(again.eval()), outputs(model))


@pytest.mark.parametrize("num_labels", [1, 3])
def test_an_adapter_of_a_classifier_brings_its_head(num_labels: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY_SIZES, pad_token_id=0)).save_pretrained(tmp_path / "base")
    base = LlamaForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=num_labels)
    settings = LoraConfig(task_type="SEQ_CLS", init_lora_weights=False)
    model = get_peft_model(patch_model(base, "yarn", 4), settings).eval()
    again = load_extended(save_extended(model, tmp_path / "adapter"))
    assert type(again.get_base_model()) is LlamaForSequenceClassification
    assert torch.equal(outputs(again.eval()), outputs(model))


def test_a_class_that_cannot_be_built_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    model = patch_model(make(RewardModel), "yarn", 4)
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification.*scale.bias"):
        save_extended(model, tmp_path / "model")
    assert not any(tmp_path.iterdir())
    model.save_pretrained(tmp_path / "model")  # what the message says to do
    again = RewardModel.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(outputs(again), outputs(model))
    assert describe(again) == describe(model)


def test_a_class_of_the_same_weights_is_loaded_as_what_it_derives_from(tmp_path: Path) -> None:
    model = patch_model(make(RenamedLlama), "yarn", 4)
    again = load_extended(save_extended(model, tmp_path / "model"))
    assert type(again) is LlamaForCausalLM
    assert torch.equal(outputs(again.eval()), outputs(model))


@pytest.mark.parametrize("model_class", CLASSES)
def test_perplexity_of_a_model_that_predicts_no_tokens_is_refused(
    model_class: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_extended(patch_model(make(model_class), "yarn", 4), tmp_path / "model", make_tiny_tokenizer())
    with pytest.raises(ValueError, match=f"{model_class.__name__},"):
        load_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("some words " * 100)
    command = ["eval", str(tmp_path / "model"), "--documents", str(tmp_path / "text.txt"), "--context-lengths", "64"]
    assert main(command) == 2
    assert "which predicts" in capsys.readouterr().err


def test_eval_of_an_adapter_loads_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """One that PEFT saved of a plain base, so without a manifest."""
    make(LlamaForCausalLM).save_pretrained(tmp_path / "base")
    make_tiny_tokenizer().save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    tuned = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    tuned.save_pretrained(str(tmp_path / "adapter"))
    model, _ = load_model(tmp_path / "adapter", dtype="float32")
    assert torch.equal(outputs(model), outputs(tuned))
    assert "say whether" in caplog.text
    (tmp_path / "text.txt").write_text("some words " * 100)
    command = ["eval", str(tmp_path / "adapter"), "--documents", str(tmp_path / "text.txt"), "--context-lengths", "64"]
    assert main(command) == 0
    assert "unpatched" in capsys.readouterr().out


def test_the_config_is_looked_for_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def read(source: str, **where: Any) -> LlamaConfig:
        asked.append(where)
        return LlamaConfig(architectures=["LlamaForCausalLM"])

    monkeypatch.setattr(AutoConfig, "from_pretrained", read)
    where = {"revision": "two", "subfolder": "inner", "local_files_only": True, "cache_dir": "here", "token": False}
    assert auto_class("me/model", {**where, "dtype": "auto"}) is AutoModelForCausalLM
    assert asked == [where]
