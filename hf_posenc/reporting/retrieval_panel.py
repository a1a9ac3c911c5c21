"""The panels of retrieval: all tasks by length, and each task by length and in heat maps of depth by length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.intervals import Share
from hf_posenc.evaluation.rows import row_key
from hf_posenc.reporting.comparable import (
    BY,
    Depths,
    Grid,
    GridRow,
    all_of,
    computed_with,
    model_names,
    share_name,
)
from hf_posenc.reporting.looks import Looks
from hf_posenc.reporting.page import Block, Cell, Facts, Figure, HeatMap, HeatMaps, NumberTable, Panel, Paragraph
from hf_posenc.reporting.plot import (
    COLOUR_MAP,
    Chart,
    Line,
    draw,
    draw_chart,
    intervals_words,
    length_ticks,
    new_figure,
)
from hf_posenc.utils.units import length_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

_EXPLAINED = {
    "forced": (
        "Teacher-forced: given the prompt, the likeliest token is the right one at every token that holds the answer; "
        "the word before it does not count."
    ),
    "written": "Written: the answer is in what the model writes greedily.",
}


def matrix_panel(grids: Sequence[Grid]) -> Panel:
    """Return the panel of all tasks by length, as each is scored first, with the number of questions."""
    lengths = sorted({length for grid in grids for length in grid.lengths})
    shown = [(grid, row, [row.share(grid.scorings[0], n) for n in lengths]) for grid in grids for row in grid.rows]
    cells = [
        [
            Cell(row.name, (grid.title.removeprefix("Retrieval: "), row.training, BY[grid.scorings[0]])),
            *(Cell("") if share is None else _cell(share, share.counted) for share in shares),
        ]
        for grid, row, shares in shown
    ]
    names = [length_name(length) for length in lengths]
    note = f"Share of the answers that were right, with its 95 % interval. {_interval_words(_all(shown))}"
    table = NumberTable("retrieval_tasks_table", ["method", *names], cells, ("task", "fine-tuning", "scored"))
    return Panel("retrieval_tasks", "Retrieval: all tasks", [table, Paragraph(note, "quiet")])


def _all(shown: Sequence[tuple[Grid, GridRow, Sequence[Share | None]]]) -> list[Share]:
    return [share for _, _, shares in shown for share in shares if share is not None]


def _interval_words(shares: Sequence[Share]) -> str:
    """Say what intervals are."""
    over = {share.is_over for share in shares}
    words = []
    if "prompts" in over:
        words.append("Where each prompt has a text of its own it is Wilson's, over prompts.")
    if "texts" in over:
        words.append(
            "Where questions share texts it is over texts: Wilson's of the effective number of questions, as those of "
            "one text are right or wrong together, with Student's quantile."
        )
    if "the questions of one text" in over:
        words.append("Where there is one text it is Wilson's over its questions, and says nothing about other texts.")
    return " ".join(words)


def grid_panel(grid: Grid, looks: Looks) -> Panel:
    """Return a task's panel: accuracy by length, a map for each row, and how it was measured."""
    label, names = f"{grid.title}, percent right by length", [length_name(length) for length in grid.lengths]
    blocks: list[Block] = [Paragraph(note, "note") for note in grid.notes]
    if len(grid.lengths) > 1:
        chart, caption = draw_chart(_chart(grid, looks)), intervals_words(len(grid.rows))
        blocks.append(Figure(chart, f"{grid.slug}_by_length", label, caption, alt="Percent right by length"))
    how = " ".join(_EXPLAINED[by] for by in grid.scorings)
    cells = [
        [Cell(row.name, (row.training, BY[by])), *(_cell(row.share(by, length)) for length in grid.lengths)]
        for row in grid.rows
        for by in grid.scorings
    ]
    shares = [
        share for row in grid.rows for n in grid.lengths for share in [row.share("written", n)] if share is not None
    ]
    maps = [_map(grid, row, by) for row in grid.rows for by in grid.scorings]
    drawing = draw(partial(_map_figure, grid, maps, names))
    blocks += [
        NumberTable(grid.slug + "_table", ["method", *names], cells, small_heads=("fine-tuning", "scored")),
        Paragraph(
            f"Share of the answers that were right, with its 95 % interval. {_interval_words(shares)} {how}", "quiet"
        ),
        HeatMaps(grid.slug, drawing, names, maps if grid.depths != [None] else []),
        Facts(_measured(grid)),
    ]
    return Panel(grid.slug, grid.title, blocks)


def _chart(grid: Grid, looks: Looks) -> Chart:
    """Return the chart of shares by length, as first scored."""
    by, lines = grid.scorings[0], []
    for row in grid.rows:
        every = {length: share for length in grid.lengths if (share := row.share(by, length)) is not None}
        points, lows, highs = (
            [100 * value for value in values]
            for values in zip(*((one.value, one.low, one.high) for one in every.values()), strict=True)
        )
        last = share_name(list(every.values())[-1])
        lines.append(Line(f"{row.full_name}  {last}", list(every), points, looks[row_key(row.first)], lows, highs))
    title, ticks = f"{model_names(grid.records)}: {grid.task}, {BY[by]}", length_ticks(grid.lengths)
    return Chart(title, "context length in tokens", "percent right", lines, ticks, y_range=(0, 100))


def _cell(share: Share | None, *small: str) -> Cell:
    if share is None:
        return Cell("")
    return Cell(share_name(share), small, sort=share.value, interval=share.interval)


def _map(grid: Grid, row: GridRow, by: str) -> HeatMap:
    shares = []
    for depths in grid.depths:
        found = (row.share(by, length, depths) for length in grid.lengths)
        each = [(math.nan, 0) if one is None else (one.value, one.n_questions) for one in found]
        shares.append((_depth_name(depths), each))
    return HeatMap(f"{row.full_name}, {BY[by]}", shares)


def _depth_name(depths: Depths | None) -> str:
    return "spread" if depths is None else str(depths)


def _measured(grid: Grid) -> list[tuple[str, str]]:
    """Return the settings that measure these numbers again, as pairs of a name and a value."""
    seeds = sorted({record.seed for record in grid.records})
    depths = f"Of the text before the needle: {', '.join(map(_depth_name, grid.depths))}."
    return [
        ("Protocol", f"{grid.task}. Prompt and longest answer together fill the context length; greedy."),
        ("Depth", depths if grid.depths != [None] else "What the answer needs is spread over the text."),
        ("Prompts", _prompts(grid)),
        ("Seeds", f"{seeds[0]}–{seeds[-1]}" if len(seeds) > 1 else str(seeds[0])),
        ("Chat template", "yes" if grid.records[0].chat else "no"),
        ("Model", all_of(grid.records, "model")),
        *computed_with(grid.records),
    ]


def _prompts(grid: Grid) -> str:
    """Return the number of prompts at each length, or the numbers of questions and texts."""
    shares = {n: share for n in grid.lengths if (share := grid.rows[0].share("written", n)) is not None}
    return ", ".join(
        f"{one.counted.removesuffix(' prompts').removesuffix(' prompt')} at {length_name(n)}"
        for n, one in shares.items()
    )


def _map_figure(grid: Grid, maps: Sequence[HeatMap], names: Sequence[str]) -> MatplotlibFigure:
    """Draw the maps, a row of them for each row of the grid; the page has tables instead."""
    rows, columns = len(grid.rows), len(grid.scorings)
    figure = new_figure(((2.2 + 0.8 * len(names)) * columns, (1.1 + 0.32 * len(grid.depths)) * rows))
    for axes, one in zip(figure.subplots(rows, columns, squeeze=False).flat, maps, strict=True):
        _draw_map(axes, one, names)
    figure.supylabel("depth", fontsize=9)
    figure.supxlabel("context length in tokens", fontsize=9)
    figure.suptitle(f"{model_names(grid.records)}: {grid.title}, percent right", x=0.01, ha="left", fontsize=10)
    return figure


def _draw_map(axes: Any, one: HeatMap, names: Sequence[str]) -> None:
    shares = [[share for share, _ in shares] for _, shares in one.rows]
    axes.imshow(shares, cmap=COLOUR_MAP, vmin=0, vmax=1, aspect="auto")
    for y, values in enumerate(shares):
        for x, share in enumerate(values):
            if not math.isnan(share):  # nothing was measured
                colour = "black" if share >= 0.5 else "white"
                axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(one.rows)), [depth for depth, _ in one.rows])
    axes.set_title(one.caption)
