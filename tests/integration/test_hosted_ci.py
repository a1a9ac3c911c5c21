"""The definitions of the hosted CI and of pre-commit: they call what is there, with versions that we support.

Neither can be run by a test. Their syntax was checked by actionlint and ``pre-commit validate-config``.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from folders import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
PRE_COMMIT = ROOT / ".pre-commit-config.yaml"
JOBS: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
RUNS = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
# The first torch that has wheels for each Python that is newer than the oldest supported one.
FIRST_TORCH = {"3.12": Version("2.2"), "3.13": Version("2.5"), "3.14": Version("2.9")}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def lines_that_run(script: Path) -> str:
    lines = script.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def combinations() -> list[tuple[str, str, bool]]:
    """Return Python, dependencies and whether it may fail, of each job of the matrix, as GitHub expands it."""
    matrix = JOBS["test"]["strategy"]["matrix"]
    left_out = [(one["python"], one["dependencies"]) for one in matrix.get("exclude", [])]
    crossed = itertools.product(matrix["python"], matrix["dependencies"], matrix["experimental"])
    added = [(one["python"], one["dependencies"], one["experimental"]) for one in matrix["include"]]
    return [one for one in crossed if one[:2] not in left_out] + added


@pytest.mark.parametrize("command", RUNS)
def test_every_command_is_a_script_that_knows_its_flags(command: str) -> None:
    path, *flags = shlex.split(command)
    script = ROOT / path
    assert path.startswith("./scripts/")
    assert os.access(script, os.X_OK)
    for flag in flags:
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", lines_that_run(script)), f"{path} does not know {flag}"


def test_every_set_of_dependencies_is_tested_and_the_slow_tests_at_night() -> None:
    steps = {step["if"]: step["run"] for step in JOBS["test"]["steps"] if "run" in step}
    assert steps == {
        "matrix.dependencies == 'floors'": "./scripts/test --floors",
        "matrix.dependencies == 'pinned'": "./scripts/test",
        "matrix.dependencies == 'newest'": "./scripts/test --newest",
    }
    assert {dependencies for _, dependencies, _ in combinations()} == {"floors", "pinned", "newest"}
    assert [step["run"] for step in JOBS["slow"]["steps"] if "run" in step] == ["./scripts/test --slow"]
    assert "'schedule'" in JOBS["slow"]["if"]
    events = yaml.load(WORKFLOW.read_text(encoding="utf-8"), yaml.BaseLoader)["on"]  # YAML 1.1 reads `on` as true
    assert set(events) == {"push", "pull_request", "schedule", "workflow_dispatch"}


def test_pythons_are_those_that_the_project_supports() -> None:
    supported = SpecifierSet(project()["requires-python"])
    required = sorted({Version(python) for python, _, may_fail in combinations() if not may_fail})
    assert all(version in supported for version in required)
    assert Version(f"3.{required[0].minor - 1}") not in supported, "the oldest supported Python is not tested"
    assert [version.minor for version in required] == list(range(required[0].minor, required[-1].minor + 1))
    used = {step["with"].get("python-version") for job in JOBS.values() for step in job["steps"] if "with" in step}
    assert used == {None, "${{ matrix.python }}", str(required[0])}  # checkout takes none


def test_floors_are_tested_on_every_python_that_has_wheels_of_the_oldest_torch() -> None:
    (torch,) = (one for one in map(Requirement, project()["dependencies"]) if one.name == "torch")
    (floor,) = (Version(bound.version) for bound in torch.specifier if bound.operator == ">=")
    pythons = {python for python, _, may_fail in combinations() if not may_fail}
    expected = {python for python in pythons if floor >= FIRST_TORCH.get(python, Version("0"))}
    assert {python for python, dependencies, _ in combinations() if dependencies == "floors"} == expected


def test_the_scripts_take_the_python_of_the_matrix() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert workflow["env"]["HF_POSENC_PYTHON"] == "python"  # setup-python puts its own first on PATH
    assert "${HF_POSENC_PYTHON" in lines_that_run(ROOT / "scripts" / "_env.sh")


def test_jobs_are_limited_in_rights_and_time_and_their_actions_have_a_version() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    for name, job in JOBS.items():
        assert 0 < job["timeout-minutes"] <= 360, name
        assert "permissions" not in job
        for step in job["steps"]:
            assert "run" in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])


def test_pre_commit_runs_what_scripts_check_runs_with_the_tools_of_the_environment() -> None:
    (repository,) = yaml.safe_load(PRE_COMMIT.read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local"
    entries = [shlex.split(hook["entry"]) for hook in repository["hooks"]]
    assert all(entry[:2] == [".venv/bin/python", "-m"] for entry in entries)
    tools = [[word for word in entry[2:] if not word.startswith("-")] for entry in entries]
    check = re.findall(r'"\$PYTHON" -m (.*?) \|\|', lines_that_run(ROOT / "scripts" / "check"))
    assert tools == [[word for word in line.split() if word.isalpha()] for line in check]
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert {tool for tool, *_ in tools} <= set(pinned)
    assert all(hook["language"] == "system" for hook in repository["hooks"])


def test_nothing_says_where_packages_come_from() -> None:
    for path in (WORKFLOW, PRE_COMMIT):
        text = path.read_text(encoding="utf-8")
        assert "://" not in text
        assert "index-url" not in text
