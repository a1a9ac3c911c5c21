"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, content: bytes | str) -> Path:
    """Write a file, text as UTF-8, so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    return partial.replace(path)
