"""Files that are written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_posenc.errors import InvalidRequestError


def read_json(file: Path) -> Any:
    """Return what is in a JSON file.

    Raises:
        ValueError: It is damaged.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # which a wrong encoding is too
        raise InvalidRequestError(f"{str(file)!r} is not JSON: {error}") from error


def write_whole(path: Path, content: bytes | str) -> Path:
    """Write a file, text as UTF-8, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    return partial.replace(path)
