"""Which package may import which: what is below never knows what is above it."""

from __future__ import annotations

import ast
from pathlib import Path

import hf_posenc

PACKAGE = Path(hf_posenc.__file__).parent
EVERYONES = {"errors", "settings", "spec", "utils", "version"}
# Each package with those it may import besides; all of them are further up, so that there is no circle.
MAY_IMPORT = {
    "errors": "",
    "version": "",
    "utils": "",
    "spec": "",
    "settings": "spec",
    "assets": "",
    "methods": "",
    "families": "",
    "data": "assets",
    "attention": "methods families",
    "encodings": "methods families attention",
    "patching": "methods families attention encodings",
    "checkpoint": "methods families attention encodings patching",
    "exports": "methods families patching checkpoint",
    "doctor": "methods families attention patching checkpoint",
    "evaluation": "methods families data attention patching checkpoint",
    "retrieving": "assets families checkpoint evaluation",
    "serving": "assets methods patching checkpoint exports evaluation",
    "reporting": "methods attention evaluation",
    "publishing": "methods families data patching checkpoint exports evaluation reporting",
    "mixtures": "data",
    "training": "methods families data attention encodings patching checkpoint evaluation retrieving publishing "
    "mixtures",
    "fitting": "methods families data attention patching checkpoint evaluation retrieving",
    "planning": "methods families attention patching checkpoint evaluation training fitting",
    "explain": "methods families attention patching checkpoint reporting",
    "comparing": "methods families patching evaluation retrieving",
    "cli": "assets methods families data patching checkpoint exports doctor evaluation retrieving publishing "
    "training fitting serving planning reporting explain comparing",
    "vllm_plugin": "methods exports",
    "__main__": "cli",
    "__init__": "checkpoint",
}


def imports() -> set[tuple[str, str]]:
    """Return (file, imported package or module) for each import of hf_posenc, inside functions too."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for_types = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        skipped = {id(node) for branch in for_types for node in ast.walk(branch)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in skipped:
                names = [f"{node.module}.{one.name}" for one in node.names]
            elif isinstance(node, ast.Import) and id(node) not in skipped:
                names = [one.name for one in node.names]
            else:
                continue
            ours = {name.split(".")[1] for name in names if name.startswith("hf_posenc.")}
            found |= {(file.relative_to(PACKAGE).as_posix(), name) for name in ours}
    return found


def package_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def test_imports_go_one_way() -> None:
    edges = {(file, name) for file, name in imports() if name != package_of(file)}
    allowed = {
        name: {*words.split(), *(EVERYONES if name not in EVERYONES else {"errors"})}
        for name, words in MAY_IMPORT.items()
    }
    assert {(file, name) for file, name in edges if name not in allowed[package_of(file)]} == set()


def test_the_table_has_no_circle_and_nothing_unused() -> None:
    known = list(MAY_IMPORT)
    used = {(package_of(file), name) for file, name in imports()}
    for number, (package, words) in enumerate(MAY_IMPORT.items()):
        assert set(words.split()) <= set(known[:number]), package
        assert {(package, name) for name in words.split()} <= used


def test_no_two_files_share_a_name() -> None:
    names = [file.name for file in PACKAGE.rglob("*.py")]
    assert {name for name in names if names.count(name) > 1} <= {"__init__.py", "base.py", "config.py"}


def test_tests_import_no_private_name() -> None:
    private = {
        f"{file.name}: {node.module}.{alias.name}"
        for file in Path(__file__).parents[1].rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hf_posenc.")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    }
    assert private == set()
