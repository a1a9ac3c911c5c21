"""The shell scripts: which folder they work in, whatever folder they are called from."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from folders import SCRIPTS


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of scripts only, whose Python says where it is and what it was given."""
    for name in ("HF_POSENC_PYTHON", "HF_POSENC_VERSIONS"):  # which made the environment that these tests run in
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "repo"
    shutil.copytree(SCRIPTS, folder / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$PWD"\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    (folder / ".venv" / ".hf_posenc_installed").touch()
    return folder


def run(script: str, *words: str, cwd: Path) -> list[str]:
    return subprocess.run([script, *words], cwd=cwd, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_demo_writes_where_its_caller_is(repository: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    ran_in, *words = run("../repo/scripts/demo", "--output-dir", "mine", cwd=elsewhere)
    assert ran_in == str(elsewhere)
    assert words[-2:] == ["--output-dir", "mine"]  # the last one counts
    assert str(repository / "outputs" / "demo") in run(str(repository / "scripts" / "demo"), cwd=elsewhere)


def test_the_demo_from_the_root_writes_to_outputs(repository: Path) -> None:
    ran_in, *words = run("./scripts/demo", cwd=repository)
    assert ran_in == str(repository)
    assert words == ["-P", "-m", "hf_posenc", "demo", "--output-dir", "outputs/demo"]


def test_other_scripts_run_in_the_repository(repository: Path, tmp_path: Path) -> None:
    test = run(str(repository / "scripts" / "test"), "-k", "x", cwd=tmp_path)
    assert test == [str(repository), "-m", "pytest", "-n", "auto", "-k", "x"]
    fetch = run(str(repository / "scripts" / "fetch_smollm2"), "model", cwd=tmp_path)
    assert fetch == [str(repository), "scripts/fetch_smollm2.py", str(tmp_path / "model")]
