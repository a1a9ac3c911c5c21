"""Files that are written whole or not at all, and folders that can be written to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: It is damaged, or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # which a wrong encoding is too
        raise InvalidRequestError(f"{str(file)!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequestError(f"{str(file)!r} holds no JSON object, but {str(content)[:40]!r}.")
    return content


def writable_folder(output: str | Path) -> Path:
    """Return a folder that can be written to, or made; ``~`` is the user's own.

    Raises:
        ValueError: It is a file, or below one, or this user may not write there.
    """
    folder = Path(output).expanduser()
    whole = folder.resolve()
    # Path.exists raises where a folder above may not be entered.
    existing = next(path for path in (whole, *whole.parents) if os.path.exists(path))
    if not existing.is_dir():
        raise InvalidRequestError(
            f"{str(output)!r} cannot be a folder, because {str(existing)!r} is a file. Give another path to write to."
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidRequestError(
            f"{str(existing)!r} cannot be written to by this user. Give another folder than {str(output)!r}."
        )
    return folder


def write_whole(path: Path, content: bytes | str) -> Path:
    """Write a file, text as UTF-8, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
    return partial.replace(path)


def write_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write tensors as a safetensors file, whole or not at all.

    Raises:
        OSError: It cannot be written, as on a full disk.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = file.with_name(file.name + ".partial")
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial)
    except SafetensorError as error:  # which a full disk is there
        raise OSError(f"{str(file)!r} cannot be written: {error}") from error
    partial.replace(file)
