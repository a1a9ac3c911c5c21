"""Records sorted into tables of comparable numbers, or refused with the difference that makes them incomparable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.retrieval.records import RetrievalRecord
from hf_posenc.evaluation.rows import is_unpatched, row_key

# What must be equal among the numbers of one column; and the tokenizer, among those of a whole table.
_PER_LENGTH = ("bos", "average", "key_tokens", "window", "stride", "num_documents", "n_tokens", "text_hash")
_TITLES = {
    "truncated": "First N tokens",
    "sliding_window": "Sliding window of N tokens",
    "same_tokens": "The same tokens at every N",
}
_ADVICE = "Evaluate both in the same way, or make two reports."
AnyRecord = TypeVar("AnyRecord", Record, RetrievalRecord)


@dataclass(frozen=True)
class Row:
    """One model, as it was extended and trained, at several lengths."""

    name: str
    training: str
    records: dict[int, Record]

    @property
    def first(self) -> Record:
        return next(iter(self.records.values()))

    @property
    def is_unpatched(self) -> bool:
        return is_unpatched(self.first)

    @property
    def full_name(self) -> str:
        return self.name if self.is_unpatched else f"{self.name}, {self.training}"


@dataclass(frozen=True)
class Table:
    """Comparable numbers: the rows of one protocol."""

    slug: str
    title: str
    lengths: tuple[int, ...]
    originals: tuple[int, ...]
    rows: tuple[Row, ...]

    def baseline(self, row: Row) -> Row | None:
        """Return the unpatched row of the same model to measure against; None if there is not exactly one."""
        same = [other for other in self.rows if other.is_unpatched and other.first.model == row.first.model]
        return same[0] if len(same) == 1 else None

    def change(self, row: Row, length: int) -> float | None:
        """Return how far a row is above the unpatched one at a length up to the original, in percent."""
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

    def best(self, length: int) -> float:
        """Return the lowest perplexity of a column."""
        return min(row.records[length].perplexity for row in self.rows if length in row.records)

    def at_length(self, length: int) -> Record:
        """Return any record of a column; what they share is the same in all."""
        return next(row.records[length] for row in self.rows if length in row.records)


def make_tables(records: Sequence[Record]) -> list[Table]:
    """Sort records into one table per protocol.

    Of a repeated measurement (equal ``run_key``) the later record counts.

    Raises:
        ValueError: No records; records of a table that cannot be compared, or of two runs that would share a row; a
            row without a length up to its original one.
    """
    if not records:
        raise ValueError("there are no records to report. hf-posenc eval --output results.jsonl writes them.")
    protocols: dict[tuple[str, int | None], list[Record]] = {}
    for record in records:
        protocols.setdefault((record.protocol, record.last_k), []).append(record)
    return [_make_table(group) for group in protocols.values()]


def length_name(length: int) -> str:
    """Return ``32k`` for 32768 and ``500`` for 500."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def tokens_name(count: int) -> str:
    """Return ``300k`` for 300000 and ``1.5M`` for 1500000."""
    for unit, name in ((1_000_000, "M"), (1_000, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)


def number_name(value: float) -> str:
    """Return a perplexity with as many digits as are worth reading: 5.73, 28.33, 730.1, 12,345."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _make_table(records: Sequence[Record]) -> Table:
    _refuse_shared_rows(records)
    records = list({(*row_key(record), record.context_length): record for record in records}.values())
    refuse_incomparable(records)
    rows = make_rows(records)
    for row in rows:
        _refuse_long_only(row)
    first = records[0]
    lengths = tuple(sorted({record.context_length for record in records}))
    originals = tuple(
        sorted({r.original_max_position_embeddings for r in records if r.original_max_position_embeddings})
    )
    slug, title = _protocol_names(first)
    return Table(slug, title, lengths, originals, rows)


def _protocol_names(record: Record) -> tuple[str, str]:
    """Return a table's name for files and for people."""
    if record.protocol == "last_k":
        return f"last_{record.last_k}", f"Last {record.last_k} of N tokens"
    slug = record.protocol if record.last_k is None else f"{record.protocol}_{record.last_k}"
    title = _TITLES.get(record.protocol, f"{record.protocol} protocol")
    return slug, title + (", mean of window means" if record.average == "windows" else "")


def refuse_incomparable(records: Sequence[Record]) -> None:
    """Raise if numbers that would stand in one table were measured on different text or in different ways."""
    seen: dict[int, Record] = {}
    by_position: dict[int, Record] = {}
    for record in records:
        _refuse_difference(records[0], record, ("tokenizer_hash", "average"))
        if record.position_bucket is not None:  # older files have none
            other = by_position.setdefault(record.context_length, record)
            _refuse_difference(other, record, ("position_bucket", "position_tokens"))
        other = seen.setdefault(record.context_length, record)
        _refuse_difference(other, record, _PER_LENGTH)


def _refuse_shared_rows(records: Iterable[Record]) -> None:
    """Raise if one run would replace another's number: two models of one name, say, trained at two learning rates."""
    seen: dict[tuple[object, ...], Record] = {}
    for record in records:
        other = seen.setdefault((*row_key(record), record.context_length), record)
        if other.run_key != record.run_key:
            raise ValueError(
                f"two runs would share the row {_row_name(record, ())!r} of model {record.model!r}: at "
                f"{record.context_length} tokens ({record.protocol}) one has perplexity {other.perplexity:.6g} and the "
                f"other {record.perplexity:.6g}. Weights, versions or seed differ. Tell them apart with --label or "
                "--model-name of hf-posenc eval (label= and model_name= of perplexity), or leave one out."
            )


def _refuse_long_only(row: Row) -> None:
    """Raise for a row that does not show what short texts pay; one whose original length is unknown may pass."""
    original, shortest = row.first.original_max_position_embeddings, min(row.records)
    if original is not None and shortest > original:
        raise ValueError(
            f"the shortest length evaluated for {row.full_name} is {shortest} tokens, above the original {original}: a "
            f"report has to show what short texts pay. Evaluate it at {original} tokens or fewer too "
            f"({row.first.protocol})."
        )


def _refuse_difference(one: Record, other: Record, names: Iterable[str]) -> None:
    for name in names:
        if getattr(one, name) != getattr(other, name):
            raise ValueError(
                f"records cannot be compared: at {other.context_length} tokens ({other.protocol}), {name} is "
                f"{getattr(one, name)!r} for {_row_name(one, ())} and {getattr(other, name)!r} for "
                f"{_row_name(other, ())}. {_ADVICE}"
            )


def make_rows(records: Sequence[Record]) -> tuple[Row, ...]:
    """Group records by model, extension and training; the unpatched first, then in order of appearance."""
    rows = []
    for name, training, group in group_rows(records):
        by_length = {record.context_length: record for record in group}
        rows.append(Row(name, training, dict(sorted(by_length.items()))))
    return tuple(rows)


def group_rows(records: Sequence[AnyRecord]) -> list[tuple[str, str, list[AnyRecord]]]:
    """Return (name, training, records) of each model, extension and training, in the order of ``make_rows``."""
    groups: dict[tuple[object, ...], list[AnyRecord]] = {}
    for record in records:
        groups.setdefault(row_key(record), []).append(record)
    # Said only where rows differ in it.
    names = ("model", "dtype", "attn_implementation")
    extras = tuple(name for name in names if len({getattr(record, name) for record in records}) > 1)
    rows = []
    for group in groups.values():
        trained = group[0].tokens_trained
        training = f"after {tokens_name(trained)} tokens" if trained else "zero-shot"
        rows.append((_row_name(group[0], extras), training, group))
    return sorted(rows, key=lambda row: not is_unpatched(row[2][0]))


def computed_in(records: Sequence[AnyRecord]) -> str:
    """Return all dtypes and attentions, such as ``float32 (the checkpoint is in bfloat16), sdpa attention``."""

    def words(record: AnyRecord) -> str:
        narrower = record.checkpoint_dtype not in ("", record.dtype)
        note = f" (the checkpoint is in {record.checkpoint_dtype})" if narrower else ""
        return f"{record.dtype}{note}, {record.attn_implementation} attention"

    return "; ".join(dict.fromkeys(map(words, records)))


def rule_name(record: Record | RetrievalRecord) -> str:
    """Return how a model was extended, such as ``yarn x4 (beta_fast=16)``."""
    name = "unpatched" if record.method == "none" else f"{record.method} x{record.factor:g}"
    if record.options:
        values = {key: json.dumps(value).strip('"') for key, value in record.options.items()}
        name += " (" + ", ".join(f"{k}={v if len(v) <= 20 else '...'}" for k, v in values.items()) + ")"
    return name


def _row_name(record: Record | RetrievalRecord, extras: Iterable[str]) -> str:
    shown = {"model": Path(record.model).name}
    label = [record.label] if record.label else []
    return " · ".join([rule_name(record), *label, *(str(shown.get(extra, getattr(record, extra))) for extra in extras)])
