"""``hf-posenc finetune`` killed by SIGKILL, at several moments: resumed, it ends as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from folders import HELPERS, ROOT
from hf_posenc.cli.main import main
from hf_posenc.training.run_folder import PARTIAL
from killed_runs import EVERY, STEPS
from killed_runs import command as words
from tiny_runs import assert_same_run


def kill(base: Path, output: Path, point: str, where: str, *flags: str) -> None:
    """Run in a process of its own until it dies at a point."""
    script = [sys.executable, str(HELPERS / "killed_runs.py"), point, where]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    died = subprocess.run(
        [*script, *words(base, output, *flags)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert died.returncode == -signal.SIGKILL, died.stderr


def resume(base: Path, output: Path, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    assert main(words(base, output, "--resume-from-checkpoint")) == 0
    assert f"resuming from {expected}" in caplog.text
    assert "damaged" not in caplog.text
    assert not (output / PARTIAL).exists()


def test_killed_while_a_checkpoint_is_written(
    run_base: Path, whole_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "run"
    kill(run_base, output, "writing", "checkpoint-8/trainer_state.json")  # what Trainer writes last
    left = sorted(path.name for path in (output / PARTIAL / "checkpoint-8").iterdir())
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"} <= {*left}
    with pytest.raises(json.JSONDecodeError):
        json.loads((output / PARTIAL / "checkpoint-8/trainer_state.json").read_text())
    assert not (output / "checkpoint-8").exists()
    resume(run_base, output, f"{output}/checkpoint-4", caplog)
    assert_same_run(output, whole_run, STEPS)
    weights = load_file(output / "checkpoint-12/model.safetensors")
    for name, value in load_file(output / "model.safetensors").items():
        assert value.equal(weights[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "where", "expected"),
    [
        ("step", "3", "the beginning"),
        ("step", "7", "{}/checkpoint-4"),
        ("saved", "8", "{}/checkpoint-8"),
        ("writing", "checkpoint-4/model.safetensors", "the beginning"),
        ("writing", "checkpoint-8/model.safetensors", "{}/checkpoint-4"),
        ("writing", "checkpoint-8/optimizer.pt", "{}/checkpoint-4"),
        ("writing", "checkpoint-8/rng_state.pth", "{}/checkpoint-4"),
        ("moving", "checkpoint-8", "{}/checkpoint-4"),
    ],
)
def test_killed_at(
    run_base: Path,
    whole_run: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    point: str,
    where: str,
    expected: str,
) -> None:
    output = tmp_path / "run"
    kill(run_base, output, point, where)
    resume(run_base, output, expected.format(output), caplog)
    assert_same_run(output, whole_run, STEPS)


@pytest.mark.slow
def test_killed_again_and_again(
    run_base: Path, whole_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "run"
    kill(run_base, output, "step", "6")
    kill(run_base, output, "writing", "checkpoint-8/optimizer.pt", "--resume-from-checkpoint")
    kill(run_base, output, "saved", "8", "--resume-from-checkpoint")
    kill(run_base, output, "moving", f"checkpoint-{STEPS}", "--resume-from-checkpoint")
    resume(run_base, output, f"{output}/checkpoint-8", caplog)
    assert_same_run(output, whole_run, STEPS)
    assert sorted(path.name for path in output.glob("checkpoint-*")) == [
        f"checkpoint-{STEPS}",
        f"checkpoint-{2 * EVERY}",
    ]
