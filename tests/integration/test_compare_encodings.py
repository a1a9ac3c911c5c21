"""``scripts/compare_encodings.py`` on a few tokens: its tables and charts, and that what is there is not made again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from folders import SCRIPTS

SCRIPT = SCRIPTS / "compare_encodings.py"


def compare(folder: Path, *encodings: str, tokens: int = 8192) -> str:
    words = [sys.executable, str(SCRIPT), "--output-dir", str(folder), "--tokens", str(tokens), "--encodings"]
    return subprocess.run([*words, *encodings], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_a_small_comparison(tmp_path: Path) -> None:
    assert "| rope |" not in compare(tmp_path, "alibi")  # by itself
    assert [file.name for file in tmp_path.glob("*.png")] == ["encodings.png"]
    first = compare(tmp_path, "alibi", "learned", "rope")
    assert first.count("training on 8,192 tokens") == 2  # alibi was trained
    records = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(records) == 4 + 1 + 4 * 7  # a learned table ends; rope alone and by six methods
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert costs.keys() == {"alibi", "learned"}
    assert costs["alibi"]["parameters"] == 0
    assert costs["learned"]["parameters"] == 256 * 256
    text = (tmp_path / "encodings.md").read_text()
    assert "| `learned` | " in text
    assert "| ends | ends | ends | ends | cannot | 0/24, ends |" in text
    assert {file.name for file in tmp_path.glob("*.png")} == {"encodings.png", "extensions.png"}

    again = compare(tmp_path, "alibi", "learned", "rope")
    assert "training on" not in again
    assert (tmp_path / "results.jsonl").read_text().splitlines() == records
    with pytest.raises(subprocess.CalledProcessError):
        compare(tmp_path, "rope", tokens=4096)  # another comparison
