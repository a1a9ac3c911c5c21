"""A checkpoint that the tests of saving share."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharp_checkpoints import (
    sharp_llama,
)
from tiny_llama import make_tiny_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    sharp_llama().save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder
