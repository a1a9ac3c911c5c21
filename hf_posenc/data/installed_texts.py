"""Texts that are on every machine: the documentation of installed packages, and the source code of Python itself."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_posenc.data.tokens import spread

_CHARS_PER_TOKEN = 8  # at most, of such texts, so that a piece is long enough


def documentation() -> list[str]:
    """Return the descriptions of the installed Python packages, in the order of their names."""
    found: dict[str, str] = {}
    for one in distributions():
        metadata: Any = one.metadata  # an email.message.Message, whose body is the description
        found[metadata["Name"] or ""] = str(metadata.get_payload())
    return [found[name] for name in sorted(found)]


def code() -> list[str]:
    """Return the modules of Python's standard library, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


INSTALLED: Mapping[str, Callable[[], list[str]]] = {"documentation": documentation, "code": code}


def pieces(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> list[torch.Tensor]:
    """Return pieces of texts, from as many different places as there are, int64 ``(length,)`` each.

    Args:
        texts: Shorter ones than a piece are left out.
        tokenizer: Of the model.
        length: Of a piece, in tokens.
        number: Of pieces, at most.
    """
    size = _CHARS_PER_TOKEN * length
    parts = [text[at : at + size] for text in texts for at in range(0, len(text) - size + 1, size)]
    chosen = spread(parts, number)
    encode = (tokenizer(part, return_tensors="pt", add_special_tokens=False, verbose=False) for part in chosen)
    ids = [encoded.input_ids[0][:length] for encoded in encode]
    return [one for one in ids if len(one) == length]
