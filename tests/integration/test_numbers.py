"""Every number in the tables of README.md and of docs/pages is the one that was measured.

Before a table of measurements stands ``<!-- numbers: FILE [FILE ...] [COLUMN=VALUE ...] [view=NAME] [any-row] -->``:

- Files of docs/records, and which of their rows are meant.
- A column of the table is compared with the column of the file whose name is a part of its heading, a row with the row
  of the file that has the name of one of its cells. Whole cells are compared: "12 s" and "31.35 / 31.97" too.
- ``any-row``: rows of the table that have no such name, as those that describe situations, have to agree with some row
  of the files. Without this word, a row without a name is an error.
- ``view=NAME``: the rows of the files are arranged as by the function of this name in ``VIEWS``.
- ``mentioned``: the cells are sentences. Every number with a decimal point in them is a value of the files.

A table with numbers that has no such comment is an error, unless ``NOT_MEASURED`` says what its numbers are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from documents import PAGES
from folders import ROOT
from hf_posenc.families.family_data import attention_capabilities, capabilities
from measured import FOLDER, facts, read_rows
from result_pictures import SHOWN, ZERO_SHOT, readme_svg
from svg_values import line_values

Rows = list[dict[str, str]]

README = ROOT / "README.md"
MEASURED = [README, *sorted(PAGES.rglob("*.md"))]
NUMBER = re.compile(r"(?<![\w.-])-?\d")  # its first digit, not one inside a name such as qwen2
TABLE = re.compile(r"(?:^ *<!-- numbers: (?P<source>[^>]*) -->\n+)?(?P<lines>(?:^ *\|.*\|\n)+)", re.MULTILINE)
# Tables with numbers that nobody measured for this documentation, by page and first heading.
NOT_MEASURED = {
    ("how-to/check-a-checkpoint.md", "subject"): "limits of settings",
    ("how-to/evaluate-perplexity.md", "protocol"): "numbers of tables in a paper",
    ("how-to/extend-and-save.md", "file"): "versions of Transformers",
    ("how-to/fine-tune.md", "kind"): "numbers of papers",
    ("how-to/fine-tune.md", "trained on"): "examples of texts",
    ("how-to/fit-a-method.md", "flag"): "settings",
    ("how-to/plan-memory.md", "row"): "bits of formats",
    ("how-to/plan-memory.md", "flag"): "a unit",
    ("reference/records.md", "key"): "a version of the format",
    ("reference/records.md", "field"): "the number of the first step",
    ("how-to/serve.md", "program"): "counts that are requested of servers",
    ("how-to/serve.md", "server computes in"): "limits of a check",
    ("results/encodings.md", "encoding"): "years, tables and figures of papers",
    (
        "start/quickstart.md",
        "",
    ): "all rows but the last are rounded in the printed lines of the page, which run in tests",
    ("understand/staged-and-distance-methods.md", "method"): "formulas",
}


def by_factor(*files: str) -> Rows:
    """Return perplexities at 8k tokens: of the unpatched model, and with each method by factor."""
    twice, four = (by_name(file) for file in files)
    unpatched = twice["unpatched"]["8k"]
    return [
        {"name": name, "unpatched": unpatched, "factor 2": twice[name]["8k"], "factor 4": row["8k"]}
        for name, row in four.items()
        if name in twice
    ]


def by_text(*files: str) -> Rows:
    """Return perplexities at 8k / 16k / 32k tokens of each text; a file without this column is of the novel."""
    called = {
        ("zero-shot", "dca"): "dca, no training",
        ("trained", "dynamic_yarn"): "trained with dynamic_yarn, read with it",
        ("trained", "dca"): "trained with dynamic_yarn, read with dca",
    }
    rows: dict[str, dict[str, str]] = {}
    for one in (row for file in files for row in read_rows(file)):
        name = called.get((one["name"], one.get("with", "")), one["name"])
        row = rows.setdefault(name, {"name": name})
        row[one.get("text", "novel")] = " / ".join(one[length] for length in ("8k", "16k", "32k"))
    return list(rows.values())


def by_budget(file: str) -> Rows:
    """Return perplexities at 256 / 1024 tokens by the tokens of fine-tuning."""
    short, long = (by_name(file, at=length) for length in ("256", "1024"))
    return [
        {
            "no training" if column == "zero-shot" else column: f"{cell} / {long[name][column]}" if cell else ""
            for column, cell in row.items()
        }
        | {"name": name}
        for name, row in short.items()
    ]


def beside_yarn(file: str) -> Rows:
    """Return times divided by those of yarn, by method."""
    rows: dict[str, dict[str, str]] = {}
    for one in read_rows(file):
        method, _, beside = one["name"].partition(" / ")
        if beside == "yarn":
            row = rows.setdefault(method, {"name": method, "decoding after 16k tokens": "not measured"})
            row[one["work"].replace("forward", "prefill")] = one["ratio"]
    return list(rows.values())


def with_quartiles(file: str) -> Rows:
    """Return times divided by those of another method, in words."""
    return [
        {
            "name": f"{one['name']}, {one['work']}".replace("/ yarn", "/ static yarn")
            .replace("forward", "forward pass")
            .replace("4096 tokens", "4,096 tokens (the trained length)"),
            "ratio": one["ratio"],
            "25 % to 75 % of rounds": " to ".join(filter(None, (one["lower quartile"], one["upper quartile"]))),
        }
        for one in read_rows(file)
    ]


def by_stage(file: str) -> Rows:
    """Return perplexities in one row, by the length of a stage."""
    called = {"2048": "2048 (default)", "2048 with growth=geometric": "2048, geometric"}
    values = {called.get(one["name"], one["name"]): one["16k"] for one in read_rows(file)}
    return [{"name": "perplexity", **values}]


def predicted_and_measured(benchmark: str) -> Rows:
    """Return predictions of memory and what was measured, by what was planned."""
    predicted, measured = (by_name(benchmark)[f"peak memory, {how}, MiB"] for how in ("predicted by plan", "measured"))
    called = {
        "hf_posenc": "8192 tokens, bfloat16, gradient checkpointing",
        "Trainer": "the same with Transformers' Trainer",
    }
    return [
        {"name": name, "predicted": f"{predicted[column]} MiB", "measured": f"{measured[column]} MiB"}
        for column, name in called.items()
    ]


VIEWS: dict[str, Callable[..., Rows]] = {
    view.__name__: view
    for view in (by_factor, by_text, by_budget, beside_yarn, with_quartiles, by_stage, predicted_and_measured)
}


def by_name(file: str, **selected: str) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in read_rows(file, **selected)}


@dataclass(frozen=True)
class Table:
    """A table of a page: which file it says that its numbers are from, its headings and its cells, without markup."""

    source: str
    headings: list[str]
    rows: list[list[str]]
    has_numbers: bool


def tables_of(text: str) -> list[Table]:
    found = []
    for one in TABLE.finditer(text):
        lines = one["lines"].splitlines()
        headings, _, *rows = [cells_of(line) for line in lines]
        without_code = [cells_of(re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "", line)) for line in lines[2:]]
        has_numbers = any(NUMBER.search(cell) for row in without_code for cell in row[1:])
        found.append(Table(one["source"] or "", headings, rows, has_numbers))
    return found


def cells_of(line: str) -> list[str]:
    without_links = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
    return [re.sub(r"[`*]", "", cell).strip() for cell in without_links.strip()[1:-1].split("|")]


def rows_of(words: list[str]) -> Rows:
    """Return the measured rows that the words of a comment mean."""
    files = [word for word in words if word.endswith((".csv", ".jsonl"))]
    pairs = dict(word.split("=") for word in words if "=" in word)
    view = pairs.pop("view", None)
    assert set(words) - set(files) - {f"{key}={value}" for key, value in pairs.items()} <= {
        f"view={view}",
        "any-row",
        "mentioned",
    }
    if view is not None:
        return VIEWS[view](*files, **pairs)
    return [row for file in files for row in read_rows(file, **pairs)]


def wrong_cells(table: Table) -> list[str]:
    """Return what does not agree with the files of a table, in words."""
    words = table.source.split()
    measured = rows_of(words)
    if "mentioned" in words:
        return wrong_mentions(table, {value for row in measured for value in row.values()})
    columns = {at: column_of(heading, measured) for at, heading in enumerate(table.headings)}
    wrong = []
    for row in table.rows:
        numbers = [at for at, cell in enumerate(row) if at and NUMBER.search(cell)]
        wrong += [
            f"{row[0]}: nothing was measured in the column {table.headings[number]!r}"
            for number in numbers
            if not columns[number]
        ]
        shown = {column: cell for at, cell in enumerate(row) if (column := columns[at])}
        named = [one for one in measured if one["name"] in row]
        if named:
            pairs = list(shown.items())
            agree = any(all(one.get(column) == cell for column, cell in pairs) for one in named)
        elif numbers and "any-row" not in words:
            wrong.append(f"{row[0]}: no row of {table.source} has this name")
            continue
        else:
            pairs = [(columns[number], row[number]) for number in numbers if columns[number]]
            agree = any(all(one.get(column) == cell for column, cell in pairs) for one in measured)
        if pairs and not agree:
            wrong.append(f"{row[0]}: {pairs} is not in {table.source}")
    return wrong


def wrong_mentions(table: Table, values: set[str]) -> list[str]:
    mentioned = (number for row in table.rows for cell in row for number in re.findall(r"\d+\.\d+", cell))
    return [f"{number} is not in {table.source}" for number in mentioned if number not in values]


def column_of(heading: str, measured: list[dict[str, str]]) -> str:
    """Return the column whose name is a part of a heading, the longest such; or nothing."""
    names = {name for row in measured for name in row if name != "name"}
    found = [name for name in names if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", heading)]
    return max(found, key=len, default="")


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.name)
def test_the_tables_of_a_page_show_what_was_measured(page: Path) -> None:
    tables = [table for table in tables_of(page.read_text(encoding="utf-8")) if table.has_numbers or table.source]
    without = {table.headings[0] for table in tables if not table.source}
    assert without == {heading for path, heading in NOT_MEASURED if PAGES / path == page}
    assert [wrong for table in tables if table.source for wrong in wrong_cells(table)] == []


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.name)
def test_the_comment_of_every_table_stands_before_one(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- numbers:") == sum(bool(table.source) for table in tables_of(text))


@pytest.mark.parametrize("page", [*MEASURED, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_the_numbers_of_model_types_are_those_of_the_package(page: Path) -> None:
    assert wrong_counts(page.read_text(encoding="utf-8")) == []


def test_wrong_numbers_of_model_types_are_found() -> None:
    found = [*wrong_counts("115 of the 189 causal language\nmodel types"), *wrong_counts("82 of the 116 also take")]
    found += wrong_counts("Of the 189 types of causal language models in Transformers 5.23.0, 115 can")
    assert len(found) == 3


def count_of(what: str) -> int:
    extended = [model_type for model_type, refusal in capabilities().items() if refusal is None]
    in_attention = [model_type for model_type in extended if attention_capabilities()[model_type] is None]
    return {"all": len(capabilities()), "extended": len(extended), "in attention": len(in_attention)}[what]


def wrong_counts(text: str) -> list[str]:
    """Return where a text gives another number of model types than the package has."""
    every, extended, in_attention = map(count_of, ("all", "extended", "in attention"))
    sentences = {
        r"(\d+) of the (\d+) (?:causal language )?model types": {(extended, every), (in_attention, extended)},
        r"(\d+) of the (\d+) also take": {(in_attention, extended)},
        r"Of the (\d+) types of causal language models in Transformers [\d.]+, (\d+) can": {(every, extended)},
    }
    flat = " ".join(text.split())
    return [
        found[0]
        for sentence, right in sentences.items()
        for found in re.finditer(sentence, flat)
        if (int(found[1]), int(found[2])) not in right
    ]


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
    renamed = page.replace("`rope`", "as published")
    assert wrong_cells(tables_of(renamed)[0]) == ["as published: no row of encodings.csv has this name"]
    for name in ("`rope2`", "rope 2"):
        assert wrong_cells(tables_of(page.replace("`rope`", name))[0]), name
    described = renamed.replace("csv -->", "csv any-row -->")
    assert wrong_cells(tables_of(described)[0]) == []
    assert wrong_cells(tables_of(described.replace("59.1", "56.7"))[0])  # of another row
    assert len(wrong_cells(tables_of(described.replace("| 512 |", "| what |"))[0])) == 1
    assert tables_of(page.replace("<!-- numbers: encodings.csv -->", ""))[0].source == ""


def test_wrong_numbers_with_units_and_several_numbers_of_a_cell_are_found() -> None:
    page = (PAGES / "results" / "fine-tuning.md").read_text(encoding="utf-8")
    (times,) = [table for table in tables_of(page) if table.source == "demo-times.csv"]
    assert times.has_numbers
    page = (PAGES / "start" / "choosing-a-method.md").read_text(encoding="utf-8")
    tables = [table for table in tables_of(page) if "view=" in table.source]
    assert tables
    for table in (times, *tables):
        at, number = next((at, cell) for at, cell in enumerate(table.rows[0]) if at and NUMBER.search(cell))
        changed = [re.sub(r"\d(?=\D*$)", lambda one: str(9 - int(one[0])), number)]
        row = table.rows[0][:at] + changed + table.rows[0][at + 1 :]
        assert len(wrong_cells(replace(table, rows=[row, *table.rows[1:]]))) == 1, table.headings


def test_numbers_in_sentences_are_found() -> None:
    page = "<!-- numbers: encodings.csv mentioned -->\n\n| | what |\n|---|---|\n| rope | from 56.1 up to 73.1 |\n"
    assert wrong_cells(tables_of(page)[0]) == []
    assert wrong_cells(tables_of(page.replace("73.1", "73.2"))[0])
