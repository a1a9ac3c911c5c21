"""A first loss that cannot be right stops the run: rotary modules swapped, positions dropped, labels shifted twice."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.assets import TRAIN_NOVELS, load_novel, tiny_model_path
from hf_posenc.errors import RunStoppedError
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import patch_model
from hf_posenc.patching.verification import RotaryMismatchError
from hf_posenc.training import chunked_loss, finetune
from hf_posenc.training.run_folder import read_log
from hf_posenc.training.start_checks import (
    RotaryCallback,
    documents_of,
    expected_first_loss,
    tolerance_of,
)
from tiny_runs import SEQ, Build, config

LONG = 512  # factor 2 of the pretrained tiny model's 256


def train_pretrained(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
    """One step of two blocks, of documents of about 150 tokens and a long one."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    novel = load_novel(TRAIN_NOVELS[0])[2000:]
    documents = [*(novel[at : at + 500] for at in range(0, 4000, 500)), novel[4000:7000]]
    settings = {
        "token_budget": 2 * LONG,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "eval_documents": 0,
        "check_first_loss": True,
    }
    finetune(model, tokenizer, documents, config(folder, **{**settings, **changes}))


def first_loss(folder: Path) -> float:
    return float(read_log(folder / "train_log.jsonl")[0]["loss"])


def test_a_loss_that_is_rounding_alone_stops_no_run(tmp_path: Path) -> None:
    """As of texts that are retained, before anything of them is lost."""
    rotary = RotaryModel(AutoModelForCausalLM.from_pretrained(tiny_model_path()))
    given = TrainingArguments(str(tmp_path)), TrainerState(global_step=1), TrainerControl()
    for expected, loss, stops in ((2e-7, 4e-7, False), (0.0, 4e-7, False), (2e-7, 0.01, True), (3.0, 3.01, True)):
        check = RotaryCallback(rotary, expected, tolerance=5e-4)
        with pytest.raises(RunStoppedError) if stops else nullcontext():
            check.on_log(*given, logs={"loss": loss})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_run_goes_on(tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_posenc"):
        train_pretrained(tmp_path, dtype)
    (said,) = [record for record in caplog.records if "first loss" in record.getMessage()]
    loss, expected = said.args  # type: ignore[misc]  # a record's may be a mapping
    assert loss == first_loss(tmp_path)
    assert isinstance(expected, float)
    # Far inside the tolerance, so that a right run is never stopped.
    assert abs(expected - first_loss(tmp_path)) < (1e-5 if dtype == torch.float32 else 2e-3) * expected


def swapped(model: nn.Module) -> None:
    """What another library does that sets the frequencies anew from a config it has kept."""
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq.copy_(1.0 / 1e4 ** (torch.arange(len(module.inv_freq)) / len(module.inv_freq)))


def test_a_rotary_module_changed_before_training(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Trainer.train

    def sabotaged(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.model.model.rotary_emb.attention_scaling = 1.0  # frequencies would come back with the next .to(device)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", sabotaged)
    with pytest.raises(RotaryMismatchError, match=r"1,.*1\.0693"):
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path, eval_documents=0))
    assert not read_log(tmp_path / "train_log.jsonl")


@pytest.mark.parametrize("step", [1, 3])
def test_frequencies_swapped_while_training(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    training_step = Trainer.training_step

    def sabotaged(self: Any, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == step - 1:
            swapped(model)
        return training_step(self, model, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", sabotaged)
    settings = config(tmp_path, eval_documents=0, save_steps=2)
    with pytest.raises(RotaryMismatchError, match="live frequencies"):
        finetune(tiny_llama(), tokenizer, documents, settings)
    # At once after the first step, else before a checkpoint is written of it.
    assert len(read_log(tmp_path / "train_log.jsonl")) == (0 if step == 1 else 3)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ([] if step == 1 else ["checkpoint-2"])


def test_the_check_of_positions_keeps_nothing_for_gradients(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, with_gradients = Trainer.compute_loss, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        with_gradients.append(loss.requires_grad)
        return loss

    monkeypatch.setattr(Trainer, "compute_loss", noted)
    finetune(tiny_llama(), tokenizer, documents, config(tmp_path, eval_documents=0))
    assert with_gradients[:3] == [False, False, True]
    assert all(with_gradients[2:])


def positions_dropped(patch: pytest.MonkeyPatch) -> None:
    """A wrapper that hands on the names it knows."""
    compute = Trainer.compute_loss

    def sabotaged(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        known = {name: value for name, value in inputs.items() if name != "position_ids"}
        return compute(self, model, known, *args, **kwargs)

    patch.setattr(Trainer, "compute_loss", sabotaged)


def labels_shifted_twice(patch: pytest.MonkeyPatch) -> None:
    loss = chunked_loss.chunked_causal_lm_loss

    def sabotaged(model: Any, hidden: Any, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return loss(model, hidden, nn.functional.pad(labels[:, 1:], (0, 1), value=-100), *args, **kwargs)

    patch.setattr(chunked_loss, "chunked_causal_lm_loss", sabotaged)


def weights_lost(patch: pytest.MonkeyPatch) -> None:
    """Wrapping leaves a weight as it was initialised."""
    train = Trainer.train

    def sabotaged(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            self.model.get_input_embeddings().weight.normal_(std=0.02)
        return train(self, *args, **kwargs)

    patch.setattr(Trainer, "train", sabotaged)


def mean_of_processes(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch divided by its own labels: the loss is that of two steps."""
    compute = Trainer.compute_loss

    def sabotaged(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        return compute(self, model, inputs, return_outputs, (inputs["labels"] != -100).sum())

    patch.setattr(Trainer, "compute_loss", sabotaged)


@pytest.mark.parametrize(
    ("sabotage", "dtype"),
    [
        (labels_shifted_twice, torch.float32),
        pytest.param(labels_shifted_twice, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(weights_lost, torch.float32, marks=pytest.mark.slow),
        pytest.param(weights_lost, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(mean_of_processes, torch.float32, marks=pytest.mark.slow),
        pytest.param(mean_of_processes, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_first_loss_stops_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[pytest.MonkeyPatch], None],
    dtype: torch.dtype,
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(RuntimeError, match=r"[\d.]+"):
        train_pretrained(tmp_path, dtype)
    assert not list(tmp_path.glob("checkpoint-*"))
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("length", [10, 1000])
def test_positions_that_do_not_reach_the_model_stop_the_run(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    positions_dropped(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    documents = [
        torch.randint(1, 60, (length,), generator=generator) for _ in range(40)
    ]  # many a block, or less than one
    with pytest.raises(RuntimeError, match="position_ids"):
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path, eval_documents=0))
    assert not read_log(tmp_path / "train_log.jsonl")


def test_it_is_not_compared_unless_that_is_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels_shifted_twice(monkeypatch)
    train_pretrained(tmp_path, check_first_loss=False)
    assert (tmp_path / "model.safetensors").exists()


@torch.no_grad()
def test_the_expected_loss_is_that_of_transformers_own_forward(tiny_llama: Build) -> None:
    model = patch_model(tiny_llama(), "yarn", 2.0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 128, (2, 40), generator=generator)
    skipping = torch.cat([torch.arange(9), torch.arange(50, 62), torch.arange(19)])  # one document skips, then another
    plain = torch.cat([torch.arange(30), torch.arange(10)])
    positions = torch.stack([skipping, plain])
    labels = ids.masked_fill(positions == 0, -100)
    labels[0, 5] = -100
    blocks = [{"input_ids": a, "position_ids": b, "labels": c} for a, b, c in zip(ids, positions, labels, strict=True)]
    assert [len(piece["labels"]) for block in blocks for piece in documents_of(block)] == [21, 19, 30, 10]
    total, count = 0.0, 0
    for row, bounds in enumerate([(0, 21, 40), (0, 30, 40)]):
        for start, end in itertools.pairwise(bounds):
            piece = {"input_ids": ids, "position_ids": positions, "labels": labels}
            fed = {name: value[row : row + 1, start:end] for name, value in piece.items()}
            number = int((fed["labels"][:, 1:] != -100).sum())
            mask = torch.ones_like(fed["input_ids"])
            total, count = total + number * model(**fed, attention_mask=mask).loss.item(), count + number
    assert expected_first_loss(RotaryModel(model), blocks, 7) == pytest.approx(total / count, rel=1e-6)
    skipped = [{**blocks[0], "position_ids": torch.cat([torch.arange(21), torch.arange(19)])}, blocks[1]]
    assert abs(expected_first_loss(RotaryModel(model), skipped, 7) - total / count) > 1e-5  # the skip counts


def test_dropout_widens_the_tolerance(tiny_llama: Build) -> None:
    exact, half = (
        tolerance_of(RotaryModel(tiny_llama()), autocast=False),
        tolerance_of(RotaryModel(tiny_llama()), autocast=True),
    )
    assert exact < half < tolerance_of(RotaryModel(tiny_llama(attention_dropout=0.1)), autocast=False)
    assert tolerance_of(RotaryModel(tiny_llama().bfloat16()), autocast=False) == half


def test_a_run_with_dropout_is_not_stopped(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(tmp_path, token_budget=2 * SEQ, eval_documents=0, check_first_loss=True)
    with caplog.at_level(logging.INFO, logger="hf_posenc"):
        finetune(tiny_llama(attention_dropout=0.3), tokenizer, documents, settings)
    (said,) = [record for record in caplog.records if "first loss" in record.getMessage()]
    loss, expected = said.args  # type: ignore[misc]  # a record's may be a mapping
    assert loss != pytest.approx(expected, rel=1e-6)  # the training forward drops, the other does not
