"""The checkout that ``golden_jobs`` records: its ``hf_posenc`` is imported, from there and from nowhere else."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE, OUTPUT = (Path(word) for word in sys.argv[1:3])
WORK = OUTPUT / "work"


class _PackageDirs(importlib.abc.MetaPathFinder):
    """Finds the packages that the checkout keeps elsewhere (``package-dir``), before an installed one is used."""

    def __init__(self) -> None:
        recorded = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))
        self.folders = {
            name: PACKAGE / path for name, path in recorded["tool"]["setuptools"].get("package-dir", {}).items()
        }

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if not name or name not in self.folders:
            return None
        folder = self.folders[name]
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


sys.meta_path[:] = [one for one in sys.meta_path if "__editable__" not in getattr(one, "__module__", "")]
sys.meta_path.insert(0, _PackageDirs())
import hf_posenc  # noqa: E402,F401


def check_package() -> None:
    """Raise if a module of the package came from anywhere but the checkout."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] == "hf_posenc" and (file is None or not Path(file).is_relative_to(PACKAGE)):
            raise RuntimeError(f"{name} was imported from {file}, not from {PACKAGE}.")
