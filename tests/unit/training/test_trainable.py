"""What ``trainable`` leaves as it was: all weights but those of the attention, while they are trained and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from hf_posenc import patch_model
from hf_posenc.planning.training_memory import predict_training_memory
from hf_posenc.training import finetune, training_run
from hf_posenc.training.lora import check_trainable
from tiny_runs import SEQ, Build, config, make_documents, make_tokenizer

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def train(model: Any, folder: Path, **settings: Any) -> set[str]:
    """Train, and return the last name parts of the modules whose weights changed."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    run = config(folder, token_budget=2 * 2 * SEQ, eval_documents=0, **settings)
    finetune(model, make_tokenizer(), make_documents(), run)
    return {name.split(".")[-2] for name, one in model.named_parameters() if not torch.equal(one, before[name])}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_attention_alone_is_trained(checkpointing: bool, tmp_path: Path, tiny_llama: Build) -> None:
    model = tiny_llama()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)  # of the caller's: it stays frozen
    first = model.model.layers[0].self_attn.q_proj.weight.clone()
    settings = {"trainable": "attention", "gradient_checkpointing": checkpointing}
    assert train(model, tmp_path / "attention", **settings) == ATTENTION
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, first)
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == [
        "model.layers.0.self_attn.q_proj.weight"
    ]
    assert {"embed_tokens", "up_proj", "norm"} <= train(tiny_llama(), tmp_path / "all")


def test_the_rest_is_trained_again_after_an_error(
    tmp_path: Path, tiny_llama: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = tiny_llama(), []

    def failing(model: nn.Module, *args: Any) -> None:
        seen.extend(name for name, one in model.named_parameters() if one.requires_grad)
        raise RuntimeError("while it trains")

    monkeypatch.setattr(training_run, "train", failing)
    with pytest.raises(RuntimeError, match="while it trains"):
        train(model, tmp_path, trainable="attention")
    assert {name.split(".")[-2] for name in seen} == ATTENTION
    assert all(one.requires_grad for one in model.parameters())


def test_a_model_without_attention_by_name_is_refused(tmp_path: Path, tiny_llama: Build) -> None:
    model = patch_model(tiny_llama(), "yarn", factor=2)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Mixer", (type(layer.self_attn),), {})
    with pytest.raises(ValueError, match=r"no nn\.Linear inside a module named \.\.\.Attention\. Train all"):
        train(model, tmp_path / "run", factor=None, trainable="attention")
    assert not (tmp_path / "run").exists()


def test_it_needs_less_memory(tiny_llama: Build) -> None:
    shape = tiny_llama().config
    whole, attention = (
        predict_training_memory(shape, config(Path("unused"), trainable=trainable).step, SEQ)
        for trainable in ("all", "attention")
    )
    trained = sum(one.nbytes for name, one in tiny_llama().named_parameters() if "self_attn" in name)
    assert attention.optimizer == 2 * trained
    assert attention.peak < whole.peak


def test_an_adapter_of_transformers_own_is_refused(tiny_llama: Build) -> None:
    model = tiny_llama()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"PeftModel\.from_pretrained"):
        check_trainable(model, None)
