"""Runs that find their disk full, their checkpoints damaged, their numbers not finite, or Ctrl-C pressed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from hf_posenc.cli.main import main
from hf_posenc.errors import InvalidRequestError
from hf_posenc.training import FinetuneConfig
from hf_posenc.training import finetune as finetune_function
from hf_posenc.training.run_folder import (
    LOSS_LOG,
    PARTIAL,
    checkpoints_by_step,
    last_checkpoint,
    move_into_place,
    open_run,
    read_log,
)
from hf_posenc.training.train_log import LossLog
from killed_runs import STEPS, command
from tiny_llama import make_tiny_llama
from tiny_runs import assert_same_run, killed_at
from training_plans import plan_for

FINETUNE = sys.modules[finetune_function.__module__]


@pytest.fixture(scope="session")
def stopped_run(run_base: Path) -> Path:
    """A run that died in step 10, with intact checkpoints of steps 4 and 8."""
    folder = run_base.with_name("stopped")
    with killed_at(10):
        main(command(run_base, folder))
    return folder


@pytest.fixture
def run(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run."""
    shutil.copytree(stopped_run, tmp_path / "run")
    return tmp_path / "run"


def refused(capsys: pytest.CaptureFixture[str], base: Path, folder: Path, *flags: str) -> str:
    """Run, and return the one line of a user's error."""
    assert main(command(base, folder, *flags)) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    (line,) = [line for line in captured.err.splitlines() if line.startswith("hf-posenc: error: ")]
    return line


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel fails any write past this many bytes of a file, having written what is before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def limited(call: Callable[..., Any], size: Callable[[], int]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with largest_file(size()):
            return call(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("too_big", ["model.safetensors", "optimizer.pt"])
def test_no_room_for_a_checkpoint(
    run_base: Path, whole_run: Path, run: Path, caplog: pytest.LogCaptureFixture, too_big: str
) -> None:
    size = (run / "checkpoint-8" / too_big).stat().st_size
    with largest_file(size // 2 + size // 4), pytest.raises(Exception, match=r"File too large|unexpected pos"):
        main([*command(run_base, run, "--resume-from-checkpoint"), "--traceback"])
    assert f"{run}/checkpoint-8." in caplog.text
    assert last_checkpoint(run) == run / "checkpoint-8"
    if too_big == "optimizer.pt":
        assert main(command(run_base, run, "--resume-from-checkpoint")) == 0
        assert not (run / PARTIAL).exists()
        assert_same_run(run, whole_run, STEPS)


def test_no_room_for_the_trained_model(
    run_base: Path, whole_run: Path, run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FINETUNE, "save_checkpoint", limited(FINETUNE.save_checkpoint, lambda: 100_000))
        with pytest.raises(Exception, match="too large"):
            main([*command(run_base, run, "--resume-from-checkpoint"), "--traceback"])
    assert f"{run}/checkpoint-12" in caplog.text
    assert not (run / "model.safetensors").exists()
    assert main(command(run_base, run, "--resume-from-checkpoint")) == 0
    assert_same_run(run, whole_run, STEPS)


@pytest.mark.parametrize("name", [LOSS_LOG, "results.jsonl"])
def test_no_room_for_logs_and_results(
    run_base: Path,
    whole_run: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    file, whole = run / name, (run / name).read_bytes()
    owner: Any = LossLog if name == LOSS_LOG else FINETUNE
    write = "_write" if name == LOSS_LOG else "perplexity"
    with monkeypatch.context() as patch:
        patch.setattr(owner, write, limited(getattr(owner, write), lambda: file.stat().st_size + 40))
        assert "too large" in refused(capsys, run_base, run, "--resume-from-checkpoint")
    assert f"{run}/checkpoint-{8 if name == LOSS_LOG else 12}" in caplog.text
    assert not file.read_bytes().endswith(b"\n")  # a torn line
    assert file.read_bytes().startswith(whole[: whole.find(b"\n")])
    assert main(command(run_base, run, "--resume-from-checkpoint")) == 0
    assert_same_run(run, whole_run, STEPS)


def spoil_loss(patch: pytest.MonkeyPatch) -> None:
    step = Trainer.training_step

    def spoiled(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return step(self, *args, **kwargs) * (float("inf") if self.state.global_step == 11 else 1)

    patch.setattr(Trainer, "training_step", spoiled)


def spoil_gradient(patch: pytest.MonkeyPatch) -> None:
    step = Trainer.training_step

    def spoiled(self: Any, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(self, model, *args, **kwargs)
        if self.state.global_step == 11:
            next(model.parameters()).grad[3, 5] = float("nan")
        return loss

    patch.setattr(Trainer, "training_step", spoiled)


def spoil_weights(patch: pytest.MonkeyPatch) -> None:
    """The update itself is not finite, 0 / 0 where a gradient is 0: loss and gradient of the step say nothing of it."""
    step = Trainer.training_step

    def spoiled(self: Any, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == 11:
            for group in self.optimizer.param_groups:
                group["eps"] = 0.0
        return step(self, model, *args, **kwargs)

    patch.setattr(Trainer, "training_step", spoiled)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_loss, "the loss of step 12 is inf, so no checkpoint of it is written"),
        (spoil_gradient, "the gradient's norm of step 12 is nan, so no checkpoint"),
        (spoil_weights, "weights are not finite after step 12, "),
    ],
)
def test_numbers_that_are_not_finite_are_not_saved(
    run_base: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[pytest.MonkeyPatch], None],
    message: str,
) -> None:
    spoil(monkeypatch)
    said = refused(capsys, run_base, run, "--resume-from-checkpoint")
    assert message in said
    assert "lower learning_rate" in said
    assert last_checkpoint(run) == run / "checkpoint-8"
    assert not (run / "checkpoint-12").exists()
    assert all(value.isfinite().all() for value in load_file(run / "checkpoint-8/model.safetensors").values())
    assert [line["step"] for line in read_log(run / LOSS_LOG)] == list(range(1, 13 if spoil is spoil_weights else 12))


def test_ctrl_c_says_how_to_resume(
    run_base: Path,
    whole_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    step, at = Trainer.training_step, [2, 6]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started without it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def pressed(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if at and self.state.global_step == at[0]:
            at.pop(0)
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", pressed)
    run = tmp_path / "run"
    assert main(command(run_base, run)) == 130
    assert "checkpoint yet." in caplog.text
    assert "hf-posenc: interrupted" in capsys.readouterr().err
    assert main(command(run_base, run, "--resume-from-checkpoint")) == 130
    assert f"{run}/checkpoint-4." in caplog.text
    assert main(command(run_base, run, "--resume-from-checkpoint")) == 0
    assert_same_run(run, whole_run, STEPS)


def test_damaged_settings_are_named(run_base: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(run / "finetune.json", 30)
    assert "finetune.json," in refused(capsys, run_base, run, "--resume-from-checkpoint")
    (run / "finetune.json").write_text(json.dumps({}))
    assert "other settings" in refused(capsys, run_base, run, "--resume-from-checkpoint")


@pytest.mark.parametrize("kept", [1, 2, None])
def test_a_new_checkpoint_drops_those_of_later_steps(kept: int | None, tmp_path: Path) -> None:
    """A run that goes on from a named checkpoint: those of the steps after it belong to another training."""
    for step in (2, 4, 8, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    written = tmp_path / PARTIAL / "checkpoint-6"
    written.mkdir(parents=True)
    (written / "trainer_state.json").touch()
    move_into_place(tmp_path, 6, kept)
    assert list(checkpoints_by_step(tmp_path)) == {1: [6], 2: [4, 6], None: [2, 4, 6]}[kept]


def test_a_setting_that_was_given_at_the_start_alone_is_another_setting(tmp_path: Path) -> None:
    """Files hold only what is not the default of TrainingArguments, so the resumed run may lack a name."""
    first, resumed = (
        dict(plan_for(FinetuneConfig("x", **given), make_tiny_llama()).stages[0].fixed)
        for given in ({"adam_epsilon": 1e-6}, {})
    )
    assert "adam_epsilon" not in resumed
    open_run(tmp_path, first, resume=False)
    (tmp_path / LOSS_LOG).write_text('{"step": 1}\n')
    with pytest.raises(InvalidRequestError, match=r"adam_epsilon.*1e-06,"):
        open_run(tmp_path, resumed, resume=True)
    assert open_run(tmp_path, first, resume=True) is None  # no checkpoint yet
