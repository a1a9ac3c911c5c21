"""``hf-posenc eval`` as a subprocess, on the tiny model of the package: what the tests of killing and sharing use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from folders import ROOT
from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path

CLI = ["-m", "hf_posenc"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *CLI]
MEASURED = ["--context-lengths", "64", "128", "--protocol", "truncated", "sliding_window", "--stride", "32"]


def write_documents(path: Path, count: int) -> Path:
    text = load_novel(HELD_OUT_NOVEL)
    path.write_text("".join(json.dumps({"text": text[at * 1500 : (at + 1) * 1500]}) + "\n" for at in range(count)))
    return path


def command(launcher: list[str], documents: Path, output: Path, *flags: str) -> list[str]:
    words = ["eval", str(tiny_model_path()), "--documents", str(documents), "--output", str(output)]
    return [sys.executable, *launcher, *words, "--device", "cpu", "--dtype", "float32", "--hide-progress", *flags]


def start(words: list[str]) -> subprocess.Popen[str]:
    """One thread each: the order in which numbers are added depends on how many there are."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(words: list[str]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr."""
    process = start(words)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def records_of(output: Path) -> list[dict[str, Any]]:
    """Return the records but for what differs from run to run."""
    records = [json.loads(line) for line in output.read_text().splitlines()]
    differing = ("seconds", "peak_memory_bytes", "command")
    return [{name: record[name] for name in record if name not in differing} for record in records]


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_when(words: list[str], path: Path, count: int) -> None:
    """Start, and kill -9 as soon as so many lines are in a file."""
    process = start(words)
    deadline = time.monotonic() + 240
    while lines(path) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
