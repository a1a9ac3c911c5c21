"""Start fine-tuning runs in two processes on the CPU, and compare them with a run in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from folders import HELPERS

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
# What `accelerate launch` sets for hf_posenc/utils/accelerate_configs/fsdp2.yaml; test_launching holds them against it.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
CONTEXT_PARALLEL = {**FSDP2, "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}


def zero(stage: int) -> dict[str, str]:
    """Return what `accelerate launch` sets for hf_posenc/utils/accelerate_configs/zero{stage}.yaml, and for a CPU."""
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "DS_ACCELERATOR": "cpu",
    }


@dataclass
class Run:
    """One run of ``finetune`` on a tiny model.

    Attributes:
        folder: Its output_dir.
        settings: Of the run, besides those of ``tiny_runs.config``.
        model: Of ``make_tiny_llama``; with ``path``, a checkpoint to load instead.
        dtype: Of its weights.
        documents: Lengths of documents of random tokens; empty for those of ``tiny_runs``.
        killed_at: Step after which all processes give up; 0 for none.
        attention: How processes that share sequences attend: ``gathered`` sees all of a sequence, ``cut`` only the
            process' own part of it.
        masked: Stretches of each document do not count in the loss, of some documents more than of others.
    """

    folder: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: {"tie_word_embeddings": True})
    dtype: str = "float32"
    documents: list[int] = field(default_factory=list)
    killed_at: int = 0
    attention: str = "own"
    masked: bool = False


def in_two_processes(file: Path, runs: list[Run], environment: dict[str, str]) -> None:
    """Do the runs one after the other, in two processes (see ``one_of_several.do``)."""
    file.write_text(json.dumps([asdict(run) for run in runs]))
    command = [*LAUNCHER, str(HELPERS / "one_of_several.py"), str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]


def log_of(run: Run) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(run.folder, "train_log.jsonl").read_text().splitlines()]


def returned_by(run: Run, process: int = 0) -> dict[str, Any]:
    returned: dict[str, Any] = torch.load(Path(run.folder, f"returned-{process}.pt"))
    return returned


def assert_same_steps(run: Run, expected: Run, rel: float = 1e-4) -> None:
    """Assert that two runs had the same losses, gradient norms, rates and counts at each step."""
    lines, others = log_of(run), log_of(expected)
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for name in ("loss", "grad_norm", "learning_rate", "tokens_trained"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in others], rel=rel), name
    assert lines[-1]["loss"] < 0.97 * lines[0]["loss"]  # something was learned, so equal is not equal by standing still
