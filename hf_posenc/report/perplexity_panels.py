"""The panels of a protocol: perplexity by length, and the loss by position, where a model begins to read worse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from hf_posenc.evaluation.intervals import WORTH, is_tie
from hf_posenc.evaluation.protocols import in_words, rule_of
from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.rows import row_key
from hf_posenc.report.comparable import Row, Table, computed_in, in_a_row, number_name
from hf_posenc.report.looks import Looks
from hf_posenc.report.page import Cell, Facts, Figure, NumberTable, Panel, Paragraph
from hf_posenc.report.plot import Chart, Line, draw_chart, intervals_words, shows_raw
from hf_posenc.utils.units import length_name

_MOST_POINTS, _MOST_LINES = 256, 16  # of a chart and of a table; neighbours are added up to have no more
_SMOOTHED = 16  # a running mean is over this part of the length


def perplexity_panel(results: Table, looks: Looks) -> Panel:
    """Return the panel of one table of comparable perplexities."""
    slug, lead = f"perplexity_{results.slug}", headline(results)
    label = f"Perplexity by context length: {results.title}"
    caption = intervals_words(len(results.rows))
    records = [(length, results.at_length(length)) for length in results.lengths]
    scored = NumberTable(
        slug + "_scored",
        [Cell("length"), Cell("tokens scored"), Cell("text hash", mark="text")],
        [
            [
                Cell(length_name(length), sort=length),
                Cell(f"{one.n_tokens:,}", sort=one.n_tokens),
                Cell(one.text_hash, mark="hash"),
            ]
            for length, one in records
        ],
    )
    return Panel(
        slug,
        f"Perplexity: {results.title}",
        [
            *([Paragraph(lead)] if lead else []),
            *(Paragraph(note, "note") for note in results.notes),
            Figure(draw_chart(_chart(results, looks)), slug, label, caption, alt="Perplexity by length"),
            _numbers(results, slug + "_table"),
            Paragraph(legend(results), "quiet"),
            Facts(_measured(results)),
            scored,
        ],
    )


def left_out_panel(notes: Sequence[str]) -> Panel:
    """Return the panel that says why every row was left out, where no table can be made."""
    return Panel("perplexity_left_out", "Perplexity: left out", [Paragraph(note, "note") for note in notes])


def _chart(results: Table, looks: Looks) -> Chart:
    lines = []
    for row in results.rows:
        records = list(row.records.values())
        lines.append(
            Line(
                f"{row.full_name}  {number_name(records[-1].perplexity)}",
                list(row.records),
                [record.perplexity for record in records],
                looks[row_key(row.first)],
                [record.ci_low for record in records],
                [record.ci_high for record in records],
            )
        )
    return Chart(
        f"{results.models}: {results.title}",
        "context length N in tokens",
        "perplexity, lower is better",
        lines,
        [(length, length_name(length)) for length in results.lengths],
        [(original, f"trained on {length_name(original)}") for original in results.originals],
    )


def _numbers(results: Table, slug: str) -> NumberTable:
    marks = {length: "original" if length in results.originals else "" for length in results.lengths}
    heads = [Cell("method"), *(Cell(_column_name(results, length), mark=mark) for length, mark in marks.items())]
    rows = [
        [Cell(row.name, (row.training,)), *(_cell(results, row, length, mark) for length, mark in marks.items())]
        for row in results.rows
    ]
    costs = [results.short_cost(row) for row in results.rows]
    if any(costs):  # beside the name, where a phone shows it
        heads.insert(1, Cell("short cost"))
        for cells, cost in zip(rows, costs, strict=True):
            cells.insert(1, Cell("") if cost is None else _cost_cell(*cost))
    return NumberTable(slug, heads, rows, small_heads=("fine-tuning",))


def _column_name(results: Table, length: int) -> str:
    """Return the heading of a length, with how it relates to the original one."""
    name = length_name(length)
    if len(results.originals) > 1 or not results.originals or length < results.originals[0]:
        return name
    original = results.originals[0]
    return f"{name} (original)" if length == original else f"{name} (x{length / original:.3g})"


def _cost_cell(change: float, length: int) -> Cell:
    return Cell(_change_name(change), (f"at {length_name(length)}",), sort=change)


def _cell(results: Table, row: Row, length: int, mark: str) -> Cell:
    record = row.records.get(length)
    if record is None:
        return Cell("", mark=mark)
    change = results.change(row, length)
    return Cell(
        number_name(record.perplexity),
        () if change is None else (_change_name(change),),
        record.perplexity,
        mark,
        results.is_best(row, length),
        badge="tie" if results.is_tied(row, length) else "",
        interval=f"{number_name(record.ci_low)}–{number_name(record.ci_high)}",
    )


def _change_name(change: float) -> str:
    return f"{round(change, 1) + 0.0:+.1f} %"  # + 0.0: no minus before a zero


def headline(table: Table) -> str:
    """Say what a table shows at the longest length up to a row's target, what short texts pay for it, and what ties."""
    extended = [row for row in table.rows if row.first.method != "none"]
    reached = [(n, row) for row in extended for n in row.records if n <= _target(row)]
    if not reached:
        return ""
    length = max(n for n, _ in reached)
    measured = sorted((row for n, row in reached if n == length), key=lambda row: row.records[length].perplexity)
    best, lowest = measured[0], measured[0].records[length]
    text = f"At {length_name(length)} tokens, {_who(best)} has perplexity {number_name(lowest.perplexity)}"
    base = table.baseline(best)
    if base is not None and length in base.records:
        text += f" and the unpatched model {number_name(base.records[length].perplexity)}"
    short = max((n for n in table.lengths if table.change(best, n) is not None), default=length)
    if base is not None and (change := table.change(best, short)) is not None:
        text += f"; at {length_name(short)} tokens it "
        if is_tie(best.records[short], base.records[short]):
            text += f"ties with the unpatched model ({_change_name(change)})"
        else:
            text += f"is {abs(change):.1f} % {'worse' if change >= 0 else 'better'} than the unpatched model"
    if tied := [_who(row) for row in measured[1:] if is_tie(row.records[length], lowest)]:
        text += f". At {length_name(length)} tokens {in_a_row(tied)} {'ties' if len(tied) == 1 else 'tie'} with it"
    return text + "."


def _target(row: Row) -> float:
    return (row.first.original_max_position_embeddings or 0) * row.first.factor


def _who(row: Row) -> str:
    return f"{row.name} ({row.training})"


def legend(table: Table) -> str:
    """Return the sentence that explains a table's cells."""
    unit = table.at_length(table.lengths[0]).ci_unit
    text = f"Perplexity, lower is better; with it the 95 % interval over {unit}; the lowest of a column is bold."
    if any(len(found) > 1 for found in table.leaders.values()):
        how = "the 95 % interval of their difference on the same text holds zero"
        how += f", or the difference is below {WORTH:g} %"
        older = ", or, of older records, which do not hold the difference, their own intervals meet"
        text += f" Rows marked tie cannot be distinguished from the lowest: {how}{'' if table.is_paired else older}."
    if any(table.change(row, length) is not None for row in table.rows for length in table.lengths):
        text += (
            " Up to the original length, the percentage says how far a row is above the unpatched model on the same"
            " tokens; short cost is the largest of them."
        )
    return text


def _measured(table: Table) -> list[tuple[str, str]]:
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


def _in_words(record: Record) -> str:
    """Say which tokens an older record scored, which does not say it itself."""
    numbers = {"n": record.context_length, "stride": record.stride, "last_k": record.last_k, "first": None}
    name, bos, average = cast(Any, (record.protocol, record.bos, record.average))  # one of the known names
    return in_words(name, bos, average, **numbers)


@dataclass(frozen=True)
class Losses:
    """Sums of losses by position: bucket b is of the tokens ``[b * width, (b + 1) * width)`` of every document."""

    width: int
    sums: tuple[float, ...]
    tokens: tuple[int, ...]

    def merged(self, most: int) -> Losses:
        """Return the same in wider buckets, as many times wider (a power of two) as leaves at most so many."""
        times = 2 ** max(0, math.ceil(math.log2(len(self.sums) / most)))
        starts = range(0, len(self.sums), times)
        return Losses(
            self.width * times,
            tuple(math.fsum(self.sums[at : at + times]) for at in starts),
            tuple(sum(self.tokens[at : at + times]) for at in starts),
        )

    def smoothed(self, buckets: int) -> list[tuple[float, float]]:
        """Return the running mean over so many buckets, an odd number, around each: its middle, and nats.

        Tokens count, not buckets. At both ends the mean is over the part that was measured.
        """
        reach = buckets // 2
        found = []
        for at in range(len(self.sums)):
            near = slice(max(0, at - reach), at + reach + 1)
            if self.tokens[at]:
                mean = math.fsum(self.sums[near]) / sum(self.tokens[near])
                found.append(((at + 0.5) * self.width, mean))
        return found

    def means(self) -> list[tuple[int, float]]:
        """Return each bucket in which tokens were scored: where it begins, and the mean loss in nats."""
        pairs = enumerate(zip(self.sums, self.tokens, strict=True))
        return [(at * self.width, total / count) for at, (total, count) in pairs if count]


def losses_of(record: Record) -> Losses | None:
    """Return a record's losses by position; None of an older one, or of a protocol that has none."""
    if record.position_bucket is None:
        return None
    return Losses(record.position_bucket, tuple(record.position_nll), tuple(record.position_tokens))


def position_panel(results: Table, looks: Looks) -> Panel | None:
    """Return the panel at the longest length whose records say losses by position; None where none do."""
    lengths = [n for n in results.lengths if any(_losses_at(row, n) is not None for row in results.rows)]
    if not lengths:
        return None
    length, slug, title = lengths[-1], f"positions_{results.slug}", f"Loss by position: {results.title}"
    curves = [(row, found) for row in results.rows if (found := _losses_at(row, length)) is not None]
    coarse = [losses.merged(_MOST_LINES) for _, losses in curves]
    means, width = [dict(losses.means()) for losses in coarse], coarse[0].width
    numbers = NumberTable(
        slug + "_table",
        [Cell("tokens"), *(Cell(row.full_name.removesuffix(", zero-shot")) for row, _ in curves)],
        [
            [Cell(f"{start:,}–{start + width - 1:,}", sort=start), *(_loss_cell(one.get(start)) for one in means)]
            for start in sorted({start for one in means for start in one})
        ],
        folded="The numbers",
    )
    words = (
        f"Mean loss of a token in nats, lower is better, by its position in its document, at {length_name(length)} "
        f"tokens. Each line of the table is of {width:,} positions, over all documents."
    )
    chart, caption = _position_chart(results, length, curves, looks)
    label = f"{title}, mean loss by position in the text"
    figure = Figure(draw_chart(chart), slug, label, caption, alt="Loss by position")
    return Panel(slug, title, [figure, numbers, Paragraph(words, "quiet")])


def _losses_at(row: Row, length: int) -> Losses | None:
    record = row.records.get(length)
    return None if record is None else losses_of(record)


def _loss_cell(value: float | None) -> Cell:
    return Cell("" if value is None else f"{value:.3f}", sort=value)


def _position_chart(
    results: Table, length: int, curves: Sequence[tuple[Row, Losses]], looks: Looks
) -> tuple[Chart, str]:
    """Return the chart, and the words that say how its lines were smoothed."""
    lines = []
    fine = [losses.merged(_MOST_POINTS) for _, losses in curves]
    buckets = 2 * round(len(fine[0].sums) / _SMOOTHED / 2) + 1  # odd: as many on either side
    for (row, _), losses in zip(curves, fine, strict=True):
        middles, means = zip(*losses.smoothed(buckets), strict=True)
        raw = [(start + losses.width / 2, mean) for start, mean in losses.means()] if buckets > 1 else []
        lines.append(Line(row.full_name, middles, means, looks[row_key(row.first)], raw=raw))
    chart = Chart(
        f"{results.models}: loss by position, {length_name(length)} tokens",
        "position of the token in its document",
        "mean loss in nats, lower is better",
        lines,
        [(at, length_name(at)) for at in _ticks(length)],
        [(at, f"trained on {length_name(at)}") for at in results.originals if at < length],
        log_x=False,
    )
    return chart, _smoothing_words(buckets, fine[0].width, len(lines))


def _smoothing_words(buckets: int, width: int, count: int) -> str:
    if buckets == 1:
        return f"Each point is the mean over {width:,} positions; the lines are not smoothed."
    text = (
        f"Lines are smoothed: each point is the mean over the {buckets * width:,} positions around it (fewer at both "
        "ends), of all documents."
    )
    return text + (f" The faint lines are means over {width:,} positions." if shows_raw(count) else "")


def _ticks(length: int) -> Sequence[int]:
    """Return about five positions, a power of two apart."""
    step = 2 ** max(0, round(math.log2(length / 4)))
    return range(0, length + 1, step)
