"""The files that GitHub and citation tools read can be read, and say the version of the package."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hf_posenc.version import __version__

ROOT = Path(__file__).parents[2]
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def test_the_citation_names_the_version_and_the_licence_of_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert (cited["version"], cited["license"]) == (__version__, "Apache-2.0")


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_requires(form: Path) -> None:
    read = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= read.keys()
    ids = [field["id"] for field in read["body"]]
    assert len(set(ids)) == len(ids)
    for field in read["body"]:
        assert field["type"] in {"textarea", "input"}
        assert field["attributes"]["label"]


def test_lines_of_the_changelog_are_short() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 120
