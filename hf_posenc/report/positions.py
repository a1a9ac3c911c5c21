"""The panel of the loss by position: where in a text a model begins to read worse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.rows import row_key
from hf_posenc.report.looks import Looks
from hf_posenc.report.pieces import Cell, Panel, folded, inline, markdown_lines, quiet, table
from hf_posenc.report.plot import Chart, Drawing, Line, draw_chart, shows_raw
from hf_posenc.report.tables import Row, Table, length_name

_MOST_POINTS, _MOST_LINES = 256, 16  # of a chart and of a table; neighbours are added up until there are no more
_SMOOTHED = 16  # a running mean is over this part of the length


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
    """Return the panel at the longest length whose records tell losses by position; None where none do."""
    lengths = [n for n in results.lengths if any(_losses_at(row, n) is not None for row in results.rows)]
    if not lengths:
        return None
    length, slug = lengths[-1], f"positions_{results.slug}"
    curves = [(row, found) for row in results.rows if (found := _losses_at(row, length)) is not None]
    drawing, caption = _draw(results, length, curves, looks)
    coarse = [losses.merged(_MOST_LINES) for _, losses in curves]
    text = _words(length, coarse[0].width)
    title = f"Loss by position: {results.title}"
    heads, lines = ["tokens", *(row.full_name.removesuffix(", zero-shot") for row, _ in curves)], _lines(coarse)
    cells = [
        [Cell(_span(start, width), sort=start), *(Cell(_loss(one), sort=one) for one in means)]
        for start, width, means in lines
    ]
    details = folded("The numbers", table(slug + "_table", [Cell(head) for head in heads], cells))
    figure = inline(drawing, slug, f"{title}, mean loss by place in the text", caption)
    html = f"{figure}\n{details}\n{quiet(text)}"
    rows = [[_span(start, width), *map(_loss, means)] for start, width, means in lines]
    markdown = [f"![Loss by position]({slug}.png)", caption, markdown_lines(heads, rows), text]
    return Panel(slug, title, html, "\n\n".join(markdown), drawing)


def _losses_at(row: Row, length: int) -> Losses | None:
    record = row.records.get(length)
    return None if record is None else losses_of(record)


def _words(length: int, width: int) -> str:
    return (
        f"Mean loss of a token in nats, lower is better, by where it stands in its document, at {length_name(length)} "
        f"tokens. Each line of the table is of {width:,} places, over all documents."
    )


def _lines(rows: Sequence[Losses]) -> list[tuple[int, int, list[float | None]]]:
    """Return for each bucket where it begins, its width, and the mean of each row."""
    means, width = [dict(losses.means()) for losses in rows], rows[0].width
    starts = sorted({start for one in means for start in one})
    return [(start, width, [one.get(start) for one in means]) for start in starts]


def _span(start: int, width: int) -> str:
    return f"{start:,}–{start + width - 1:,}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _draw(results: Table, length: int, curves: Sequence[tuple[Row, Losses]], looks: Looks) -> tuple[Drawing, str]:
    """Return the chart, and the words that say how its lines were smoothed."""
    lines = []
    fine = [losses.merged(_MOST_POINTS) for _, losses in curves]
    buckets = 2 * round(len(fine[0].sums) / _SMOOTHED / 2) + 1  # odd: as many on either side
    for (row, _), losses in zip(curves, fine, strict=True):
        places, means = zip(*losses.smoothed(buckets), strict=True)
        raw = [(place + losses.width / 2, mean) for place, mean in losses.means()] if buckets > 1 else []
        lines.append(Line(row.full_name, places, means, looks[row_key(row.first)], raw=raw))
    chart = Chart(
        f"{results.models}: loss by position, {length_name(length)} tokens",
        "position of the token in its document",
        "mean loss in nats, lower is better",
        lines,
        [(at, length_name(at) if at else "0") for at in _ticks(length)],
        [(at, f"trained on {length_name(at)}") for at in results.originals if at < length],
        log_x=False,
    )
    return draw_chart(chart), _smoothing_words(buckets, fine[0].width, len(lines))


def _smoothing_words(buckets: int, width: int, count: int) -> str:
    if buckets == 1:
        return f"Each point is the mean over {width:,} positions; the lines are not smoothed."
    text = (
        f"Lines are smoothed: each point is the mean over the {buckets * width:,} positions around it (fewer at both "
        "ends), of all documents."
    )
    return text + (f" The faint lines are means over {width:,} positions." if shows_raw(count) else "")


def _ticks(length: int) -> Sequence[int]:
    """Return about five places, a power of two apart."""
    step = 2 ** max(0, round(math.log2(length / 4)))
    return range(0, length + 1, step)
