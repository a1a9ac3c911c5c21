"""Two processes on the CPU against one that takes twice the steps before each update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_posenc.assets import tiny_model_path

ROOT = Path(__file__).parents[1]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"The {n}th letter came to her sister on a morning in May. " for n in range(600)))
    return path


def run(launcher: list[str], text: Path, output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, str(ROOT / "scripts/finetune.py"), tiny_model_path(), "--documents", text]
    command += [
        "--output-dir",
        output,
        "--device",
        "cpu",
        "--factor",
        "2",
        "--seq-len",
        "256",
        "--token-budget",
        "4096",
    ]
    command += ["--bf16", "false", "--learning-rate", "1e-3", "--eval-lengths", "64", "--eval-documents", "2", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(word) for word in command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def lines(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(), ("--lora",)], ids=["full", "lora"])
def test_two_processes_train_as_one_does(tmp_path: Path, text: Path, kind: tuple[str, ...]):
    alone = run([], text, tmp_path / "one", "--gradient-accumulation-steps", "2", *kind)
    assert alone.returncode == 0, alone.stderr
    both = run(TORCHRUN, text, tmp_path / "two", *kind)
    assert both.returncode == 0, both.stderr
    expected, actual = lines(tmp_path / "one/train_log.jsonl"), lines(tmp_path / "two/train_log.jsonl")
    assert [line["step"] for line in actual] == list(range(1, 9))
    for name in ("loss", "grad_norm", "learning_rate", "tokens_trained"):
        assert [line[name] for line in actual] == pytest.approx([line[name] for line in expected], rel=1e-3), name
    assert actual[-1]["loss"] < actual[0]["loss"]
    records = [lines(tmp_path / name / "results.jsonl") for name in ("one", "two")]
    assert [len(found) for found in records] == [2, 2]  # each once, not once a process
    for one, other in zip(*records, strict=True):
        assert other["perplexity"] == pytest.approx(one["perplexity"], rel=1e-3)


@pytest.mark.slow
def test_an_error_of_the_first_process_stops_all(tmp_path: Path, text: Path):
    (tmp_path / "taken/checkpoint-1").mkdir(parents=True)
    (tmp_path / "taken/checkpoint-1/trainer_state.json").write_text("{}")
    failed = run(TORCHRUN, text, tmp_path / "taken")  # would time out if the other waited
    assert failed.returncode != 0
    assert "holds checkpoints of another program" in failed.stderr


DECIDES = """
import os, sys
from accelerate import PartialState
from hf_posenc.processes import from_main

PartialState(cpu=True)
def fail():
    raise ValueError("no")
said = [from_main(lambda: os.environ["RANK"])]
try:
    from_main(fail)
except (ValueError, RuntimeError) as error:
    said.append(f"{type(error).__name__}: {error}")
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write("; ".join(said))
"""


@pytest.mark.slow
def test_the_first_process_decides_for_all(tmp_path: Path):
    script = tmp_path / "decides.py"
    script.write_text(DECIDES)
    command = [sys.executable, *TORCHRUN, str(script), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    assert (tmp_path / "0").read_text() == "0; ValueError: no"
    assert (tmp_path / "1").read_text() == "0; RuntimeError: the main process stopped this run. ValueError: no"
