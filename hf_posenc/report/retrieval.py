"""Retrieval records sorted into one grid per task: accuracy by length, and by depth and length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_posenc.report.tables import computed_in, group_rows, length_name, model_names
from hf_posenc.retrieval.cell_records import RetrievalRecord, wilson_interval

BY = {"forced": "teacher-forced", "written": "written"}
_EXPLAINED = {
    "forced": (
        "Teacher-forced: given the prompt, the likeliest token is the right one at every token that holds the answer; "
        "the word before it does not count."
    ),
    "written": "Written: the answer stands in what the model writes greedily.",
}


@dataclass(frozen=True)
class GridRow:
    """One model, as it was extended and trained, with what came back for its prompts."""

    name: str
    training: str
    records: tuple[RetrievalRecord, ...]

    @property
    def first(self) -> RetrievalRecord:
        return self.records[0]

    @cached_property
    def full_name(self) -> str:
        return ", ".join(filter(None, (self.name, self.training)))

    def scores(self, by: str, length: int, depth: float | str | None = "all") -> list[float]:
        """Return the scores of the prompts of a length, of one depth or all."""
        here = [one for one in self.records if one.context_length == length and depth in ("all", one.depth)]
        return [score for one in here if (score := one.score(by)) is not None]


@dataclass(frozen=True)
class Grid:
    """Rows of one task, all asked the same; ``note`` says why they are apart from its first grid, ``number`` 1."""

    task: str
    lengths: tuple[int, ...]
    depths: tuple[float | None, ...]
    rows: tuple[GridRow, ...]
    number: int = 1
    note: str = ""

    @property
    def title(self) -> str:
        return f"Retrieval: {self.task}" + (f", table {self.number}" if self.number > 1 else "")

    @property
    def slug(self) -> str:
        return f"retrieval_{self.task}" + (f"_{self.number}" if self.number > 1 else "")

    @property
    def models(self) -> str:
        """The models by their short names."""
        return model_names([row.first for row in self.rows])

    @property
    def has_depths(self) -> bool:
        """Whether what is asked for lies at one depth, and not all over the text."""
        return self.depths != (None,)

    @property
    def scorings(self) -> tuple[str, ...]:
        """How the task was scored; where answers may come in any order, teacher forcing says nothing."""
        return tuple(by for by in BY if any(record.score(by) is not None for record in self.rows[0].records))


def make_grids(records: Sequence[RetrievalRecord]) -> list[Grid]:
    """Sort records into a grid per task, and another for rows that were not asked the same as those of the first.

    Of a repeated measurement (equal ``run_key``) the later record counts.
    """
    tasks: dict[str, dict[str, RetrievalRecord]] = {}
    for record in records:
        tasks.setdefault(record.task, {})[record.run_key] = record
    return [grid for task, group in tasks.items() for grid in _grids_of(task, list(group.values()))]


def share_name(scores: Sequence[float]) -> str:
    """Return ``75 %``, or nothing where there are no scores."""
    return f"{100 * sum(scores) / len(scores):.0f} %" if scores else ""


def interval_name(scores: Sequence[float]) -> str:
    """Return Wilson's 95 % interval in percent, such as ``30–95``."""
    low, high = wilson_interval(scores)
    return f"{100 * low:.0f}–{100 * high:.0f}"


def depth_name(depth: float | None) -> str:
    """Return ``25 %``, or what stands for needles all over the text."""
    return "spread" if depth is None else f"{depth:g} %"


def grid_legend(grid: Grid) -> str:
    """Return the sentences that explain a grid's numbers."""
    how = " ".join(_EXPLAINED[by] for by in grid.scorings)
    return f"Share of the answers that were right, with Wilson's 95 % interval over prompts. {how}"


def grid_facts(grid: Grid) -> list[tuple[str, str]]:
    """Return what has to be the same to measure these numbers again, as pairs of a name and a value."""
    records = [record for row in grid.rows for record in row.records]

    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(getattr(record, name)) for record in records))

    versions = dict.fromkeys(f"{name} {value}" for record in records for name, value in record.versions.items())
    depths = ", ".join(map(depth_name, grid.depths))
    seeds = sorted({record.seed for record in records})
    return [
        ("Protocol", f"{grid.task}. Prompt and longest answer together fill the context length; greedy."),
        ("Depth", f"Of the text before the needle: {depths}." if grid.has_depths else "What is asked for is spread."),
        ("Prompts", ", ".join(f"{len(grid.rows[0].scores('written', n))} at {length_name(n)}" for n in grid.lengths)),
        ("Seeds", f"{seeds[0]}–{seeds[-1]}" if len(seeds) > 1 else str(seeds[0])),
        ("Chat template", "yes" if records[0].chat else "no"),
        ("Model", all_of("model")),
        ("Tokenizer hash", records[0].tokenizer_hash),
        ("Computed in", computed_in(records)),
        ("Versions", ", ".join(versions)),
    ]


def grid_lines(records: Sequence[RetrievalRecord]) -> list[str]:
    """Return shares for a terminal: a line per task, scoring and row, a column per length."""
    lengths = sorted({record.context_length for record in records})
    lines = []
    for task in dict.fromkeys(record.task for record in records):
        for name, training, group in group_rows([record for record in records if record.task == task]):
            row = GridRow(name, training, tuple(group))
            for by, words in BY.items():
                cells = [share_name(row.scores(by, length)) for length in lengths]
                if any(cells):
                    lines.append((f"{task}, {words}  {row.full_name}", cells))
    width = max(len(name) for name, _ in lines)
    head = " " * width + "".join(f"{length_name(n):>9}" for n in lengths)
    return [head, *(f"{name:<{width}}" + "".join(f"{cell:>9}" for cell in cells) for name, cells in lines)]


def _grids_of(task: str, records: list[RetrievalRecord]) -> list[Grid]:
    groups: list[list[GridRow]] = []
    notes: list[str] = []
    for name, training, found in group_rows(records):
        for run in _runs(found):
            row = GridRow(name, training, run)
            why = [_difference([*group, row]) for group in groups]
            if None in why:
                groups[why.index(None)].append(row)
            else:
                groups.append([row])
                notes.append(f"{row.full_name} is apart from the first table: {why[0]}." if why else "")
    return [_make_grid(task, *one) for one in zip(groups, range(1, len(groups) + 1), notes, strict=True)]


def _runs(records: Sequence[RetrievalRecord]) -> list[tuple[RetrievalRecord, ...]]:
    """Return the records of a row, each prompt once: what was asked again in another run is another row."""
    runs: list[dict[tuple[object, ...], RetrievalRecord]] = [{}]
    for record in records:
        prompt = (record.context_length, record.depth, record.seed)
        if prompt in runs[-1]:
            runs.append({})
        runs[-1][prompt] = record
    return [tuple(run.values()) for run in runs]


def _make_grid(task: str, rows: Sequence[GridRow], number: int, note: str) -> Grid:
    records = [record for row in rows for record in row.records]
    lengths = tuple(sorted({record.context_length for record in records}))
    depths = tuple(sorted({record.depth for record in records}, key=lambda depth: -1.0 if depth is None else depth))
    return Grid(task, lengths, depths, tuple(rows), number, note)


def _difference(rows: Sequence[GridRow]) -> str | None:
    """Return why rows cannot stand in one table: not the same prompts at each length they share; or None."""
    first = rows[0].records[0]
    asked: dict[int, tuple[GridRow, dict[tuple[float | None, int], str]]] = {}
    names: set[str] = set()
    for row in rows:
        between = f"between {rows[0].full_name!r} and {row.full_name!r}"
        if row.full_name in names:
            return "it is another run of the same row, so weights, versions or seed differ; --label tells them apart"
        names.add(row.full_name)
        for record in row.records:
            for name, words in (("tokenizer_hash", "the tokenizers"), ("chat", "the chat templates")):
                if getattr(record, name) != getattr(first, name):
                    return f"{words} differ {between}"
        for length in sorted({record.context_length for record in row.records}):
            here = [record for record in row.records if record.context_length == length]
            prompts = {(record.depth, record.seed): record.text_hash for record in here}
            other, theirs = asked.setdefault(length, (row, prompts))
            if prompts != theirs:
                between = f"between {other.full_name!r} and {row.full_name!r}"
                what = "depths or samples" if prompts.keys() != theirs.keys() else "texts"
                return f"the {what} of the prompts at {length} tokens differ {between}"
    return None
