"""The models and texts of the demo and the tests: a tiny pretrained model and six novels, inside the package."""

from __future__ import annotations

import lzma
from pathlib import Path

from hf_posenc.errors import UnknownNameError

_HERE = Path(__file__).parent

TRAIN_NOVELS = ("emma", "mansfieldpark", "northangerabbey", "prideprejudice", "sensesensibility")
HELD_OUT_NOVEL = "persuasion"


def tiny_model_path() -> Path:
    """Return the folder of the tiny Llama (context 256), readable by plain ``from_pretrained``."""
    return _HERE / "tiny"


def load_novel(name: str) -> str:
    """Return the full text of one Austen novel.

    Args:
        name: One of ``TRAIN_NOVELS`` or ``HELD_OUT_NOVEL``.

    Raises:
        ValueError: There is no such novel in the package.
    """
    path = _HERE / "austen" / f"{name}.txt.xz"
    if not path.is_file():
        raise UnknownNameError("novel", name, sorted((*TRAIN_NOVELS, HELD_OUT_NOVEL)))
    return lzma.decompress(path.read_bytes()).decode("utf-8")
