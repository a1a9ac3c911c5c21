"""Environments with other versions of Transformers, made once in a cache folder."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from folders import ROOT

CACHE = ROOT / ".cache" / "transformers-versions"


def python_with(version: str) -> Path:
    """Return the Python of an environment that has the given Transformers over this one's packages."""
    home = CACHE / version
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True, clear=True)
        ours = next(p for p in sys.path if p.endswith("site-packages"))
        site = next((home / "lib").glob("python*")) / "site-packages"
        needs = ["huggingface_hub<1.0", "tokenizers<0.23"] if version.startswith("4") else []
        command = [python, "-m", "pip", "install", "-q", f"transformers=={version}", "numpy", "safetensors", *needs]
        subprocess.run(command, check=True)
        (site / "ours.pth").write_text(ours + "\n")  # torch; what is installed above comes first
        (home / "ready").touch()
    return python
