"""Records sorted into tables of comparable numbers, and the reasons why a row is in a table of its own.

Perplexities are sorted by protocol into a ``Table``, retrieval by task into a ``Grid``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple, TypeVar

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.intervals import Share, is_tie, share_interval
from hf_posenc.evaluation.records import AnyRecord, Record, RetrievalRecord
from hf_posenc.evaluation.rows import (
    is_unpatched,
    namer,
    row_key,
    rule_name,
    short_model_names,
    task_name,
    training_words,
)
from hf_posenc.utils.units import count_name, length_name

# What must be equal among all numbers of a table, and what it is in words; and among those of one column, where the
# most informative reason comes first.
_ALIKE = {"tokenizer_hash": "the tokenizers", "average": "the averages"}
_ALIKE_AT_LENGTH = {
    "text_hash": "the texts",
    "num_documents": "the numbers of documents",
    "n_tokens": "the tokens scored",
    "bos": "the rules for BOS",
    "key_tokens": "the key tokens",
    "stride": "the strides",
}
_ALIKE_BY_POSITION = {
    "position_bucket": "the buckets of positions",
    "position_tokens": "the tokens scored by position",
}
_MOST_DEPTHS = 10  # rows of a map of questions that share a text
BY = {"forced": "teacher-forced", "written": "written"}
_TITLES = {
    "truncated": "First N tokens",
    "sliding_window": "Sliding window of N tokens",
    "same_tokens": "The same tokens at every N",
}
OneKind = TypeVar("OneKind", Record, RetrievalRecord)
T = TypeVar("T")


@dataclass(frozen=True)
class _NamedRow:
    """One model, as it was extended and trained."""

    name: str
    training: str

    @property
    def full_name(self) -> str:
        return ", ".join(filter(None, (self.name, self.training)))


@dataclass(frozen=True)
class Row(_NamedRow):
    """The measurements of a row, by context length."""

    records: dict[int, Record]

    @property
    def first(self) -> Record:
        return next(iter(self.records.values()))


class Depths(NamedTuple):
    """Depths that are one row of a map, in percent: from ``low`` up to ``high``, or one that was requested."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g} %" if self.low == self.high else f"{self.low:.0f}–{self.high:.0f} %"


def depths_of(record: RetrievalRecord) -> Depths | None:
    """Return the depths that a question belongs to; None where what the answer needs is spread over the text.

    Questions that share a text have needles everywhere, so there are up to ten equal parts of it.
    """
    if record.depth is None or record.questions_per_text == 1:
        return None if record.depth is None else Depths(record.depth, record.depth)
    parts = min(_MOST_DEPTHS, record.questions_per_text)
    part = min(int(record.depth / 100 * parts), parts - 1)
    return Depths(100 * part / parts, 100 * (part + 1) / parts)


@dataclass(frozen=True)
class GridRow(_NamedRow):
    """The results of its prompts."""

    records: tuple[RetrievalRecord, ...]

    @property
    def first(self) -> RetrievalRecord:
        return self.records[0]

    def share(self, by: str, length: int, depths: Depths | Literal["all"] | None = "all") -> Share | None:
        """Return the share of right answers at a length, of some depths or all; None where there are none."""
        here = [
            record
            for record in self.records
            if record.context_length == length and depths in ("all", depths_of(record))
        ]
        scored = [(score, one.text) for one in here if (score := one.score(by)) is not None]
        return share_interval(*zip(*scored, strict=True)) if scored else None


@dataclass(frozen=True)
class _Comparable:
    """Numbers that can be compared. ``notes`` are sentences: why they are apart from the first ones of their kind."""

    slug: str
    title: str
    notes: tuple[str, ...]

    @property
    def records(self) -> Sequence[AnyRecord]:
        """All records of its rows."""
        raise NotImplementedError

    @cached_property
    def lengths(self) -> list[int]:
        """Its columns."""
        return sorted({record.context_length for record in self.records})


@dataclass(frozen=True)
class Table(_Comparable):
    """Rows of one protocol; the notes of the first table also say which rows were left out."""

    rows: tuple[Row, ...]

    @property
    def records(self) -> list[Record]:
        return [record for row in self.rows for record in row.records.values()]

    @cached_property
    def originals(self) -> list[int]:
        """The original lengths of its models."""
        return sorted({record.original_max_position_embeddings or 0 for record in self.records} - {0})

    def baseline(self, row: Row) -> Row | None:
        """Return the unpatched row of the same model to measure against; None if the table has not exactly one."""
        same = [other for other in self.rows if is_unpatched(other.first) and other.first.model == row.first.model]
        return same[0] if len(same) == 1 else None

    def change(self, row: Row, length: int) -> float | None:
        """Return the difference of a row from the unpatched one at a length up to the original, in percent."""
        base = self.baseline(row)
        original = row.first.original_max_position_embeddings
        if base is None or base is row or original is None or length > original:
            return None
        if length not in row.records or length not in base.records:
            return None
        return 100 * (row.records[length].perplexity / base.records[length].perplexity - 1)

    def short_cost(self, row: Row) -> tuple[float, int] | None:
        """Return the largest change up to the original length, in percent, and at which length; None where none is."""
        changes = [(change, n) for n in self.lengths if (change := self.change(row, n)) is not None]
        return max(changes) if changes else None

    @cached_property
    def leaders(self) -> dict[int, tuple[Row, ...]]:
        """The row of the lowest perplexity of each column, and after it those that tie with it."""
        gaps = {}
        for length in self.lengths:
            first, *others = sorted(
                (row for row in self.rows if length in row.records), key=lambda row: row.records[length].perplexity
            )
            lowest = first.records[length]
            gaps[length] = (first, *(row for row in others if is_tie(row.records[length], lowest)))
        return gaps

    def at_length(self, length: int) -> Record:
        """Return any record of a column; what they share is the same in all."""
        return next(record for record in self.records if record.context_length == length)


@dataclass(frozen=True)
class Grid(_Comparable):
    """Rows of one task, of the same prompts."""

    task: str
    rows: tuple[GridRow, ...]

    @property
    def records(self) -> list[RetrievalRecord]:
        return [record for row in self.rows for record in row.records]

    @cached_property
    def depths(self) -> list[Depths | None]:
        """The depths of prompts' needles; None alone if they are in parts all over the text."""
        return sorted(set(map(depths_of, self.records)), key=lambda depths: depths or (-1.0, -1.0))

    @property
    def scorings(self) -> list[str]:
        """The scorings of the task; if answers may come in any order, teacher forcing is no measure."""
        return [by for by in BY if any(record.score(by) is not None for record in self.rows[0].records)]


def make_tables(records: Sequence[Record]) -> list[Table]:
    """Sort records into tables: one per protocol, and another for rows that cannot be compared with those of the first.

    Of a repeated measurement (equal ``run_key``) the later record counts. A row without a length up to its original one
    is left out, as it does not show what short texts pay. Both are said in ``Table.notes``.

    Raises:
        ValueError: No records, or no row that can be in a table.
    """
    if not records:
        raise InvalidRequestError("there are no records to report. hf-posenc eval --output results.jsonl writes them.")
    tables, left_out = sort_tables(records)
    if not tables:
        raise InvalidRequestError(" ".join(left_out))
    return tables


def sort_tables(records: Sequence[Record]) -> tuple[list[Table], list[str]]:
    """Return the tables as ``make_tables`` does, without its errors; if there are none, why each row is left out."""
    protocols: dict[tuple[str, int | None], list[Record]] = {}
    for record in records:
        protocols.setdefault((record.protocol, record.last_k), []).append(record)
    tables: list[Table] = []
    left_out: list[str] = []
    for group in protocols.values():
        _add_tables(group, tables, left_out)
    if not tables:
        return [], left_out
    return [replace(tables[0], notes=(*tables[0].notes, *left_out)), *tables[1:]], []


def _add_tables(records: Sequence[Record], tables: list[Table], left_out: list[str]) -> None:
    """Add the tables of one protocol, and what is said of rows that are left out."""
    name_of, kept = namer(records), []
    for run in _runs(records):
        name = name_of(run[0])
        if note := _long_only(run, name):
            left_out.append(note)
        else:
            kept.append((name, run))
    names = _protocol_names(records[0])
    for number, (runs, notes) in enumerate(_apart(kept, lambda runs: _difference([*chain(*runs)], name_of)), 1):
        tables.append(Table(*_numbered(*names, number), notes, make_rows([*chain(*runs)])))


def _numbered(slug: str, title: str, number: int) -> tuple[str, str]:
    return (slug, title) if number == 1 else (f"{slug}_{number}", f"{title}, table {number}")


def _protocol_names(record: Record) -> tuple[str, str]:
    """Return a table's name for files and for people."""
    if record.protocol == "last_k":
        return f"last_{record.last_k}", f"Last {record.last_k} of N tokens"
    slug = record.protocol if record.last_k is None else f"{record.protocol}_{record.last_k}"
    title = _TITLES.get(record.protocol, f"{record.protocol} protocol")
    return slug, title + (", mean of window means" if record.average == "windows" else "")


def _apart(
    rows: Iterable[tuple[str, T]], differ: Callable[[Sequence[T]], str | None]
) -> list[tuple[list[T], tuple[str, ...]]]:
    """Put each row into the first group that it can be compared with.

    Args:
        rows: Names and rows, in order.
        differ: Says why the last of some rows cannot be compared with the others; None if it can.

    Returns:
        The groups, each with the sentence that says why its first row is not in the first group, none for that one.
    """
    groups: list[tuple[list[T], tuple[str, ...]]] = []
    for name, row in rows:
        reasons = [differ([*group, row]) for group, _ in groups]
        if None in reasons:
            groups[reasons.index(None)][0].append(row)
        else:
            groups.append(([row], (f"{name} is apart from the first table: {reasons[0]}.",) if reasons else ()))
    return groups


def _runs(records: Sequence[Record]) -> list[list[Record]]:
    """Return the records of each row, in order; a row that was measured in two ways, or of two models, is two."""
    rows: dict[tuple[object, ...], list[dict[int, Record]]] = {}
    for record in records:
        runs = rows.setdefault(row_key(record), [{}])
        repeated = next((one for one in runs if record.run_key in {other.run_key for other in one.values()}), None)
        if repeated is not None:
            repeated[record.context_length] = record
        elif record.context_length in runs[-1] or _difference([*runs[-1].values(), record]) is not None:
            runs.append({record.context_length: record})
        else:
            runs[-1][record.context_length] = record
    return [list(run.values()) for runs in rows.values() for run in runs]


def model_names(records: Iterable[AnyRecord]) -> str:
    """Return the models of records by their short names, such as ``small, middle and large``."""
    return listed(short_model_names(record.model for record in records).values())


def listed(names: Iterable[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def perplexity_name(value: float) -> str:
    """Return a perplexity with as many digits as are worth reading: 5.73, 28.33, 730.1, 12,345."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def share_name(share: Share | None) -> str:
    """Return ``75 %``, or nothing where there is none."""
    return "" if share is None else f"{100 * share.value:.0f} %"


def counted_words(shares: Iterable[Share]) -> str:
    """Return the units of shares and of their intervals: ``4 prompts (interval over prompts)``."""
    return " or ".join(dict.fromkeys(f"{share.counted} (interval over {share.is_over})" for share in shares))


def _difference(records: Sequence[Record], name_of: Callable[[Record], str] = rule_name) -> str | None:
    """Return the reason why numbers cannot be in one table (other text, another way, two runs of one row), or None.

    Args:
        records: In order.
        name_of: Names the row of a record.
    """
    columns: dict[int, Record] = {}
    by_position: dict[int, Record] = {}
    rows: dict[tuple[object, ...], Record] = {}
    for record in records:
        length = record.context_length
        compared = [(records[0], _ALIKE), (columns.setdefault(length, record), _ALIKE_AT_LENGTH)]
        if record.position_bucket is not None:  # other protocols have no losses by position
            compared.append((by_position.setdefault(length, record), _ALIKE_BY_POSITION))
        for other, alike in compared:
            for name, words in alike.items():
                if getattr(other, name) != getattr(record, name):
                    return (
                        f"{words} differ: at {length} tokens ({record.protocol}), {name} is {getattr(other, name)!r} "
                        f"for {name_of(other)} and {getattr(record, name)!r} for {name_of(record)}"
                    )
        first = rows.setdefault((*row_key(record), length), record)
        if first.run_key != record.run_key:
            return (
                f"it is another run of the same row: at {length} tokens ({record.protocol}) one has perplexity "
                f"{first.perplexity:.6g} and the other {record.perplexity:.6g} on the same text, so weights, versions "
                "or seed differ. --label or --model-name of hf-posenc eval (label= and model_name= of perplexity) tell "
                "them apart"
            )
    return None


def _long_only(records: Sequence[Record], name: str) -> str | None:
    """Return that a row is left out as it does not show what short texts pay; None of another, and of one whose
    original length is not known."""
    original, shortest = records[0].original_max_position_embeddings, min(record.context_length for record in records)
    if original is None or shortest <= original:
        return None
    name = ", ".join(filter(None, (name, training_words(records[0], count_name))))
    return (
        f"{name} is left out: the shortest length evaluated is {shortest} tokens, above the original "
        f"{original}, and a report has to show what short texts pay. Evaluate it at {original} tokens or fewer too "
        f"({records[0].protocol})."
    )


def make_rows(records: Sequence[Record]) -> tuple[Row, ...]:
    """Group records by model, extension and training; the unpatched first, then in order of appearance."""
    rows = []
    for name, training, group in group_rows(records):
        by_length = {record.context_length: record for record in group}
        rows.append(Row(name, training, dict(sorted(by_length.items()))))
    return tuple(rows)


def group_rows(records: Sequence[OneKind]) -> list[tuple[str, str, list[OneKind]]]:
    """Return (name, training, records) of each model, extension and training, in the order of ``make_rows``.

    The unpatched model's training is empty: "zero-shot" would say nothing of it.
    """
    groups: dict[tuple[object, ...], list[OneKind]] = {}
    for record in records:
        groups.setdefault(row_key(record), []).append(record)
    name_of = namer(records)
    rows = [(name_of(group[0]), training_words(group[0], count_name), group) for group in groups.values()]
    return sorted(rows, key=lambda row: not is_unpatched(row[2][0]))


def all_of(records: Sequence[OneKind], name: str) -> str:
    """Return all values of a field, each once."""
    return ", ".join(dict.fromkeys(str(getattr(record, name)) for record in records))


def computed_with(records: Sequence[OneKind]) -> list[tuple[str, str]]:
    """Return the tokenizer, all dtypes and attentions, and all versions, as pairs of a name and a value."""

    def words(record: OneKind) -> str:
        narrower = record.checkpoint_dtype not in ("", record.dtype)
        note = f" (the checkpoint is in {record.checkpoint_dtype})" if narrower else ""
        return f"{record.dtype}{note}, {record.attn_implementation} attention"

    versions = dict.fromkeys(f"{name} {value}" for record in records for name, value in record.versions.items())
    return [
        ("Tokenizer hash", records[0].tokenizer_hash),
        ("Computed in", "; ".join(dict.fromkeys(map(words, records)))),
        ("Versions", ", ".join(versions)),
    ]


def make_grids(records: Sequence[RetrievalRecord]) -> list[Grid]:
    """Sort records into a grid per task, and another for rows whose prompts are not those of the first.

    Questions that share a text are another task than one question of each text: they have other needles around them.
    Of a repeated measurement (equal ``run_key``) the later record counts.
    """
    tasks: dict[tuple[str, int], dict[str, RetrievalRecord]] = {}
    for record in records:
        tasks.setdefault((record.task, record.questions_per_text), {})[record.run_key] = record
    grids = []
    for (task, questions), group in tasks.items():
        every = group_rows(list(group.values()))
        rows = [GridRow(name, training, run) for name, training, found in every for run in _prompt_runs(found)]
        apart = _apart([(row.full_name, row) for row in rows], _prompt_difference)
        for number, (some, notes) in enumerate(apart, 1):
            slug = f"retrieval_{task}" if questions == 1 else f"retrieval_{task}_{questions}_questions"
            names = _numbered(slug, f"Retrieval: {task_name(task, questions)}", number)
            grids.append(Grid(*names, notes, task, tuple(some)))
    return grids


def _prompt_runs(records: Sequence[RetrievalRecord]) -> list[tuple[RetrievalRecord, ...]]:
    """Return the records of a row, each prompt once: one that was answered again in another run is of another row."""
    runs: list[dict[tuple[object, ...], RetrievalRecord]] = [{}]
    for record in records:
        prompt = (record.context_length, record.depth, record.seed, record.question)
        if prompt in runs[-1]:
            runs.append({})
        runs[-1][prompt] = record
    return [tuple(run.values()) for run in runs]


def _prompt_difference(rows: Sequence[GridRow]) -> str | None:
    """Return the reason why rows cannot be in one table (not the same prompts at each length they share), or None."""
    first = rows[0].records[0]
    seen: dict[int, tuple[GridRow, dict[tuple[float | None, int, int], str]]] = {}
    known: set[tuple[object, ...]] = set()
    for row in rows:
        between = f"between {rows[0].full_name!r} and {row.full_name!r}"
        if (key := row_key(row.records[0])) in known:
            return "it is another run of the same row, so weights, versions or seed differ; --label tells them apart"
        known.add(key)
        for record in row.records:
            for name, words in (("tokenizer_hash", "the tokenizers"), ("chat", "the chat templates")):
                if getattr(record, name) != getattr(first, name):
                    return f"{words} differ {between}"
        for length in sorted({record.context_length for record in row.records}):
            here = [record for record in row.records if record.context_length == length]
            prompts = {(record.depth, record.seed, record.question): record.text_hash for record in here}
            other, theirs = seen.setdefault(length, (row, prompts))
            if prompts != theirs:
                between = f"between {other.full_name!r} and {row.full_name!r}"
                what = "depths or samples" if prompts.keys() != theirs.keys() else "texts"
                return f"the {what} of the prompts at {length} tokens differ {between}"
    return None


def text_table(records: Sequence[AnyRecord]) -> str:
    """Return results for a terminal: a line per protocol or task and row, a column per length; nothing is refused."""
    perplexities = [record for record in records if isinstance(record, Record)]
    retrievals = [record for record in records if isinstance(record, RetrievalRecord)]
    lines = [
        (f"{protocol}  {row.full_name}", {n: perplexity_name(record.perplexity) for n, record in row.records.items()})
        for protocol in dict.fromkeys(record.protocol for record in perplexities)
        for row in make_rows([record for record in perplexities if record.protocol == protocol])
    ]
    lengths = sorted({record.context_length for record in retrievals})
    cells: list[tuple[str, dict[int, str]]] = []
    shares: list[Share] = []
    for task, questions in dict.fromkeys((record.task, record.questions_per_text) for record in retrievals):
        asked = [
            retrieval for retrieval in retrievals if (retrieval.task, retrieval.questions_per_text) == (task, questions)
        ]
        for name, training, group in group_rows(asked):
            row = GridRow(name, training, tuple(group))
            for by, words in BY.items():
                found = {length: share for length in lengths if (share := row.share(by, length)) is not None}
                shares += found.values()
                if found:
                    named = f"{task_name(task, questions)}, {words}  {row.full_name}"
                    cells.append((named, {length: str(share) for length, share in found.items()}))
    parts = [_columns(lines, 9)] if lines else []
    parts += [f"{_columns(cells, 16)}\neach of {counted_words(shares)}"] if cells else []
    return "\n\n".join(parts)


def _columns(lines: Sequence[tuple[str, dict[int, str]]], column: int) -> str:
    lengths = sorted({length for _, cells in lines for length in cells})
    width = max(len(name) for name, _ in lines)
    head = " " * width + "".join(f"{length_name(length):>{column}}" for length in lengths)
    written = (f"{name:<{width}}" + "".join(f"{cells.get(n, ''):>{column}}" for n in lengths) for name, cells in lines)
    return "\n".join([head, *map(str.rstrip, written)])
