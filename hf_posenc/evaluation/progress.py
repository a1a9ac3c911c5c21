"""What an interrupted evaluation has already done: one JSON line per finished document, beside the output."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.records import append_line, whole_lines
from hf_posenc.utils.files import write_whole
from hf_posenc.utils.processes import Processes


@dataclass(frozen=True)
class Finished:
    """A document one pass is done with: per run, the nats and the tokens of its blocks; ``seconds`` it took."""

    runs: list[tuple[list[float], list[int]]]
    seconds: float


class ProgressFile:
    """Finished documents by (key of the pass, index of the document); in memory only without a path.

    JSON keeps every bit of a float, so a resumed evaluation gives the same numbers as one that was never stopped.
    Of several processes, each told of every document, only the main one reads and writes the file.
    """

    def __init__(self, path: Path | None, processes: Processes | None = None) -> None:
        processes = processes or Processes()
        self.path = path if processes.is_main else None
        self._finished: dict[tuple[str, int], Finished] = {}
        for entry in processes.from_main(self._entries):
            runs = [(sums, counts) for sums, counts in entry["runs"]]
            self._finished[entry["pass"], entry["document"]] = Finished(runs, entry["seconds"])

    def get(self, key: str, document: int) -> Finished | None:
        """Return what is known of a document, None if it is still to do."""
        return self._finished.get((key, document))

    def add(self, key: str, document: int, finished: Finished) -> None:
        """Remember a document, on disk before returning."""
        self._finished[key, document] = finished
        if self.path is not None:
            entry = {"pass": key, "document": document, "seconds": finished.seconds, "runs": finished.runs}
            append_line(self.path, json.dumps(entry))

    def forget(self, keys: Iterable[str]) -> None:
        """Drop finished passes; the file goes when nothing else is in it."""
        dropped = set(keys)
        self._finished = {at: one for at, one in self._finished.items() if at[0] not in dropped}
        if self.path is None or not self.path.exists():
            return
        left = [json.dumps(entry) + "\n" for entry in self._entries() if entry["pass"] not in dropped]
        if not left:
            self.path.unlink()
            return
        write_whole(self.path, "".join(left))

    def _entries(self) -> list[dict[str, Any]]:
        return [] if self.path is None else [json.loads(line) for line in whole_lines(self.path)]
