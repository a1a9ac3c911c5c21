"""What the studies share: a folder that is one study, by what it was started with, and how passkeys are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.records import read_retrieval_records
from hf_posenc.utils.files import write_whole


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder of a study, or go on in one that was started with the same settings.

    Raises:
        SystemExit: It holds a study with others, whose numbers must not be mixed with these.
    """
    file, text = folder / "settings.json", json.dumps(settings, indent=2, sort_keys=True) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{folder} holds a study with other settings ({file.name}). Give another --output-dir.")
    write_whole(file, text)


def passkeys_right(file: Path, length: int, label: str) -> str:
    """Return how many passkeys of a row were right at a length, given the prompt: ``2/3``, or nothing without any."""
    records = read_retrieval_records(file) if file.is_file() else []
    scores = [record.score() for record in records if record.label == label and record.context_length == length]
    return f"{scores.count(1.0)}/{len(scores)}" if scores else ""
