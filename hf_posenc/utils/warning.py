"""Warnings that name the user's line, however many functions of this package lie between."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"


def warn_user(message: str) -> None:
    """Warn with the file and line outside of this package that led here.

    Python's default filter shows a warning once for each line that it names, so two models that a user patches on two
    lines each get theirs. ``warnings.warn`` does this itself (``skip_file_prefixes``) from Python 3.12 on.

    Args:
        message: What may not be what the user expects, and what to do.
    """
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
