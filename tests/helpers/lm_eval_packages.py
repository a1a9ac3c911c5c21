"""lm-eval and what it needs besides our own packages: 340 MB, so not among those that every test run installs."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from folders import ROOT


def find_lm_eval() -> Path:
    """Make ``import lm_eval`` work here, and return the folder that it lies in, for the path of another process.

    Where it is not installed, it is put into a cache folder, once, and last on the path: our own packages come first.
    """
    if find_spec("lm_eval") is None:
        home = ROOT / ".cache" / f"lm-eval-{_version()}-py{sys.version_info.major}.{sys.version_info.minor}"
        if not (home / "ready").exists():
            _install(home)
        sys.path.append(str(home))
        importlib.invalidate_caches()
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


def _version() -> str:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return pins["lm-eval"]


def _install(home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    wanted = ["-c", str(ROOT / "constraints.txt"), "lm-eval"]
    plan = subprocess.run([*pip, *wanted, "--dry-run", "--report", "-"], check=True, capture_output=True, text=True)
    missing = [one["metadata"] for one in json.loads(plan.stdout)["install"]]
    pins = [f"{one['name']}=={one['version']}" for one in missing]
    subprocess.run([*pip, "--no-deps", "--target", str(home), *pins], check=True)
    (home / "ready").touch()
