"""Results for a terminal, and the words that say what a table shows and how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hf_posenc.evaluation.pairs import WORTH, is_tie
from hf_posenc.evaluation.protocols import in_words, rule_of
from hf_posenc.evaluation.records import Record
from hf_posenc.report.retrieval import grid_lines
from hf_posenc.report.tables import Row, Table, computed_in, in_a_row, length_name, make_rows, number_name
from hf_posenc.retrieval.cell_records import RetrievalRecord


def column_names(table: Table) -> list[str]:
    """Return the headings of the lengths, each with how it relates to the original one."""
    names = []
    for length in table.lengths:
        name = length_name(length)
        if len(table.originals) == 1:
            original = table.originals[0]
            relation = (
                " (original)" if length == original else f" (x{length / original:.3g})" if length > original else ""
            )
            name += relation
        names.append(name)
    return names


def interval_name(record: Record) -> str:
    """Return the 95 % interval, such as ``27.1-29.6``."""
    return f"{number_name(record.ci_low)}–{number_name(record.ci_high)}"


def change_name(change: float | None) -> str:
    """Return a change in percent with its sign, or nothing."""
    return "" if change is None else f"{round(change, 1) + 0.0:+.1f} %"  # + 0.0: no minus before a zero


def text_table(records: Sequence[Record | RetrievalRecord]) -> str:
    """Return results for a terminal: a line per protocol or task and row, a column per length; nothing is refused."""
    perplexities = [record for record in records if isinstance(record, Record)]
    found = [record for record in records if isinstance(record, RetrievalRecord)]
    parts = [_perplexity_lines(perplexities) if perplexities or not found else [], grid_lines(found) if found else []]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _perplexity_lines(records: Sequence[Record]) -> list[str]:
    lengths = sorted({record.context_length for record in records})
    rows = [
        (f"{protocol}  {row.full_name}", row)
        for protocol in dict.fromkeys(record.protocol for record in records)
        for row in make_rows([record for record in records if record.protocol == protocol])
    ]
    width = max((len(name) for name, _ in rows), default=0)
    lines = [" " * width + "".join(f"{length_name(n):>9}" for n in lengths)]
    for name, row in rows:
        cells = (number_name(row.records[n].perplexity) if n in row.records else "" for n in lengths)
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>9}" for cell in cells))
    return lines


def legend(table: Table) -> str:
    """Return the sentence that explains a table's cells."""
    unit = table.at_length(table.lengths[0]).ci_unit
    text = f"Perplexity, lower is better; with it the 95 % interval over {unit}; the lowest of a column is bold."
    if any(len(found) > 1 for found in table.leaders.values()):
        how = "the 95 % interval of their difference on the same text holds zero"
        how += f", or the difference is below {WORTH:g} %"
        older = ", or, of older records, which do not tell the difference, their own intervals meet"
        text += f" Rows marked tie cannot be told from the lowest: {how}{'' if table.is_paired else older}."
    if any(table.change(row, length) is not None for row in table.rows for length in table.lengths):
        text += (
            " Up to the original length, the percentage says how far a row is above the unpatched model on the same"
            " tokens; short cost is the largest of them."
        )
    return text


def measured(table: Table) -> list[tuple[str, str]]:
    """Return what has to be the same to measure these numbers again, as pairs of a name and a value."""
    records = [record for row in table.rows for record in row.records.values()]
    first, longest = records[0], table.lengths[-1]

    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(getattr(record, name)) for record in records))

    versions = dict.fromkeys(f"{name} {value}" for record in records for name, value in record.versions.items())
    pairs = [
        ("Protocol", f"{first.protocol}: {rule_of(first.protocol).source}."),
        (f"At {length_name(longest)} tokens", table.at_length(longest).scored or _in_words(table.at_length(longest))),
        ("Model", all_of("model")),
        ("Documents", all_of("num_documents")),
        ("BOS token", all_of("bos")),
        ("Tokenizer hash", first.tokenizer_hash),
        ("Computed in", computed_in(records)),
        ("Versions", ", ".join(versions)),
    ]
    if first.stride is not None:
        strides = dict.fromkeys(f"{table.at_length(n).stride} at {length_name(n)}" for n in table.lengths)
        pairs.insert(2, ("Stride in tokens", ", ".join(strides)))
    return pairs


def headline(table: Table) -> str:
    """Say what a table shows at the longest length up to a row's target, what short texts pay for it, and what ties."""
    extended = [row for row in table.rows if row.first.method != "none"]
    reached = [(n, row) for row in extended for n in row.records if n <= _target(row)]
    if not reached:
        return ""
    length = max(n for n, _ in reached)
    there = sorted((row for n, row in reached if n == length), key=lambda row: row.records[length].perplexity)
    best, lowest = there[0], there[0].records[length]
    text = f"At {length_name(length)} tokens, {_who(best)} has perplexity {number_name(lowest.perplexity)}"
    base = table.baseline(best)
    if base is not None and length in base.records:
        text += f" and the unpatched model {number_name(base.records[length].perplexity)}"
    short = max((n for n in table.lengths if table.change(best, n) is not None), default=length)
    if base is not None and (change := table.change(best, short)) is not None:
        text += f"; at {length_name(short)} tokens it "
        if is_tie(best.records[short], base.records[short]):
            text += f"ties with the unpatched model ({change_name(change)})"
        else:
            text += f"is {abs(change):.1f} % {'worse' if change >= 0 else 'better'} than the unpatched model"
    if tied := [_who(row) for row in there[1:] if is_tie(row.records[length], lowest)]:
        text += f". At {length_name(length)} tokens {in_a_row(tied)} {'ties' if len(tied) == 1 else 'tie'} with it"
    return text + "."


def _target(row: Row) -> float:
    return (row.first.original_max_position_embeddings or 0) * row.first.factor


def _who(row: Row) -> str:
    return f"{row.name} ({row.training})"


def _in_words(record: Record) -> str:
    """Say which tokens an older record scored, which does not say it itself."""
    numbers = {"n": record.context_length, "stride": record.stride, "last_k": record.last_k, "first": None}
    name, bos, average = cast(Any, (record.protocol, record.bos, record.average))  # of the names there are
    return in_words(name, bos, average, **numbers)
