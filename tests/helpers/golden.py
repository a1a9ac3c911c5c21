"""Record what a checkout of hf_posenc does, and compare two recordings to the bit.

    python tests/helpers/golden.py record --package CHECKOUT --output BEFORE
    python tests/helpers/golden.py record --package OTHER_CHECKOUT --output AFTER
    python tests/helpers/golden.py compare BEFORE AFTER

Both recordings have to be made on one machine with one Python environment: everything runs on the CPU, each process
with one thread, on small random models and on the tiny model of the package. Only what ``hf_posenc`` itself exports and
the command ``hf-posenc`` are used, so that the package can be laid out anew between the two. What may be renamed in
between stands in the tables of ``golden_cases``; differences that were agreed on are in the tables of ``compare``.
``golden_jobs`` does the recording, a process for each job.

``compare`` exits with 1 if something differs, and with 2 if the recordings cannot be compared.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# ---- What has been agreed on: what compare does not report ----

# (regular expression, replacement) for the paths of the first recording, and for its texts.
RENAMED_PATHS: list[tuple[str, str]] = []
RENAMED_WORDS: list[tuple[str, str]] = []
# Regular expressions of paths that may differ, with the reason.
MAY_DIFFER: dict[str, str] = {}

# Below these parts of a path are words for people; `compare --numbers` leaves them out.
_WORDS = re.compile(r"/(words|scored|command|.*\.(md|html|txt))(/|$)")
_SHOWN_LINES = 40  # of a text's difference


def compare(before: Path, after: Path, *, numbers: bool = False, only: Sequence[str] = ()) -> list[str]:
    """Return the differences of two recordings, each with its path.

    Args:
        before: Folder that ``record`` wrote.
        after: Another one.
        numbers: Leave out words for people.
        only: Jobs to look at, where a recording does not have all; none given: all, which have to be the same.

    Raises:
        ValueError: One is not a recording, or they were made in different environments.
    """
    first, second = _read(before, only), _read(after, only)
    checked = {"environment.json": "other versions or another machine", "about.json": "other jobs"}
    for name in list(checked)[: 1 if only else 2]:
        one, other = (json.loads((folder / name).read_text())["comparable"] for folder in (before, after))
        if one != other:
            raise ValueError(f"recordings of {checked[name]} cannot be compared: {one}, {other}.")
    old = {_renamed(path, RENAMED_PATHS): _renamed(value, RENAMED_WORDS) for path, value in first.items()}
    paths = [
        path
        for path in sorted(old.keys() | second.keys())
        if not any(re.search(pattern, path) for pattern in MAY_DIFFER) and not (numbers and _WORDS.search(path))
    ]
    differences = {path: _difference(old[path], second[path]) for path in paths if path in old and path in second}
    differences = {path: what for path, what in differences.items() if what}
    differences |= _alone([path for path in paths if path not in second], old, second, "missing in the second, was")
    differences |= _alone([path for path in paths if path not in old], second, old, "added in the second, is")
    return [f"{path}: {differences[path]}" for path in sorted(differences)]


def _alone(paths: Sequence[str], there: dict[str, Any], other: dict[str, Any], what: str) -> dict[str, str]:
    """Tell of paths that one recording has alone; once for all of a folder that the other one has nothing of."""
    folders = other.keys() | {parent for path in other for parent in _parents(path)}
    of_folder: dict[str, list[str]] = {}
    for path in paths:
        top = next((parent for parent in _parents(path) if parent not in folders), path)
        of_folder.setdefault(top, []).append(path)
    return {
        top: f"{what} {_short(there[top]) if found == [top] else f'{len(found)} values'}"
        for top, found in of_folder.items()
    }


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _read(folder: Path, only: Sequence[str]) -> dict[str, Any]:
    """Return all leaves of a recording by path: scalars, and lists of scalars."""
    files = {file.stem: file for file in sorted((folder / "jobs").glob("*.json"))}
    if not files or not (folder / "about.json").is_file():
        raise ValueError(f"{folder} is not a finished recording: `python tests/helpers/golden.py record` writes one.")
    if lacking := set(only) - files.keys():
        raise ValueError(f"{folder} has no job {', '.join(sorted(lacking))}. It has: {', '.join(files)}.")
    jobs = {name: json.loads(files[name].read_text(encoding="utf-8")) for name in only or files}
    return dict(leaf for name, value in jobs.items() for leaf in _leaves(name, value))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(f"{path}/{key}", one)
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        yield f"{path}/count", len(value)
        for index, one in enumerate(value):
            yield from _leaves(f"{path}/{index}", one)
    else:
        yield path, value


def _renamed(value: Any, table: Sequence[tuple[str, str]]) -> Any:
    if isinstance(value, list):
        return [_renamed(one, table) for one in value]
    for pattern, replacement in table if isinstance(value, str) else ():
        value = re.sub(pattern, replacement, value)
    return value


def _same(one: Any, other: Any) -> bool:
    """Say whether two leaves are the same to the bit, so -0.0 is not 0.0, and 1 is not 1.0 or true."""
    return type(one) is type(other) and repr(one) == repr(other)


def _difference(one: Any, other: Any) -> str | None:
    if _same(one, other):
        return None
    if _is_number(one) and _is_number(other):
        return f"{one!r} -> {other!r}{_relative([one], [other])}"
    if isinstance(one, list) and isinstance(other, list):
        if all(map(_is_number, [*one, *other])) and len(one) == len(other):
            changed_at = [index for index, pair in enumerate(zip(one, other, strict=True)) if not _same(*pair)]
            first = changed_at[0]
            changed = f"{one[first]!r} -> {other[first]!r}{_relative(one, other)}"
            return f"{len(changed_at)} of {len(one)} numbers, first at {first}: {changed}"
        lines = difflib.unified_diff(list(map(str, one)), list(map(str, other)), lineterm="", n=0)
        shown = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        more = [f"... {len(shown) - _SHOWN_LINES} more"] if len(shown) > _SHOWN_LINES else []
        return "\n    ".join(["other lines", *shown[:_SHOWN_LINES], *more])
    return f"{_short(one)} -> {_short(other)}"


def _relative(one: list[float], other: list[float]) -> str:
    scale = max(map(abs, one))
    apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
    return f" (relative {apart / scale:.1e})" if scale and math.isfinite(apart / scale) else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def record(package: Path, output: Path, only: Sequence[str], processes: int) -> None:
    """Record a checkout, in a process of its own that imports ``hf_posenc`` from there.

    Raises:
        ValueError: There is no checkout, or ``output`` is not empty.
        CalledProcessError: A job did not come to its end.
    """
    package, output = package.resolve(), output.resolve()
    if not (package / "hf_posenc" / "__init__.py").is_file() or not (package / "pyproject.toml").is_file():
        raise ValueError(f"{package} is not a checkout of hf_posenc.")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty. Give a new folder.")
    output.mkdir(parents=True, exist_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"PYTHONPATH": str(package), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "120"}
    env |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg", "NO_COLOR": "1", "TZ": "UTC"}
    env |= {"HF_HOME": str(output / "cache"), "LC_ALL": "C.UTF-8"}
    jobs = Path(__file__).with_name("golden_jobs.py")
    words = [sys.executable, str(jobs), str(package), str(output), str(processes), *only]
    subprocess.run(words, env=env, check=True)


def entry_point(package: Path) -> str:
    """Return ``module:function`` of the command ``hf-posenc`` of a checkout."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["project"]["scripts"]["hf-posenc"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record what a checkout does, or compare two recordings.")
    commands = parser.add_subparsers(dest="task", required=True)
    recording = commands.add_parser("record", help="run a checkout and write down what it does")
    recording.add_argument("--package", type=Path, required=True, help="a checkout of hf_posenc")
    recording.add_argument("--output", type=Path, required=True, help="a new folder")
    recording.add_argument("--only", nargs="*", default=[], help="jobs, such as llama perplexity; default: all")
    recording.add_argument("--processes", type=int, default=2, help="jobs at a time, each of one thread")
    comparing = commands.add_parser("compare", help="print what differs; exits with 1 if something does")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--numbers", action="store_true", help="leave out words for people")
    comparing.add_argument("--only", nargs="*", default=[], help="jobs to look at; default: all")
    given = parser.parse_args(argv)
    try:
        if given.task == "record":
            record(given.package, given.output, given.only, given.processes)
            return 0
        differences = compare(given.before, given.after, numbers=given.numbers, only=given.only)
    except (ValueError, OSError) as error:
        print(f"golden: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError:
        return 2
    words = sum(bool(_WORDS.search(difference.partition(": ")[0])) for difference in differences)
    print("\n".join([*differences, f"{len(differences)} differences, {words} of them in words for people"]))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
