"""A run that is interrupted, resumed or continued: the same numbers, and an honest account of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc.checkpoint.extended import load_extended
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.evaluation import read_records
from hf_posenc.patching.api import describe, patch_model
from hf_posenc.training import finetune, trainer
from hf_posenc.training.run_folder import last_checkpoint, read_log, resumable
from tiny_runs import SEQ, Build, config, killed_at, logits_of


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.float32, {}),
        (
            torch.bfloat16,
            {"lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2, "token_budget": 12 * 4 * SEQ},
        ),
        (torch.float32, {"lora": True}),
        (torch.bfloat16, {"lora": True, "gradient_checkpointing": True}),
        (torch.float32, {"save_steps": 5, "logging_steps": 3}),
    ],
    ids=["full", "full-bf16-cosine", "lora", "lora-bf16-checkpointing", "saved-between-shown-losses"],
)
def test_a_resumed_run_gives_the_same_losses_and_weights(
    tmp_path: Path,
    tiny_llama: Build,
    tokenizer: Any,
    documents: list[torch.Tensor],
    dtype: torch.dtype,
    changes: dict[str, Any],
):
    tiny_llama(tie_word_embeddings=True).to(dtype).save_pretrained(tmp_path / "base")

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    straight = finetune(base(), tokenizer, documents, config(tmp_path / "straight", **changes))
    with killed_at(8):
        finetune(base(), tokenizer, documents, config(tmp_path / "killed", **changes))
    before = read_log(tmp_path / "killed/train_log.jsonl")
    assert [line["step"] for line in before] == list(range(1, 9))
    saved = changes.get("save_steps", 6)
    undone = [{**line, "seconds": -1.0} if line["step"] > saved else line for line in before]  # to be known again
    (tmp_path / "killed/train_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in undone))
    resumed = finetune(
        base(), tokenizer, documents, config(tmp_path / "killed", resume_from_checkpoint=True, **changes)
    )

    lines = [read_log(tmp_path / name / "train_log.jsonl") for name in ("straight", "killed")]
    assert [line["step"] for line in lines[1]] == list(range(1, 13))
    assert lines[1][:saved] == before[:saved]  # their times too: these steps were not done again
    assert all(line["seconds"] >= 0 for line in lines[1])  # and those after them were
    for one, other in zip(*lines, strict=True):
        for name in ("loss", "learning_rate", "grad_norm", "tokens_trained"):
            assert one[name] == pytest.approx(other[name], rel=1e-6, abs=1e-12), name
    assert lines[1][-1]["seconds"] >= lines[1][7]["seconds"]
    assert resumed.train_loss == pytest.approx(straight.train_loss, rel=1e-6)
    weights = [r.model.state_dict() for r in (straight, resumed)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=0, msg=name)
    assert [r.perplexity for r in resumed.records] == [r.perplexity for r in straight.records]
    assert len(read_records(tmp_path / "killed/results.jsonl")) == len(straight.records)


def test_what_may_not_differ_on_resume_is_named(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]
):
    first = {"token_budget": 2 * SEQ, "eval_documents": 0}
    finetune(tiny_llama(), tokenizer, documents, config(tmp_path, **first))
    again = {**first, "resume_from_checkpoint": True}
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True \(--resume-from-checkpoint\)"):
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path, **first))
    with pytest.raises(ValueError, match=r"learning_rate.*0.003,.*0.001\."):
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path, **{**again, "learning_rate": 1e-3}))
    with pytest.raises(ValueError, match=r"eval_lengths.*\[32\]\."):  # it can decide what is held out
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path, **again, eval_lengths=[32]))
    with pytest.raises(ValueError, match="data was '"):
        finetune(tiny_llama(), tokenizer, documents[1:], config(tmp_path, **again))
    with pytest.raises(ValueError, match="base_weights was '"):
        finetune(tiny_llama(rms_norm_eps=1e-3, vocab_size=129), tokenizer, documents, config(tmp_path, **again))
    (tmp_path / "checkpoint-9").mkdir()  # one that was being written when the process died
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    shown = {"save_steps": 3, "logging_steps": 7, "run_name": "other"}
    done = finetune(tiny_llama(), tokenizer, documents, config(tmp_path, **again, **shown))
    assert done.steps == len(read_log(tmp_path / "train_log.jsonl")) == 1


def test_a_start_that_failed_can_be_corrected(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("packed documents see each other")

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "probe_isolation", refuse)
        with pytest.raises(RuntimeError, match="each other"):
            finetune(tiny_llama(), tokenizer, documents, config(tmp_path))
    assert (tmp_path / "finetune.json").is_file()
    small = {"token_budget": SEQ, "per_device_train_batch_size": 1, "eval_documents": 0}
    assert finetune(tiny_llama(), tokenizer, documents, config(tmp_path, **small)).steps == 1
    assert json.loads((tmp_path / "finetune.json").read_text())["tokens_per_step"] == SEQ


def test_a_continued_run_counts_on(tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]):
    first = finetune(tiny_llama(), tokenizer, documents, config(tmp_path / "a", token_budget=4 * SEQ))
    manifest = read_manifest(tmp_path / "a")
    assert manifest is not None
    model = load_extended(tmp_path / "a")
    settings = config(tmp_path / "b", token_budget=6 * SEQ)
    second = finetune(model, tokenizer, documents, settings, tokens_trained=manifest["tokens_trained"])
    assert (first.tokens_trained, second.tokens_trained, second.steps) == (4 * SEQ, 10 * SEQ, 3)
    counts = [record.tokens_trained for record in read_records(tmp_path / "b/results.jsonl")]
    assert counts == [4 * SEQ] * 3 + [10 * SEQ] * 3
    assert second.records[2].perplexity == pytest.approx(first.records[-1].perplexity, rel=1e-6)
    assert {record.method for record in second.records} == {"yarn"}  # without it, these weights are no base model
    manifest = read_manifest(tmp_path / "b")
    assert manifest is not None
    assert manifest["tokens_trained"] == 10 * SEQ
    assert [line["tokens_trained"] for line in read_log(tmp_path / "b/train_log.jsonl")] == [6 * SEQ, 8 * SEQ, 10 * SEQ]
    card = (tmp_path / "b/README.md").read_text()
    assert "fine-tuned on 1,280 tokens (512 of them in earlier runs) in blocks of 128" in card
    assert "| extended to 128 tokens, fine-tuned on 512 tokens |" in card
    assert "was not measured: the run began with a model that was extended already" in card
    assert "not yet trained" in (tmp_path / "a/README.md").read_text()
    with pytest.raises(ValueError, match=r"tokens_trained_before.*512,.*0"):
        finetune(
            load_extended(tmp_path / "a"), tokenizer, documents, config(tmp_path / "b", resume_from_checkpoint=True)
        )


@pytest.mark.parametrize("lora", [False, True])
def test_trainers_checkpoints_say_that_they_are_extended(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor], lora: bool
):
    tiny_llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    # ntk is written as a larger rope_theta: nothing else tells such a model from a plain one
    settings = config(
        tmp_path / "run", method="ntk", token_budget=4 * 2 * SEQ, save_steps=2, lora=lora, eval_documents=0
    )
    result = finetune(base, tokenizer, documents, settings, tokens_trained=100)
    for step in (2, 4):
        folder = tmp_path / f"run/checkpoint-{step}"
        manifest = read_manifest(folder)
        assert manifest is not None
        assert manifest["tokens_trained"] == 100 + step * 2 * SEQ
        loaded = load_extended(folder)
        assert describe(loaded)["method"] == "ntk"
    torch.testing.assert_close(logits_of(loaded), logits_of(result.model), rtol=0, atol=1e-6)
    if not lora:
        plain = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(logits_of(plain), logits_of(result.model), rtol=0, atol=0)
        with pytest.raises(ValueError, match="already scaled: ntk, factor 2"):
            patch_model(plain, "ntk", 2)


def test_a_folder_of_the_users_own_does_not_replace_the_error(tmp_path: Path) -> None:
    (tmp_path / "stage-final-2").mkdir()
    with pytest.raises(RuntimeError, match="the disk is full"), resumable(tmp_path):
        raise RuntimeError("the disk is full")
