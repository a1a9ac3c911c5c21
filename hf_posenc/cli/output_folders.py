"""Checks of the folders that a command writes to, before a model is loaded, which takes minutes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from hf_posenc.errors import InvalidRequestError


def check_writable(output: str) -> None:
    """Check that a folder can be made, or be written to where it exists.

    Raises:
        ValueError: It is a file, or below one, or this user may not write there.
    """
    folder = Path(output).expanduser().resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise InvalidRequestError(
            f"{str(existing)!r} is a file, so {output!r} cannot be a folder. Give another to write to."
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidRequestError(
            f"{str(existing)!r} cannot be written to by this user. Give another folder than {output!r}."
        )


def check_folder(model: str, output: str, may_hold_files: bool = True) -> None:
    """Check a folder to write a model to.

    Raises:
        ValueError: It is a file or the model's own folder, or, unless it may, holds files that are not ours.
    """
    from hf_posenc.checkpoint.manifest import MANIFEST

    folder = Path(output).expanduser().resolve()
    if Path(model).expanduser().resolve() == folder:
        raise InvalidRequestError("the output folder is the model's own. Give another, so that the original is kept.")
    check_writable(output)
    if may_hold_files or not folder.is_dir() or (folder / MANIFEST).is_file():
        return
    if found := sorted(path.name for path in folder.iterdir()):
        raise InvalidRequestError(
            f"folder {output!r} is not empty and was not written by hf-posenc; it holds {', '.join(found[:8])}. "
            "Give a new folder, so that nothing is mixed up."
        )


def check_work_folder(folder: Path, known: Sequence[str]) -> None:
    """Check a folder that is removed with all it holds at the end of a command.

    Args:
        folder: Need not exist.
        known: Patterns of the names of the command's own files.

    Raises:
        ValueError: It is a file, or holds others.
    """
    check_writable(str(folder))
    if not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir())
    if found := [name for name in names if not any(fnmatch(name, pattern) for pattern in known)]:
        raise InvalidRequestError(
            f"{str(folder)!r} holds {', '.join(found[:8])}, and a folder of that name is removed at the end. Move "
            "that, or give another output folder."
        )
