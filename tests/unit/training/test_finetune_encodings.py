"""Fine-tuning another encoding instead of RoPE: resumed to the same losses, its parameters trained and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.checkpoint.extended import load_extended
from hf_posenc.methods.registry import method_names
from hf_posenc.patching.api import describe, patch_model, verify_model
from hf_posenc.training import finetune
from tiny_runs import config, killed_at, load, logits_of, losses

LENGTH, STEPS, SEED = 64, 4, 3  # what the tiny model was made for


def encoded(folder: Path, method: str | None, **changes: Any) -> Any:
    settings = {"method": method, "factor": 1.0, "seq_len": LENGTH, "token_budget": STEPS * LENGTH, "seed": SEED}
    shared = {"per_device_train_batch_size": 1, "save_steps": 2, "eval_documents": 0, "gradient_checkpointing": True}
    return config(folder, **{**settings, **shared, **changes})


@pytest.mark.parametrize("method", sorted(method_names("is_encoding")))
def test_a_run_resumes_to_the_same_losses_and_saves_the_encoding(
    method: str,
    base_folder: Path,
    tmp_path: Path,
    tokenizer: Any,
    documents: list[torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    straight = finetune(load(base_folder), tokenizer, documents, encoded(tmp_path / "straight", method))
    assert "hardly sees" not in caplog.text  # what is not extended has no long distances to learn
    with killed_at(3):
        finetune(load(base_folder), tokenizer, documents, encoded(tmp_path / "killed", method))
    caplog.set_level("INFO")
    finetune(load(base_folder), tokenizer, documents, encoded(tmp_path / "killed", method, resume_from_checkpoint=True))
    assert "killed/checkpoint-2" in next(m for m in caplog.messages if m.startswith("resuming from"))
    assert len(losses(tmp_path / "straight")) == STEPS
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "straight"), rel=1e-6)
    expected = logits_of(straight.model, LENGTH)
    for folder in (tmp_path / "killed", tmp_path / f"straight/checkpoint-{STEPS}"):
        loaded = load_extended(folder)
        verify_model(loaded)
        assert describe(loaded)["method"] == method
        torch.testing.assert_close(logits_of(loaded, LENGTH), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["learned", "relative_bias", "t5_bias"])
def test_what_an_encoding_adds_is_trained(
    method: str, base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
) -> None:
    model = load(base_folder)
    known = set(model.state_dict())
    torch.manual_seed(0)
    patch_model(model, method)
    before = {name: value.clone() for name, value in model.state_dict().items() if name not in known}
    trained = finetune(model, tokenizer, documents, encoded(tmp_path / "run", None, factor=None)).model
    assert before
    for name, value in before.items():
        assert (trained.state_dict()[name] != value).any(), name


@pytest.mark.parametrize("loaded_with_it", [False, True])
def test_adapters_that_would_lose_the_encoding_are_refused_before_training(
    loaded_with_it: bool, base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor]
) -> None:
    model = load(base_folder)
    given: dict[str, Any] = {"lora": True, "method": "t5_bias"}
    if loaded_with_it:
        patch_model(model, "t5_bias")
        given |= {"method": None, "factor": None}
    with pytest.raises(ValueError, match="LoRA"):
        finetune(model, tokenizer, documents, encoded(tmp_path / "run", **given))
    assert not list(tmp_path.glob("run/*"))
    given = {"lora": True, "method": "alibi"}  # which has none
    trained = finetune(load(base_folder), tokenizer, documents, encoded(tmp_path / "alibi", **given)).model
    again = load_extended(tmp_path / "alibi", base=load(base_folder))
    torch.testing.assert_close(logits_of(again, LENGTH), logits_of(trained, LENGTH), rtol=0, atol=1e-5)


def test_replacing_an_encoding_says_what_the_weights_know(
    base_folder: Path, tmp_path: Path, tokenizer: Any, documents: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = patch_model(load(base_folder), "alibi")
    finetune(model, tokenizer, documents, encoded(tmp_path / "run", "yarn", factor=2.0, on_scaled="replace"))
    assert "RoPE;" in caplog.text
