"""The panel of a retrieval task: accuracy by length, and depth by length heat maps, as drawings and as tables."""

from __future__ import annotations

from html import escape
from typing import Any, cast

from hf_posenc.evaluation.rows import row_key
from hf_posenc.report.looks import Looks
from hf_posenc.report.pieces import Cell, Panel, facts, inline, markdown_facts, markdown_lines, quiet, scrolling, table
from hf_posenc.report.plot import STYLE, Chart, Drawing, Line, draw_chart, figure_files, intervals_words
from hf_posenc.report.retrieval import (
    BY,
    Grid,
    GridRow,
    depth_name,
    grid_facts,
    grid_legend,
    interval_name,
    share_name,
)
from hf_posenc.report.tables import length_name
from hf_posenc.retrieval.cell_records import wilson_interval

_STRONGEST = 55  # percent of the colour where all is right: text stays readable on it, on light and dark pages


def draw_heat_map(grid: Grid) -> Drawing:
    """Draw a map for each row and scoring; the page has tables in their place."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, scorings = grid.rows, grid.scorings
    height, width = 1.1 + 0.32 * len(grid.depths), 2.2 + 0.8 * len(grid.lengths)
    with plt.rc_context(cast(Any, STYLE)):
        figure, every = plt.subplots(
            len(rows),
            len(scorings),
            figsize=(width * len(scorings), height * len(rows)),
            layout="constrained",
            squeeze=False,
        )
        for line, row in zip(every, rows, strict=True):
            for axes, by in zip(line, scorings, strict=True):
                _draw_row(axes, grid, row, by)
        figure.supylabel("depth", fontsize=9)
        figure.supxlabel("context length in tokens", fontsize=9)
        figure.suptitle(f"{grid.models}: {grid.title}, percent right", x=0.01, ha="left", fontsize=10)
        files = figure_files(figure)
        plt.close(figure)
    return Drawing(files[".png"], files[".svg"])


def _draw_row(axes: Any, grid: Grid, row: GridRow, by: str) -> None:
    shares = [[_share(row.scores(by, length, depth)) for length in grid.lengths] for depth in grid.depths]
    # cividis reads the same with every kind of colour vision
    axes.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for y, values in enumerate(shares):
        for x, share in enumerate(values):
            if share == share:  # not where nothing was asked
                colour = "black" if share >= 0.5 else "white"
                axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(grid.lengths)), [length_name(n) for n in grid.lengths])
    axes.set_yticks(range(len(grid.depths)), [depth_name(depth) for depth in grid.depths])
    axes.set_title(f"{row.full_name}, {BY[by]}", loc="left", fontsize=9)


def _share(scores: list[float]) -> float:
    return sum(scores) / len(scores) if scores else float("nan")


def grid_panel(grid: Grid, looks: Looks) -> Panel:
    """Return a task's panel: accuracy by length, a map for each row, and how it was measured."""
    drawing, name, by_length = draw_heat_map(grid), f"{grid.slug}_by_length", _draw_by_length(grid, looks)
    caption = intervals_words(len(grid.rows))
    figure = "" if by_length is None else inline(by_length, name, f"{grid.title}, percent right by length", caption)
    maps = "\n".join(_map(grid, row, by) for row in grid.rows for by in grid.scorings)
    by_depth = f'<h3>Percent right, depth by length</h3>\n<div class="maps">{maps}</div>' if grid.has_depths else ""
    note = f'<p class="note">{escape(grid.note)}</p>\n' if grid.note else ""
    html = f"""{note}{figure}
{_by_length(grid)}
{quiet(grid_legend(grid))}
{by_depth}
<h3>How it was measured</h3>
{facts(grid_facts(grid))}"""
    image = f"![Percent right by length]({name}.png)\n\n{caption}" if by_length is not None else ""
    others = {} if by_length is None else {name: by_length}
    return Panel(grid.slug, grid.title, html, _markdown(grid, image), drawing, others)


def _draw_by_length(grid: Grid, looks: Looks) -> Drawing | None:
    """Draw shares by length, as first scored; None where there is one length."""
    if len(grid.lengths) == 1:
        return None
    by, lines = grid.scorings[0], []
    for row in grid.rows:
        every = {length: scores for length in grid.lengths if (scores := row.scores(by, length))}
        low, high = zip(*map(wilson_interval, every.values()), strict=True)
        shares = ([100 * one for one in values] for values in (map(_share, every.values()), low, high))
        points, lows, highs = shares
        last = share_name(list(every.values())[-1])
        lines.append(Line(f"{row.full_name}  {last}", list(every), points, looks[row_key(row.first)], lows, highs))
    title = f"{grid.models}: {grid.task}, {BY[by]}"
    ticks = [(length, length_name(length)) for length in grid.lengths]
    return draw_chart(Chart(title, "context length in tokens", "percent right", lines, ticks, y_range=(0, 100)))


def _by_length(grid: Grid) -> str:
    heads = [Cell("method"), *(Cell(length_name(n)) for n in grid.lengths)]
    rows = [
        [
            Cell(row.name, (", ".join(filter(None, (row.training, BY[by]))),)),
            *(_cell(row.scores(by, length)) for length in grid.lengths),
        ]
        for row in grid.rows
        for by in grid.scorings
    ]
    return table(grid.slug + "_table", heads, rows)


def _cell(scores: list[float]) -> Cell:
    return Cell(share_name(scores), (interval_name(scores),), _share(scores)) if scores else Cell("")


def _markdown(grid: Grid, chart: str) -> str:
    rows = []
    for row in grid.rows:
        for by in grid.scorings:
            every = [row.scores(by, length) for length in grid.lengths]
            cells = [f"{share_name(scores)} ({interval_name(scores)})" if scores else "" for scores in every]
            rows.append([row.name, row.training, BY[by], *cells])
    lines = markdown_lines(["method", "fine-tuning", "scored", *map(length_name, grid.lengths)], rows, texts=3)
    image = f"![Depth and length]({grid.slug}.png)"
    parts = [grid.note, chart, lines, grid_legend(grid), image, markdown_facts(grid_facts(grid))]
    return "\n\n".join(part for part in parts if part)


def _map(grid: Grid, row: GridRow, by: str) -> str:
    heads = "".join(f'<th scope="col">{length_name(n)}</th>' for n in grid.lengths)
    rows = "\n".join(
        f'<tr><th scope="row">{depth_name(depth)}</th>'
        + "".join(_shaded(row.scores(by, length, depth)) for length in grid.lengths)
        + "</tr>"
        for depth in grid.depths
    )
    caption = f"<caption>{escape(row.full_name)}, {BY[by]}</caption>"
    return scrolling(
        f'<table class="map">{caption}<thead><tr><th scope="col">depth</th>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table>"
    )


def _shaded(scores: list[float]) -> str:
    if not scores:
        return "<td></td>"
    share = _share(scores)
    shade = f"color-mix(in srgb, var(--c0) {_STRONGEST * share:.0f}%, var(--paper))"
    return f'<td style="background: {shade}">{100 * share:.0f}<small>of {len(scores)}</small></td>'
