"""The lowest versions that pyproject.toml allows: each has one, what installs them reads it, and the README agrees."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from floors import LOWEST_TOOLS, lower_bounds
from folders import ROOT


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def floors() -> dict[str, str]:
    run = [sys.executable, str(ROOT / "scripts" / "floors.py")]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    return dict(line.split("==") for line in printed.splitlines())


def test_every_dependency_is_tested_at_its_lower_bound(project: dict[str, Any], floors: dict[str, str]) -> None:
    for requirement in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["smollm2"]]):
        (bound,) = (part for part in requirement.specifier if part.operator == ">=")
        assert floors[requirement.name] == bound.version, requirement
    assert len(project["dependencies"]) >= 8


def test_every_package_that_is_imported_is_a_dependency(project: dict[str, Any]) -> None:
    """What comes only because another package needs it has no lower bound, and may leave with that package."""
    modules = set()
    for file in (ROOT / "hf_posenc").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                modules.add(node.module.split(".")[0])
    imported = modules - sys.stdlib_module_names - {"hf_posenc"}
    assert {"torch", "transformers"} < imported
    extras = {name: needed for name, needed in project["optional-dependencies"].items() if name != "dev"}
    declared = [*project["dependencies"], *(requirement for needed in extras.values() for requirement in needed)]
    named = {"pyyaml": "yaml"}  # others are imported under their own names
    names = [Requirement(requirement).name for requirement in declared]
    assert imported <= {named.get(name, name.replace("-", "_")) for name in names}


def test_tools_stay_at_the_pinned_versions(project: dict[str, Any], floors: dict[str, str]) -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    bounds = lower_bounds(project["optional-dependencies"]["dev"])
    assert {name: floors[name] for name in LOWEST_TOOLS} == {name: bounds[name] for name in LOWEST_TOOLS}
    tools = bounds.keys() - LOWEST_TOOLS
    assert {name: floors[name] for name in tools if name in pins} == {
        name: pins[name] for name in tools if name in pins
    }
    assert "pytest" in floors
    assert "numpy" not in floors  # what dependencies bring themselves is the newest that fits


@pytest.mark.parametrize("requirement", ["torch", "torch==2.7", "torch<3", "torch>2", "torch!=2.8"])
def test_a_dependency_without_a_lower_bound_is_an_error(requirement: str) -> None:
    with pytest.raises(ValueError, match=f"'{re.escape(requirement)}'.*name>=version"):
        lower_bounds(["numpy>=2", requirement])
    assert lower_bounds(["lm-eval>=0.4.13,<0.5"]) == {"lm-eval": "0.4.13"}


def test_the_documentation_says_the_same(project: dict[str, Any], floors: dict[str, str]) -> None:
    page = " ".join((ROOT / "docs/pages/reference/versions.md").read_text().split())
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in page
    listed = re.search(r"The lowest versions are (.*?)\. ", page)
    assert listed is not None
    said = dict(re.findall(r"(\w+) ([0-9.]*[0-9])", listed[1]))
    names = [Requirement(text).name for text in project["dependencies"]]
    assert {name.lower(): Version(version) for name, version in said.items()} == {
        name: Version(floors[name]) for name in names
    }


def test_only_known_environments_are_made() -> None:
    run = ["bash", "-c", f"source '{ROOT}/scripts/_env.sh'"]
    environment = {**os.environ, "HF_POSENC_VERSIONS": "oldest"}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "HF_POSENC_VERSIONS is pinned, floors or newest, not 'oldest'.\n"
