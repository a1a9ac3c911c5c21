"""Runs that find their disk full, their checkpoints damaged, their numbers not finite, or Ctrl-C pressed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from folders import HELPERS, ROOT
from hf_posenc.cli.main import main
from hf_posenc.errors import InvalidRequestError
from hf_posenc.training import FinetuneConfig
from hf_posenc.training import finetune as finetune_function
from hf_posenc.training.run_folder import (
    LOSS_LOG,
    PARTIAL,
    SEAL,
    by_step,
    last_checkpoint,
    move_into_place,
    open_run,
    problem_of,
    read_log,
    seal,
)
from hf_posenc.training.train_log import LossLog
from killed_runs import STEPS, command
from tiny_runs import assert_same_run, killed_at

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
    run_base: Path,
    whole_run: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    too_big: str,
) -> None:
    size = (run / "checkpoint-8" / too_big).stat().st_size
    with largest_file(size // 2 + size // 4):
        said = refused(capsys, run_base, run, "--resume-from-checkpoint")
    assert f"error: the checkpoint of step 12 could not be written to {run}: " in said
    assert ("File too large" if too_big == "model.safetensors" else "torch could not write all of a file") in said
    weights = sum(value.numel() for value in load_file(run / "checkpoint-8/model.safetensors").values())
    assert f"It takes about {weights * 12 / 1e6:.1f} MB, " in said  # float32 weights and AdamW's two moments
    assert f"The last good checkpoint, {run}/checkpoint-8, is kept. Make room, then run the same command with" in said
    assert not (run / PARTIAL).exists()  # it takes no room
    assert last_checkpoint(run) == (run / "checkpoint-8", [])
    if too_big == "optimizer.pt":
        assert main(command(run_base, run, "--resume-from-checkpoint")) == 0
        assert_same_run(run, whole_run, STEPS)


def test_no_room_for_the_trained_model(
    run_base: Path,
    whole_run: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FINETUNE, "save_checkpoint", limited(FINETUNE.save_checkpoint, lambda: 100_000))
        said = refused(capsys, run_base, run, "--resume-from-checkpoint")
    assert f"error: the trained model could not be written to {run}: " in said
    assert f"{run}/checkpoint-12, is kept" in said
    assert not run.with_name("run.partial").exists()
    assert not (run / "model.safetensors").exists()
    assert main(command(run_base, run, "--resume-from-checkpoint")) == 0
    assert_same_run(run, whole_run, STEPS)


@pytest.mark.parametrize("name", [LOSS_LOG, "results.jsonl"])
def test_no_room_for_logs_and_results(
    run_base: Path,
    whole_run: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    file, whole = run / name, (run / name).read_bytes()
    owner: Any = LossLog if name == LOSS_LOG else FINETUNE
    write = "_write" if name == LOSS_LOG else "perplexity"
    with monkeypatch.context() as patch:
        patch.setattr(owner, write, limited(getattr(owner, write), lambda: file.stat().st_size + 40))
        said = refused(capsys, run_base, run, "--resume-from-checkpoint")
    assert f"error: logs or results could not be written to {run}: File too large; " in said
    last = 8 if name == LOSS_LOG else 12
    assert f"The last good checkpoint, {run}/checkpoint-{last}, is kept. Make room" in said
    assert not file.read_bytes().endswith(b"\n")  # a torn line
    assert file.read_bytes().startswith(whole[: whole.find(b"\n")])
    assert main(command(run_base, run, "--resume-from-checkpoint")) == 0
    assert_same_run(run, whole_run, STEPS)


FULL_DISK = """
import os, subprocess, sys, torch
from pathlib import Path
disk, base, tests = map(Path, sys.argv[1:])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], check=True)
sys.path.insert(0, str(tests))
from killed_runs import command
from tiny_runs import assert_same_run
from hf_posenc.cli.main import main
from hf_posenc.training.run_folder import last_checkpoint
torch.set_num_threads(2)
run = disk / "run"
(disk / "ballast").write_bytes(bytes(1_000_000))
assert main(command(base, run)) == 2
assert last_checkpoint(run) == (run / "checkpoint-4", []), sorted(disk.rglob("*"))
(disk / "ballast").unlink()
subprocess.run(["mount", "-o", "remount,size=30m", disk], check=True)
assert main(command(base, run, "--resume-from-checkpoint")) == 0
assert_same_run(run, base.with_name("whole"), 12)
"""
NAMESPACE = ["unshare", "--map-root-user", "--mount"]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode != 0,
    reason="needs a mount namespace for a small file system; the tests above have the kernel fail writes too",
)
def test_a_disk_that_is_full(run_base: Path, whole_run: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    words = [*NAMESPACE, sys.executable, "-c", FULL_DISK, str(tmp_path / "disk"), str(run_base), str(HELPERS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "hf-posenc: error: the checkpoint of step 8 could not be written" in done.stderr
    assert "No space left on device" in done.stderr or "as on a full disk" in done.stderr  # by the file that fails
    assert "only 2." in done.stderr.replace("\n", " ")  # said before the training began
    assert "Traceback" not in done.stderr


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def break_json(file: Path) -> None:
    text = file.read_text()
    file.write_text("[" + text[1:])  # as long as before


def zero_the_header(file: Path) -> None:
    with file.open("rb+") as opened:
        opened.write(bytes(4096))


@pytest.mark.parametrize(
    ("damage", "name", "problem"),
    [
        (cut, "model.safetensors", r"model\.safetensors has [\d,]+ of [\d,]+ bytes"),
        (cut, "optimizer.pt", r"optimizer\.pt has [\d,]+ of [\d,]+ bytes"),
        (cut, "scheduler.pt", r"scheduler\.pt has"),
        (zero_the_header, "model.safetensors", r"model\.safetensors is not what was written"),
        (break_json, "trainer_state.json", r"trainer_state\.json is not what was written"),
        (Path.unlink, "rng_state.pth", r"rng_state\.pth is missing"),
        (Path.unlink, SEAL, rf"it was not written to its end, .*it has no {SEAL}"),
        (cut, SEAL, rf"{SEAL} cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    run: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], name: str, problem: str
) -> None:
    settings = json.loads((run / "finetune.json").read_text())
    assert open_run(run, settings, resume=True) == run / "checkpoint-8"
    assert "not used" not in caplog.text
    if (run / "checkpoint-8" / name).suffix == ".json" and damage is cut:
        os.truncate(run / "checkpoint-8" / name, 50)
    else:
        damage(run / "checkpoint-8" / name)
    assert open_run(run, settings, resume=True) == run / "checkpoint-4"
    assert f"damaged and not used: {run}/checkpoint-8 (" in caplog.text
    assert f"Going on from {run}/checkpoint-4 instead" in caplog.text
    damage(run / "checkpoint-4" / name) if damage is not cut else os.truncate(run / "checkpoint-4" / name, 50)
    with pytest.raises(
        ValueError, match=rf"no checkpoint in .* is intact: .*checkpoint-8 \({problem}.*; .*checkpoint-4 \("
    ):
        open_run(run, settings, resume=True)


def test_one_byte_in_the_middle_of_the_weights_is_noticed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-8"
    checkpoint.mkdir()
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(bytes(40_000_000))  # more than is read at once
    seal(checkpoint)
    assert problem_of(checkpoint) is None
    for index in (5_000_000, 20_000_000, 39_000_000):
        with weights.open("rb+") as opened:
            opened.seek(index)
            opened.write(b"\1")
        assert problem_of(checkpoint) == "model.safetensors is not what was written"
        assert last_checkpoint(tmp_path)[0] is None
        weights.write_bytes(bytes(40_000_000))
    assert problem_of(checkpoint) is None


def test_a_run_whose_last_checkpoint_is_damaged_ends_the_same(
    run_base: Path, whole_run: Path, run: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    cut(run / "checkpoint-8/optimizer.pt")
    # A shorter interval: what is left of the damaged one must not push a good one out.
    assert main(command(run_base, run, "--resume-from-checkpoint", "--save-steps", "3")) == 0
    assert "damaged and not used" in caplog.text
    assert_same_run(run, whole_run, STEPS)
    assert {path.name: problem_of(path) for path in run.glob("checkpoint-*")} == {
        "checkpoint-9": None,
        "checkpoint-12": None,
    }
    for checkpoint in run.glob("checkpoint-*"):
        cut(checkpoint / "model.safetensors")
    said = refused(capsys, run_base, run, "--resume-from-checkpoint")
    assert f"no checkpoint in {run} is intact: " in said
    assert "Delete them to train from the beginning with --resume-from-checkpoint" in said


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
    assert f"The last good checkpoint, {run}/checkpoint-8, is kept" in said
    assert last_checkpoint(run) == (run / "checkpoint-8", [])
    assert not (run / "checkpoint-12").exists()
    assert all(value.isfinite().all() for value in load_file(run / "checkpoint-8/model.safetensors").values())
    assert [line["step"] for line in read_log(run / LOSS_LOG)] == list(range(1, 13 if spoil is spoil_weights else 12))


def test_ctrl_c_says_how_to_go_on(
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
    assert (
        "stopped. There is no checkpoint yet. To go on, run the same command with --resume-from-checkpoint"
        in caplog.text
    )
    assert "hf-posenc: interrupted" in capsys.readouterr().err
    assert main(command(run_base, run, "--resume-from-checkpoint")) == 130
    assert f"stopped. The last good checkpoint, {run}/checkpoint-4, is kept. To go on, run" in caplog.text
    assert main(command(run_base, run, "--resume-from-checkpoint")) == 0
    assert_same_run(run, whole_run, STEPS)


def test_damaged_settings_are_named(run_base: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(run / "finetune.json", 30)
    assert "finetune.json, the settings the run was started with, is damaged (" in refused(
        capsys, run_base, run, "--resume-from-checkpoint"
    )
    (run / "finetune.json").write_text(json.dumps({}))
    assert "was started with other settings" in refused(capsys, run_base, run, "--resume-from-checkpoint")


@pytest.mark.parametrize("kept", [1, 2, None])
def test_a_new_checkpoint_drops_those_of_later_steps(kept: int | None, tmp_path: Path) -> None:
    """A run that goes on from a named checkpoint: those of the steps after it belong to another training."""
    for step in (2, 4, 8, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
        seal(tmp_path / f"checkpoint-{step}")
    (tmp_path / PARTIAL / "checkpoint-6").mkdir(parents=True)
    move_into_place(tmp_path, 6, kept)
    assert list(by_step(tmp_path)) == {1: [6], 2: [4, 6], None: [2, 4, 6]}[kept]


def test_a_setting_that_was_given_at_the_start_alone_is_another_setting(tmp_path: Path) -> None:
    """Files hold only what is not the default of TrainingArguments, so the resumed run may lack a name."""
    first, resumed = (FinetuneConfig("x", **given).fixed_settings() for given in ({"adam_epsilon": 1e-6}, {}))
    assert "adam_epsilon" not in resumed
    open_run(tmp_path, first, resume=False)
    (tmp_path / LOSS_LOG).write_text('{"step": 1}\n')
    with pytest.raises(InvalidRequestError, match="adam_epsilon was 1e-06, is now None"):
        open_run(tmp_path, resumed, resume=True)
    assert open_run(tmp_path, first, resume=True) is None  # no checkpoint yet
