"""Perplexity by length, as a PNG and as an SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from hf_posenc.report.tables import Row, Table, length_name, number_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart, but for their yellow and black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK = "#3b3f46"  # text, axes and the unpatched row; the page swaps it for the colour of its text
_LABEL_POINTS = 11  # least distance of two labels
_LOG_FROM = 4.0  # how many times the lowest value the highest is, for a logarithmic y axis

STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "hf_posenc",
}


def draw(table: Table) -> dict[str, bytes]:
    """Return the plot of a table as file contents, by suffix: ``.png`` and ``.svg``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(cast(Any, STYLE)):  # its stub lists every key there is
        figure, axes = plt.subplots(figsize=(7.6, 4.4), layout="constrained")
        colours = _colours(table.rows)
        for row in table.rows:
            _draw_row(axes, row, colours[row.full_name])
        _draw_axes(axes, table)
        figure.draw_without_rendering()  # the layout has to be known before labels are spread
        _label_rows(axes, table, colours)
        files = figure_files(figure)
        plt.close(figure)
    return files


def figure_files(figure: Figure) -> dict[str, bytes]:
    """Return a figure as file contents, by suffix: ``.png`` and ``.svg``."""
    files = {}
    kinds: tuple[tuple[str, dict[str, Any]], ...]
    kinds = ((".png", {"dpi": 200}), (".svg", {"metadata": {"Date": None}, "transparent": True}))
    for suffix, kwargs in kinds:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix[1:], **kwargs)
        files[suffix] = buffer.getvalue()
    return files


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    """One colour a method; what was trained has the colour of its zero-shot row."""
    names = list(dict.fromkeys(row.name for row in rows if row.first.method != "none"))
    by_name = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    return {row.full_name: by_name.get(row.name, INK) for row in rows}


def _draw_row(axes: Axes, row: Row, colour: str) -> None:
    lengths, records = list(row.records), list(row.records.values())
    trained = row.first.tokens_trained > 0
    axes.fill_between(
        lengths, [r.ci_low for r in records], [r.ci_high for r in records], color=colour, alpha=0.13, linewidth=0
    )
    axes.plot(
        lengths,
        [record.perplexity for record in records],
        color=colour,
        linewidth=2.4 if trained else 1.6,
        marker="s" if trained else "o",
        markersize=5 if trained else 4,
    )


def _draw_axes(axes: Axes, table: Table) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(table.lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_name(round(value))))
    axes.xaxis.set_minor_locator(NullLocator())
    values = [record.perplexity for row in table.rows for record in row.records.values()]
    if max(values) > _LOG_FROM * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(_log_ticks(min(values), max(values))))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("context length N in tokens")
    axes.set_ylabel("perplexity, lower is better")
    axes.set_title(table.title, loc="left", fontsize=10, pad=16)
    for original in table.originals:
        axes.axvline(original, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.7)
        above = axes.get_xaxis_transform()
        axes.text(original, 1.015, f"trained on {length_name(original)}", ha="center", transform=above, fontsize=8)


def _log_ticks(low: float, high: float) -> list[float]:
    steps = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**decade for decade in decades for step in steps]


def _label_rows(axes: Axes, table: Table, colours: dict[str, str]) -> None:
    """Write each row's name where its line ends, moved apart where lines end close together."""
    ends = [(row, *list(row.records.items())[-1]) for row in table.rows]
    points = 72 / axes.figure.dpi
    wanted = [axes.transData.transform((length, record.perplexity))[1] * points for _, length, record in ends]
    for (row, length, record), at, moved in zip(ends, wanted, _spread(wanted), strict=True):
        axes.annotate(
            f"{row.full_name}  {number_name(record.perplexity)}",
            (length, record.perplexity),
            xytext=(10, moved - at),
            textcoords="offset points",
            va="center",
            color=colours[row.full_name],
            fontsize=8.5,
            fontweight="bold" if row.first.tokens_trained else "normal",
            annotation_clip=False,
        )


def _spread(positions: Sequence[float], gap: float = _LABEL_POINTS) -> list[float]:
    """Move positions as little as keeps them in order and ``gap`` apart: touching ones share their middle."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    blocks: list[list[int]] = []
    centres: list[float] = []
    for index in order:
        blocks.append([index])
        centres.append(positions[index])
        while len(blocks) > 1 and centres[-1] - centres[-2] < gap * (len(blocks[-1]) + len(blocks[-2])) / 2:
            merged = blocks[-2] + blocks[-1]
            blocks[-2:], centres[-2:] = [merged], [sum(positions[i] for i in merged) / len(merged)]
    moved = list(positions)
    for block, centre in zip(blocks, centres, strict=True):
        for place, index in enumerate(block):
            moved[index] = centre + gap * (place - (len(block) - 1) / 2)
    return moved
