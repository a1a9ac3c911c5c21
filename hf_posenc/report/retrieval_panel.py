"""The panel of a retrieval task: accuracy by length, and depth by length heat maps, as drawings and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hf_posenc.evaluation.intervals import wilson_interval
from hf_posenc.evaluation.rows import row_key
from hf_posenc.report.comparable import BY, Grid, GridRow, computed_in, share_name
from hf_posenc.report.looks import Looks
from hf_posenc.report.page import Block, Cell, Facts, Figure, HeatMap, HeatMaps, NumberTable, Panel, Paragraph
from hf_posenc.report.plot import STYLE, Chart, Drawing, Line, draw_chart, figure_files, intervals_words
from hf_posenc.utils.units import length_name

_EXPLAINED = {
    "forced": (
        "Teacher-forced: given the prompt, the likeliest token is the right one at every token that holds the answer; "
        "the word before it does not count."
    ),
    "written": "Written: the answer is in what the model writes greedily.",
}


def grid_panel(grid: Grid, looks: Looks) -> Panel:
    """Return a task's panel: accuracy by length, a map for each row, and how it was measured."""
    label = f"{grid.title}, percent right by length"
    caption = intervals_words(len(grid.rows))
    blocks: list[Block] = [Paragraph(grid.note, "note")] if grid.note else []
    if len(grid.lengths) > 1:
        drawing = draw_chart(_chart(grid, looks))
        blocks.append(Figure(drawing, f"{grid.slug}_by_length", label, caption, alt="Percent right by length"))
    how = " ".join(_EXPLAINED[by] for by in grid.scorings)
    legend = f"Share of the answers that were right, with Wilson's 95 % interval over prompts. {how}"
    maps = [_map(grid, row, by) for row in grid.rows for by in grid.scorings] if grid.has_depths else []
    blocks += [
        _by_length(grid),
        Paragraph(legend, "quiet"),
        HeatMaps(grid.slug, _draw_maps(grid), [length_name(length) for length in grid.lengths], maps),
        Facts(_measured(grid)),
    ]
    return Panel(grid.slug, grid.title, blocks)


def _chart(grid: Grid, looks: Looks) -> Chart:
    """Return the chart of shares by length, as first scored."""
    by, lines = grid.scorings[0], []
    for row in grid.rows:
        every = {length: scores for length in grid.lengths if (scores := row.scores(by, length))}
        low, high = zip(*map(wilson_interval, every.values()), strict=True)
        points, lows, highs = ([100 * one for one in values] for values in (map(_share, every.values()), low, high))
        last = share_name(list(every.values())[-1])
        lines.append(Line(f"{row.full_name}  {last}", list(every), points, looks[row_key(row.first)], lows, highs))
    title = f"{grid.models}: {grid.task}, {BY[by]}"
    ticks = [(length, length_name(length)) for length in grid.lengths]
    return Chart(title, "context length in tokens", "percent right", lines, ticks, y_range=(0, 100))


def _by_length(grid: Grid) -> NumberTable:
    heads = [Cell("method"), *(Cell(length_name(length)) for length in grid.lengths)]
    rows = [
        [Cell(row.name, (row.training, BY[by])), *(_cell(row.scores(by, length)) for length in grid.lengths)]
        for row in grid.rows
        for by in grid.scorings
    ]
    return NumberTable(grid.slug + "_table", heads, rows, small_heads=("fine-tuning", "scored"))


def _cell(scores: Sequence[float]) -> Cell:
    if not scores:
        return Cell("")
    low, high = wilson_interval(scores)
    return Cell(share_name(scores), sort=_share(scores), interval=f"{100 * low:.0f}–{100 * high:.0f}")


def _share(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores) if scores else float("nan")


def _map(grid: Grid, row: GridRow, by: str) -> HeatMap:
    shares = []
    for depth in grid.depths:
        found = (row.scores(by, length, depth) for length in grid.lengths)
        shares.append((_depth_name(depth), [(_share(scores), len(scores)) for scores in found]))
    return HeatMap(f"{row.full_name}, {BY[by]}", shares)


def _depth_name(depth: float | None) -> str:
    return "spread" if depth is None else f"{depth:g} %"


def _measured(grid: Grid) -> list[tuple[str, str]]:
    """Return what has to be the same to measure these numbers again, as pairs of a name and a value."""
    records = [record for row in grid.rows for record in row.records]

    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(getattr(record, name)) for record in records))

    versions = dict.fromkeys(f"{name} {value}" for record in records for name, value in record.versions.items())
    depths = ", ".join(map(_depth_name, grid.depths))
    seeds = sorted({record.seed for record in records})
    return [
        ("Protocol", f"{grid.task}. Prompt and longest answer together fill the context length; greedy."),
        (
            "Depth",
            f"Of the text before the needle: {depths}."
            if grid.has_depths
            else "What the answer needs is spread over the text.",
        ),
        ("Prompts", ", ".join(f"{len(grid.rows[0].scores('written', n))} at {length_name(n)}" for n in grid.lengths)),
        ("Seeds", f"{seeds[0]}–{seeds[-1]}" if len(seeds) > 1 else str(seeds[0])),
        ("Chat template", "yes" if records[0].chat else "no"),
        ("Model", all_of("model")),
        ("Tokenizer hash", records[0].tokenizer_hash),
        ("Computed in", computed_in(records)),
        ("Versions", ", ".join(versions)),
    ]


def _draw_maps(grid: Grid) -> Drawing:
    """Draw a map for each row and scoring; the page has tables instead."""
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
            if share == share:  # not where nothing was measured
                colour = "black" if share >= 0.5 else "white"
                axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(grid.lengths)), [length_name(n) for n in grid.lengths])
    axes.set_yticks(range(len(grid.depths)), [_depth_name(depth) for depth in grid.depths])
    axes.set_title(f"{row.full_name}, {BY[by]}", loc="left", fontsize=9)
