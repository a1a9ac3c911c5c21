"""The panel of a retrieval task: accuracy by length, and depth by length heat maps, as drawings and as tables."""

from __future__ import annotations

from html import escape
from typing import Any, cast

from hf_posenc.report.pieces import Cell, Panel, facts, markdown_facts, markdown_lines, quiet, table
from hf_posenc.report.plot import STYLE, Drawing, figure_files
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
        figure.suptitle(f"{grid.title}, percent right", x=0.01, ha="left", fontsize=10)
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


def grid_panel(grid: Grid) -> Panel:
    """Return a task's panel: accuracy by length, a map for each row, and how it was measured."""
    drawing = draw_heat_map(grid)
    maps = "\n".join(_map(grid, row, by) for row in grid.rows for by in grid.scorings)
    by_depth = f'<h3>Percent right, depth by length</h3>\n<div class="maps">{maps}</div>' if grid.has_depths else ""
    note = f'<p class="note">{escape(grid.note)}</p>\n' if grid.note else ""
    html = f"""{note}{_by_length(grid)}
{quiet(grid_legend(grid))}
{by_depth}
<h3>How it was measured</h3>
{facts(grid_facts(grid))}"""
    return Panel(grid.slug, grid.title, html, _markdown(grid), drawing)


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


def _markdown(grid: Grid) -> str:
    rows = []
    for row in grid.rows:
        for by in grid.scorings:
            every = [row.scores(by, length) for length in grid.lengths]
            cells = [f"{share_name(scores)} ({interval_name(scores)})" if scores else "" for scores in every]
            rows.append([row.name, row.training, BY[by], *cells])
    lines = markdown_lines(["method", "fine-tuning", "scored", *map(length_name, grid.lengths)], rows, texts=3)
    image = f"![Depth and length]({grid.slug}.png)"
    parts = [grid.note, lines, grid_legend(grid), image, markdown_facts(grid_facts(grid))]
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
    return (
        f'<div class="scroll"><table class="map">{caption}<thead><tr><th scope="col">depth</th>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _shaded(scores: list[float]) -> str:
    if not scores:
        return "<td></td>"
    share = _share(scores)
    shade = f"color-mix(in srgb, var(--c0) {_STRONGEST * share:.0f}%, var(--paper))"
    return f'<td style="background: {shade}">{100 * share:.0f}<small>of {len(scores)}</small></td>'
