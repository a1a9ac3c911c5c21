"""Every number in the tables of README.md and of docs/pages/results is the one that was measured.

Before such a table stands ``<!-- numbers: FILE [FILE ...] [COLUMN=VALUE ...] -->``: files of docs/records, and which of
their rows are meant. A column of the table is compared with the column of the file whose name is a part of its
heading, a row with the row of the file that has the name of one of its cells. Where no row has such a name, as in
tables that describe situations, one row of the file has to agree with all numbers of the table's row.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from documents import PAGES
from folders import ROOT
from measured import FOLDER, facts, read_rows
from result_pictures import SHOWN, ZERO_SHOT, readme_svg
from svg_values import line_values

README = ROOT / "README.md"
MEASURED = [README, *sorted((PAGES / "results").glob("*.md"))]
NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?")
TABLE = re.compile(r"(?:<!-- numbers: (?P<source>[^>]*) -->\n+)?(?P<lines>(?:^\|.*\|\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Table:
    """A table of a page: which file it says that its numbers are from, its headings and its cells, without markup."""

    source: str
    headings: list[str]
    rows: list[list[str]]

    @property
    def has_numbers(self) -> bool:
        return any(NUMBER.fullmatch(cell) for row in self.rows for cell in row[1:])


def tables_of(text: str) -> list[Table]:
    found = []
    for one in TABLE.finditer(text):
        headings, _, *rows = [cells_of(line) for line in one["lines"].splitlines()]
        found.append(Table(one["source"] or "", headings, rows))
    return found


def cells_of(line: str) -> list[str]:
    without_links = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
    return [re.sub(r"[`*]", "", cell).strip() for cell in without_links.strip()[1:-1].split("|")]


def wrong_cells(table: Table) -> list[str]:
    """Return what does not agree with the files of a table, in words."""
    words = table.source.split()
    selected = dict(word.split("=") for word in words if "=" in word)
    measured = [row for file in words if "=" not in file for row in read_rows(file, **selected)]
    columns = {at: column_of(heading, measured) for at, heading in enumerate(table.headings)}
    wrong = []
    for row in table.rows:
        numbers = [at for at, cell in enumerate(row) if at and NUMBER.fullmatch(cell)]
        wrong += [
            f"{row[0]}: nothing was measured in the column {table.headings[at]!r}" for at in numbers if not columns[at]
        ]
        shown = {column: cell for at, cell in enumerate(row) if (column := columns[at])}
        named = [one for one in measured if one["name"] in row]
        if named:
            pairs = list(shown.items())
            agree = any(all(one[column] == cell for column, cell in pairs) for one in named)
        else:
            pairs = [(columns[at], row[at]) for at in numbers if columns[at]]
            agree = any(all(one.get(column) == cell for column, cell in pairs) for one in measured)
        if pairs and not agree:
            wrong.append(f"{row[0]}: {pairs} is not in {table.source}")
    return wrong


def column_of(heading: str, measured: list[dict[str, str]]) -> str:
    """Return the column whose name is a part of a heading, the longest such; or nothing."""
    names = {name for row in measured for name in row if name != "name"}
    found = [name for name in names if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", heading)]
    return max(found, key=len, default="")


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.stem)
def test_the_tables_of_a_page_show_what_was_measured(page: Path) -> None:
    tables = [table for table in tables_of(page.read_text(encoding="utf-8")) if table.has_numbers]
    assert [table.headings for table in tables if not table.source] == []
    assert [wrong for table in tables for wrong in wrong_cells(table)] == []


def test_every_file_of_numbers_is_in_a_table_and_says_how_it_was_measured() -> None:
    used = {word for page in MEASURED for table in tables_of(page.read_text()) for word in table.source.split()}
    files = {path.name for path in FOLDER.iterdir()}
    assert files - used == {"smollm2-passkey-map.csv"}  # shown as a picture
    for file in files:
        if file.endswith(".csv"):
            assert {"what", "command", "machine", "versions", "date"} <= set(facts(file)), file
        else:
            assert all(json.loads(line)["command"] for line in (FOLDER / file).read_text().splitlines())


def test_the_picture_of_the_readme_shows_the_records() -> None:
    svg = (ROOT / ".github" / "images" / "perplexity.svg").read_text(encoding="utf-8")
    plain = svg.replace("readme-", "")  # of the ids
    rows = [row for row in read_rows(ZERO_SHOT) if row["name"] in SHOWN]
    for number, row in enumerate(rows):
        drawn = dict(line_values(plain, f"line-{number}", log_x=True))
        expected = {512: row["512"], 2048: row["2k"], 8192: row["8k"], 16384: row["16k"]}
        assert {round(length): pytest.approx(value, abs=0.05) for length, value in drawn.items()} == {
            length: float(value) for length, value in expected.items()
        }
    colours = re.compile(r"var\(--c\d\)|currentColor|prefers-color-scheme")
    assert set(colours.findall(svg)) == set(colours.findall(readme_svg()))


def test_wrong_numbers_are_found() -> None:
    page = "<!-- numbers: encodings.csv -->\n\n| | 256 tokens | 512 |\n|---|---|---|\n| `rope` | 56.1 | **59.1** |\n"
    (table,) = tables_of(page)
    assert wrong_cells(table) == []
    for right, wrong in (("56.1", "56.2"), ("59.1", "59.2"), ("rope", "xpos"), ("512", "1024"), ("512", "4096")):
        assert wrong_cells(tables_of(page.replace(right, wrong))[0]), wrong
    (table,) = tables_of(page.replace("`rope`", "as published").replace("| 512 |", "| what |"))
    assert len(wrong_cells(table)) == 1
    assert tables_of(page.replace("<!-- numbers: encodings.csv -->", ""))[0].source == ""
