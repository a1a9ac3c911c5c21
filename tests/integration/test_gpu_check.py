"""scripts/gpu_check, tried on a CPU with tiny shapes: whoever has a GPU for minutes must not lose them to a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu_check
from folders import ROOT


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, str(ROOT / "scripts/gpu_check.py"), "--output", "records.json", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    path = folder / "records.json"
    return done, json.loads(path.read_text()) if path.exists() else {}


def test_every_step_runs_and_is_recorded(tmp_path: Path) -> None:
    done, records = run(tmp_path, "--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (records["left_out"], records["failed"], records["card"]) == ([], [], "none: cpu")
    recorded = records["steps"]
    assert list(recorded) == [step.name for step in gpu_check.steps(gpu_check.TINY)]
    assert (recorded["tests"]["passed"], recorded["tests"]["failures"]) == (3, [])
    assert recorded["tests"]["tests_in_all"] > 500
    prefill = recorded["1.5B, 256 tokens"]["prefill, 256 tokens"]
    assert set(prefill["ratio to native"]) == {"yarn", "dca", "rerope"}
    assert set(prefill["ratio to yarn"]) == {"dca", "rerope"}
    assert recorded["8B, LoRA step of 512 tokens"]["predicted / measured"] > 0
    assert set(recorded["1.5B, Trainer at 128 tokens"]["tokens_per_second"]) == {"ours", "plain"}
    assert recorded["1.5B, evaluation at 512 tokens"]["questions"]["same_scores"] == "2 of 2"
    assert all(step["took_seconds"] > 0 for step in recorded.values())


def test_what_no_longer_fits_is_left_out_and_what_fails_is_named(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    def fails(left: float) -> dict[str, Any]:
        raise MemoryError("too large")

    steps = [
        gpu_check.Step("quick", 1, lambda left: {"left": left}),
        gpu_check.Step("broken", 1, fails),
        gpu_check.Step("long", 61, lambda left: {}),
        gpu_check.Step("also quick", 1, lambda left: {}),
    ]
    monkeypatch.setattr(gpu_check, "steps", lambda sizes: steps)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--tiny", "--minutes", "1", "--output", str(tmp_path / "r.json")])
    with pytest.raises(SystemExit, match="1"):
        gpu_check.main()
    records = json.loads((tmp_path / "r.json").read_text())
    assert list(records["steps"]) == ["quick", "broken", "also quick"]
    assert 0 < records["steps"]["quick"]["left"] <= 60
    assert (records["left_out"], records["failed"]) == (["long"], ["broken"])
    assert records["steps"]["broken"]["error"] == "MemoryError: too large"
    assert "long: left out" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done, records = run(tmp_path)
    assert done.returncode == 1
    assert "gpu_check needs a CUDA device" in done.stderr
    assert not records
