"""The wheel of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from folders import ROOT


def build_wheel(folder: Path) -> Path:
    """Build from a copy, so that build/ and egg-info are left nowhere, and none of an earlier build is packed."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("hf_posenc", "scripts", "tests", "patches"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.partial"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist")]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (folder / "dist").glob("*.whl")
    return path
