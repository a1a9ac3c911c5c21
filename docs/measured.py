"""The measured numbers of the documentation: records of ``hf-posenc eval`` and small tables, in docs/records.

A ``.csv`` file begins with comments that say what was measured, by which command, on which machine and when. Its first
column, ``name``, is what a table of the documentation calls the row. Pictures are drawn from these files, and
tests/integration/test_numbers.py compares the tables of the pages with them.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from hf_posenc.evaluation import Record, read_records
from hf_posenc.reporting.comparable import perplexity_name
from hf_posenc.utils.units import length_name

FOLDER = Path(__file__).parent / "records"


def read_rows(file: str, **selected: str) -> list[dict[str, str]]:
    """Return the rows of a file as texts by column, as the tables of the documentation show them.

    Args:
        file: Its name in docs/records. Of records, a row has the perplexity at each length.
        selected: Columns and the values that they must have; these columns are left out.
    """
    found = [row for row in _all_rows(FOLDER / file) if all(row[column] == value for column, value in selected.items())]
    return [{column: text for column, text in row.items() if column not in selected} for row in found]


@cache  # the page of methods looks each of them up
def _all_rows(path: Path) -> list[dict[str, str]]:
    return _rows_of_records(read_records(path)) if path.suffix == ".jsonl" else _rows_of_table(path)


def facts(file: str) -> dict[str, str]:
    """Return what the comments of a ``.csv`` file say, by their first word."""
    lines = (FOLDER / file).read_text(encoding="utf-8").splitlines()
    pairs = (line.removeprefix("# ").partition(": ") for line in lines if line.startswith("# "))
    return {word: said for word, _, said in pairs}


def _rows_of_table(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _rows_of_records(records: list[Record]) -> list[dict[str, str]]:
    rows: dict[str, dict[str, str]] = {}
    for record in records:
        options = ", ".join(f"{name}={value}" for name, value in record.options.items())
        name = "unpatched" if record.method == "none" else record.method + (f" with {options}" if options else "")
        row = rows.setdefault(name, {"name": name})
        row[length_name(record.context_length)] = perplexity_name(record.perplexity)
    return list(rows.values())
