"""The panels of a protocol: perplexity by length, and the loss by position, where a model begins to read worse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_posenc.evaluation.intervals import WORTH, is_tie
from hf_posenc.evaluation.protocols import rule_of
from hf_posenc.evaluation.rows import row_key
from hf_posenc.reporting.comparable import Row, Table, all_of, computed_with, listed, model_names, perplexity_name
from hf_posenc.reporting.looks import Looks, make_looks
from hf_posenc.reporting.page import Block, Cell, Facts, Figure, NumberTable, Panel, Paragraph
from hf_posenc.reporting.plot import Chart, Line, draw_chart, intervals_words, length_ticks, shows_raw
from hf_posenc.utils.units import length_name

_MOST_POINTS, _MOST_LINES = 256, 16  # of a chart and of a table; neighbours are added up to have no more
_SMOOTHED = 16  # a running mean is over this part of the length


def perplexity_panels(results: Table, looks: Looks) -> list[Panel]:
    """Return the panel of one table of comparable perplexities, and that of its losses by position where it has any."""
    by_position = _position_panel(results, looks)
    return [_by_length_panel(results, looks), *([by_position] if by_position is not None else [])]


def _by_length_panel(results: Table, looks: Looks) -> Panel:
    slug, lead = f"perplexity_{results.slug}", headline(results)
    label = f"Perplexity by context length: {results.title}"
    caption = intervals_words(len(results.rows))
    scored = [
        [Cell(length_name(n), sort=n), Cell(f"{one.n_tokens:,}", sort=one.n_tokens), Cell(one.text_hash, mark="hash")]
        for n in results.lengths
        for one in [results.at_length(n)]
    ]
    blocks: list[Block] = [
        *([Paragraph(lead)] if lead else []),
        *(Paragraph(note, "note") for note in results.notes),
        Figure(draw_chart(_chart(results, looks)), slug, label, caption, alt="Perplexity by length"),
        _numbers(results, slug + "_table"),
        Paragraph(legend(results), "quiet"),
        Facts(_measured(results)),
        NumberTable(slug + "_scored", ["length", "tokens scored", Cell("text hash", mark="text")], scored),
    ]
    return Panel(slug, f"Perplexity: {results.title}", blocks)


def left_out_panel(notes: Sequence[str]) -> Panel:
    """Return the panel that says why every row was left out, where no table can be made."""
    return Panel("perplexity_left_out", "Perplexity: left out", [Paragraph(note, "note") for note in notes])


def perplexity_curve(results: Table) -> bytes:
    """Return the chart of a table of perplexities as PNG, for a use outside a report: its title names no model."""
    return draw_chart(replace(_chart(results, make_looks(results.records)), title=results.title)).png


def _chart(results: Table, looks: Looks) -> Chart:
    lines = []
    for row in results.rows:
        records = list(row.records.values())
        lows, highs = [record.ci_low for record in records], [record.ci_high for record in records]
        perplexities = [record.perplexity for record in records]
        name = f"{row.full_name}  {perplexity_name(perplexities[-1])}"
        lines.append(Line(name, list(row.records), perplexities, looks[row_key(row.first)], lows, highs))
    return Chart(
        f"{model_names(results.records)}: {results.title}",
        "context length N in tokens",
        "perplexity, lower is better",
        lines,
        length_ticks(results.lengths),
        [(original, f"trained on {length_name(original)}") for original in results.originals],
    )


def _numbers(results: Table, slug: str) -> NumberTable:
    marks = {length: "original" if length in results.originals else "" for length in results.lengths}
    heads: list[Cell | str] = [
        "method",
        *(Cell(_column_name(results, length), mark=mark) for length, mark in marks.items()),
    ]
    rows = [
        [Cell(row.name, (row.training,)), *(_cell(results, row, length, mark) for length, mark in marks.items())]
        for row in results.rows
    ]
    costs = [results.short_cost(row) for row in results.rows]
    if any(costs):  # beside the name, where a phone shows it
        heads.insert(1, "short cost")
        for cells, cost in zip(rows, costs, strict=True):
            change, length = cost or (0.0, 0)
            small = (f"at {length_name(length)}",)
            cells.insert(1, Cell(_change_name(change), small, sort=change) if cost else Cell(""))
    return NumberTable(slug, heads, rows, small_heads=("fine-tuning",))


def _column_name(results: Table, length: int) -> str:
    """Return the heading of a length, with how it relates to the original one."""
    name = length_name(length)
    if len(results.originals) > 1 or not results.originals or length < results.originals[0]:
        return name
    original = results.originals[0]
    return f"{name} (original)" if length == original else f"{name} (x{length / original:.3g})"


def _cell(results: Table, row: Row, length: int, mark: str) -> Cell:
    record = row.records.get(length)
    if record is None:
        return Cell("", mark=mark)
    change, leaders = results.change(row, length), results.leaders[length]
    is_best = any(leader is row for leader in leaders)
    return Cell(
        perplexity_name(record.perplexity),
        () if change is None else (_change_name(change),),
        record.perplexity,
        mark,
        is_best,
        badge="tie" if is_best and len(leaders) > 1 else "",
        interval=f"{perplexity_name(record.ci_low)}–{perplexity_name(record.ci_high)}",
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
    text = f"At {length_name(length)} tokens, {_who(best)} has perplexity {perplexity_name(lowest.perplexity)}"
    base = table.baseline(best)
    if base is not None and length in base.records:
        text += f" and the unpatched model {perplexity_name(base.records[length].perplexity)}"
    short = max((n for n in table.lengths if table.change(best, n) is not None), default=length)
    if base is not None and (change := table.change(best, short)) is not None:
        text += f"; at {length_name(short)} tokens it "
        if is_tie(best.records[short], base.records[short]):
            text += f"ties with the unpatched model ({_change_name(change)})"
        else:
            text += f"is {abs(change):.1f} % {'worse' if change >= 0 else 'better'} than the unpatched model"
    if tied := [_who(row) for row in measured[1:] if is_tie(row.records[length], lowest)]:
        text += f". At {length_name(length)} tokens {listed(tied)} {'ties' if len(tied) == 1 else 'tie'} with it"
    return text + "."


def _target(row: Row) -> float:
    return (row.first.original_max_position_embeddings or 0) * row.first.factor


def _who(row: Row) -> str:
    return f"{row.name} ({row.training})"


def legend(table: Table) -> str:
    """Return the sentence that explains a table's cells."""
    unit = table.at_length(table.lengths[0]).ci_unit
    text = f"Perplexity, lower is better; with it the 95 % interval over {unit}; the lowest of a column is bold."
    if any(len(leader) > 1 for leader in table.leaders.values()):
        how = "the 95 % interval of their difference on the same text holds zero"
        how += f", or the difference is below {WORTH:g} %"
        text += f" Rows marked tie cannot be distinguished from the lowest: {how}."
    if any(table.change(row, length) is not None for row in table.rows for length in table.lengths):
        text += (
            " Up to the original length, the percentage says how far a row is above the unpatched model on the same"
            " tokens; short cost is the largest of them."
        )
    return text


def _measured(table: Table) -> list[tuple[str, str]]:
    """Return the settings that measure these numbers again, as pairs of a name and a value."""
    first, longest = table.records[0], table.at_length(table.lengths[-1])
    strides = dict.fromkeys(f"{table.at_length(n).stride} at {length_name(n)}" for n in table.lengths)
    return [
        ("Protocol", f"{first.protocol}: {rule_of(first.protocol).source}."),
        (f"At {length_name(longest.context_length)} tokens", longest.scored),
        *([("Stride in tokens", ", ".join(strides))] if first.stride is not None else []),
        ("Model", all_of(table.records, "model")),
        ("Documents", all_of(table.records, "num_documents")),
        ("BOS token", all_of(table.records, "bos")),
        *computed_with(table.records),
    ]


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
            tuple(math.fsum(self.sums[start : start + times]) for start in starts),
            tuple(sum(self.tokens[start : start + times]) for start in starts),
        )

    def smoothed(self, buckets: int) -> list[tuple[float, float]]:
        """Return the running mean over so many buckets, an odd number, around each: its middle, and nats.

        Tokens count, not buckets. At both ends the mean is over the part that was measured.
        """
        reach = buckets // 2
        means = []
        for at in range(len(self.sums)):
            near = slice(max(0, at - reach), at + reach + 1)
            if self.tokens[at]:
                mean = math.fsum(self.sums[near]) / sum(self.tokens[near])
                means.append(((at + 0.5) * self.width, mean))
        return means

    def means(self) -> list[tuple[int, float]]:
        """Return each bucket in which tokens were scored: where it begins, and the mean loss in nats."""
        pairs = enumerate(zip(self.sums, self.tokens, strict=True))
        return [(at * self.width, total / count) for at, (total, count) in pairs if count]


def _position_panel(results: Table, looks: Looks) -> Panel | None:
    """Return the panel at the longest length whose records have losses by position; None where none have."""
    measured = [record for record in results.records if record.position_bucket is not None]
    if not measured:
        return None
    length, slug = max(record.context_length for record in measured), f"positions_{results.slug}"
    title = f"Loss by position: {results.title}"
    curves = [
        (row, Losses(one.position_bucket, tuple(one.position_nll), tuple(one.position_tokens)))
        for row in results.rows
        if (one := row.records.get(length)) is not None and one.position_bucket is not None
    ]
    coarse = [losses.merged(_MOST_LINES) for _, losses in curves]
    means, width = [dict(losses.means()) for losses in coarse], coarse[0].width
    numbers = NumberTable(
        slug + "_table",
        ["tokens", *(row.full_name.removesuffix(", zero-shot") for row, _ in curves)],
        [
            [Cell(f"{start:,}–{start + width - 1:,}", sort=start), *(_loss_cell(mean.get(start)) for mean in means)]
            for start in sorted({start for mean in means for start in mean})
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
    step = 2 ** max(0, round(math.log2(length / 4)))  # about five ticks, a power of two apart
    chart = Chart(
        f"{model_names(results.records)}: loss by position, {length_name(length)} tokens",
        "position of the token in its document",
        "mean loss in nats, lower is better",
        lines,
        length_ticks(range(0, length + 1, step)),
        [(original, f"trained on {length_name(original)}") for original in results.originals if original < length],
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
