"""Checkpoints that are whole or not there: written aside, sealed by every file's checksum, then moved into place."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

SEAL = "checkpoint.json"  # written last; without it a folder is no checkpoint
PARTIAL = "checkpoints.partial"  # where one is being written
_PART = 2**24  # bytes of a file that are read at once


def by_step(folder: Path) -> dict[int, Path]:
    """Return what looks like a checkpoint of Trainer, whole or not, by its step, rising."""
    found = {path.name.rpartition("-")[2]: path for path in folder.glob("checkpoint-*") if path.is_dir()}
    return {int(step): found[step] for step in sorted((step for step in found if step.isdecimal()), key=int)}


def last_checkpoint(folder: Path, *, contents: bool = True) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that can be gone on from, None if there is none, and what is wrong with newer ones.

    Of those newer, each is named with its problem, newest first. ``contents`` as for ``problem_of``.
    """
    damaged: list[str] = []
    for path in reversed(by_step(folder).values()):
        problem = problem_of(path, contents=contents)
        if problem is None:
            return path, damaged
        damaged.append(f"{path} ({problem})")
    return None, damaged


def problem_of(checkpoint: Path, *, contents: bool = True) -> str | None:
    """Say what keeps a checkpoint from being whole, None if nothing does.

    Args:
        checkpoint: Its folder.
        contents: Read every file, about a second for a gigabyte: a byte that changed in the middle of the weights is
            trained on without a word. Otherwise only files that are missing or cut off are found.
    """
    try:
        sealed = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"it was not written to its end, or by an older hf_posenc: it has no {SEAL}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{SEAL} cannot be read ({error})"
    for name, (size, checksum) in sealed.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if (there := file.stat().st_size) != size:
            return f"{name} has {there:,} of {size:,} bytes"
        if contents and _checksum(file) != checksum:
            return f"{name} is not what was written"
    return None


def seal(checkpoint: Path) -> None:
    """Write down what a finished checkpoint holds, once all of it is on the disk, not only in memory."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    for file in files:
        _to_disk(file)
    held = {file.relative_to(checkpoint).as_posix(): (file.stat().st_size, _checksum(file)) for file in files}
    (checkpoint / SEAL).write_text(json.dumps({"files": held}, indent=2) + "\n", encoding="utf-8")
    _to_disk(checkpoint / SEAL)


def move_into_place(folder: Path, step: int, kept: int | None) -> Path:
    """Seal the checkpoint in ``folder/checkpoints.partial``, move it into ``folder``, and drop what it makes needless.

    What is newer than this step is of a future that is now another one.

    Args:
        folder: Of the run.
        step: Of the checkpoint.
        kept: How many whole ones up to this step are kept, the last ones; None keeps all.
    """
    written = folder / PARTIAL / f"checkpoint-{step}"
    seal(written)
    place = folder / written.name
    shutil.rmtree(place, ignore_errors=True)  # a damaged one
    os.replace(written, place)
    clear_partial(folder)
    whole = [path for at, path in by_step(folder).items() if at <= step and problem_of(path, contents=False) is None]
    for path in by_step(folder).values():
        if path not in whole[-(kept or len(whole)) :]:
            shutil.rmtree(path, ignore_errors=True)
    return place


def clear_partial(folder: Path) -> None:
    """Remove what a writer that was killed, or that found the disk full, left behind."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as opened:
        while part := opened.read(_PART):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _to_disk(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
