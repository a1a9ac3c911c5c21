"""The wheel: what is in it, and that it works where nothing of the repository is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from folders import ROOT
from wheels import build_wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("build"))


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"hf_posenc", "hf_posenc-0.1.0.dist-info"}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "hf_posenc").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources | {"hf_posenc/patches/__init__.py"}
    presets = {f"hf_posenc/patches/{p.name}" for p in (ROOT / "patches").glob("*.toml")}
    assert {name for name in names if name.endswith(".toml")} == presets | {
        "hf_posenc/families/exceptions.toml",
        *(p.relative_to(ROOT).as_posix() for p in (ROOT / "hf_posenc/methods").rglob("*.toml")),
    }
    assert "hf_posenc/families/families.json" in names
    templates = {p.relative_to(ROOT).as_posix() for p in (ROOT / "hf_posenc").glob("*/templates/*")}
    assert {name for name in names if "/templates/" in name} == templates
    assert {"hf_posenc/py.typed", "hf_posenc/assets/tiny/model.safetensors"} <= set(names)
    assert {"hf_posenc/assets/tiny/tokenizer.json", "hf_posenc/assets/austen/emma.txt.xz"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert wheel.stat().st_size < 16e6


def test_wheel_works_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    program = (
        "import hf_posenc, hf_posenc.assets as assets; "
        "print(hf_posenc.__file__); "
        "from hf_posenc.reporting.page import html_page; "
        "assert '<h1>Title</h1>' in html_page('Title', []); "
        "assert (assets.tiny_model_path() / 'config.json').is_file(); "
        "assert len(assets.load_novel(assets.HELD_OUT_NOVEL)) > 400_000"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    listings = [["-m", "hf_posenc", "list", what] for what in ("methods", "presets")]
    for command in (["-c", program], *listings):
        run = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path / "empty",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        if command[0] == "-c":
            assert run.stdout.startswith(str(tmp_path / "site"))


def test_presets_are_read_in_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    for name in ("hf_posenc", "patches"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.xz", "*.safetensors")
        )
    program = (
        "import sys; "
        "sys.meta_path[:] = [one for one in sys.meta_path if '__editable__' not in repr(one)]; "
        "from hf_posenc.cli.main import main; "
        "import hf_posenc; print(hf_posenc.__file__); "
        "main(['list', 'presets'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout.startswith(str(tmp_path)), run.stderr
    assert "deepseek-v2-yarn-40x" in run.stdout


_METRIC = """
import socket

def no_network(*args, **kwargs):
    raise AssertionError(f"reached for the network: {args}")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = no_network
import evaluate
from hf_posenc.assets import tiny_model_path
from hf_posenc.evaluation import METRIC, perplexity
from hf_posenc.checkpoint.loading import load_model

model, tokenizer = load_model(tiny_model_path(), device="cpu")
texts = ["It is a truth universally acknowledged, that a single man must be in want of a wife. " * 4] * 2
request = {"tokenizer": tokenizer, "context_lengths": [16, 48], "progress": False}
result = evaluate.load(METRIC).compute(predictions=texts, model=model, **request)
assert result["perplexities"] == {one.context_length: one.perplexity for one in perplexity(model, texts, **request)}
print(METRIC, result["perplexities"])
"""


@pytest.mark.slow
def test_evaluate_loads_the_metric_of_the_wheel_without_network_or_litter(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "HF_HOME": str(tmp_path / "home")}
    environment |= {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path / "empty")}  # whatever goes there shows too
    environment.pop("XDG_CACHE_HOME", None)
    command = [sys.executable, "-W", "error", "-c", _METRIC]
    run = subprocess.run(command, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(tmp_path / "site"))
    assert list((tmp_path / "empty").iterdir()) == []


def test_constraints_fit_the_requirements() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["smollm2"],
    ]
    for requirement in map(Requirement, wanted):
        if requirement.name != "setuptools":  # the build backend; any that is new enough does
            assert pins[requirement.name] in requirement.specifier, requirement


@pytest.mark.parametrize("name", ["test", "check", "demo", "fetch_smollm2"])
def test_scripts_can_be_run(name: str) -> None:
    assert os.access(ROOT / "scripts" / name, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / name)], check=True)
