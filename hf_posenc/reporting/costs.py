"""Time and memory by length: of each pass that perplexities came from, and of each prompt."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from hf_posenc.evaluation.rows import row_key
from hf_posenc.reporting.comparable import Grid, GridRow, Row, Table, model_names
from hf_posenc.reporting.looks import Looks
from hf_posenc.reporting.page import Block, Cell, Figure, NumberTable, Panel, Paragraph
from hf_posenc.reporting.plot import Chart, Line, draw_chart, length_ticks
from hf_posenc.utils.units import duration_name, length_name, size_name

_LEGEND = (
    "Peak memory is the GPU's on CUDA, else that of the whole process since it began, so that of a later row is never "
    "less than that of an earlier one of the same command."
)
_PASS = "Time of a pass over all documents; where one pass gave several lengths, it is at the longest."
_PROMPT = "Mean time of a prompt, read and answered twice: teacher-forced and written."


@dataclass(frozen=True)
class Cost:
    """The time and memory of one pass; ``other`` is the longer length whose pass gave this one too, else None."""

    seconds: float
    peak_bytes: int
    other: int | None = None


def cost_panel(found: Table | Grid, looks: Looks) -> Panel:
    """Return the panel of what one table or task took; a chart where a row was timed at two lengths or more."""
    slug, title = f"cost_{found.slug}", f"Time and memory: {found.title}"
    explained, what = (_PASS, "a pass") if isinstance(found, Table) else (_PROMPT, "a prompt, mean")
    costs = [(row, row_costs(row)) for row in found.rows]
    # Where every number came from the pass of a longer one, a column would be empty.
    lengths = [n for n in found.lengths if any(n in one and one[n].other is None for _, one in costs)]
    rows = [[Cell(row.name, (row.training,)), *(_cell(one.get(length)) for length in lengths)] for row, one in costs]
    blocks: list[Block] = [
        NumberTable(slug + "_table", ["method", *map(length_name, lengths)], rows, joint=", "),
        Paragraph(f"{explained} {_LEGEND}", "quiet"),
    ]
    lines = []
    for row, one in costs:
        timed = {length: cost.seconds for length, cost in one.items() if cost.other is None}
        if len(timed) > 1:
            lines.append(Line(row.full_name, list(timed), list(timed.values()), looks[row_key(row.first)]))
    if lines:
        heading, ticks = f"{model_names(found.records)}: seconds of {what}", length_ticks(found.lengths)
        chart = Chart(heading, "context length in tokens", "seconds", lines, ticks)
        blocks.insert(0, Figure(draw_chart(chart), slug, f"{title}: seconds by length", alt="Seconds by length"))
    return Panel(slug, title, blocks)


def row_costs(row: Row | GridRow) -> dict[int, Cost]:
    """Return the costs of each length of a row.

    Records of one pass carry the same time, to the last bit, which no two passes do.
    """
    if isinstance(row, GridRow):
        lengths = sorted({record.context_length for record in row.records})
        by_length = {n: [record for record in row.records if record.context_length == n] for n in lengths}
        return {
            n: Cost(statistics.mean(one.seconds for one in here), max(one.peak_memory_bytes for one in here))
            for n, here in by_length.items()
        }
    longest = {record.seconds: length for length, record in row.records.items()}  # lengths rise
    costs = {}
    for length, record in row.records.items():
        other = longest[record.seconds]
        costs[length] = Cost(record.seconds, record.peak_memory_bytes, other if other != length else None)
    return costs


def _cell(cost: Cost | None) -> Cell:
    if cost is None:
        return Cell("")
    if cost.other is not None:
        return Cell("", (f"in the {length_name(cost.other)} pass",))
    return Cell(duration_name(cost.seconds), (size_name(cost.peak_bytes),), cost.seconds)
