"""Checks of the folders that a command writes to, before a model is loaded, which takes minutes."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from hf_posenc.errors import InvalidRequestError
from hf_posenc.utils.files import writable_folder


def check_folder(model: str, output: str, may_hold_files: bool = True) -> None:
    """Check a folder to write a model to.

    Raises:
        ValueError: It is a file or the model's own folder, or, unless it may, holds files that are not ours.
    """
    from hf_posenc.checkpoint.extended import UNFINISHED
    from hf_posenc.checkpoint.manifest import MANIFEST

    folder = Path(output).expanduser().resolve()
    if Path(model).expanduser().resolve() == folder:
        raise InvalidRequestError("the output folder is the model's own. Give another, so that the original is kept.")
    writable_folder(output)
    if may_hold_files or not folder.is_dir() or (folder / MANIFEST).is_file():
        return
    if found := sorted(path.name for path in folder.iterdir() if path.name != UNFINISHED):
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
    writable_folder(folder)
    if not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir())
    if found := [name for name in names if not any(fnmatch(name, pattern) for pattern in known)]:
        raise InvalidRequestError(
            f"{str(folder)!r} holds {', '.join(found[:8])}, and a folder of that name is removed at the end. Move "
            "that, or give another output folder."
        )
