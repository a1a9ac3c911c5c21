"""Drawings: line charts as PNG and SVG for papers and cards, and once more for the narrow screen of a phone."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hf_posenc.reporting.looks import INK, PAPER, Look
from hf_posenc.utils.units import length_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WHISKER_POINTS = 3.5  # from one line's whiskers to the next one's
_MARKED = 12  # about how many points of a long line have a marker
_LABEL_POINTS = 11  # least distance of two labels
_LOG_FROM = 4.0  # how many times the lowest value the highest is, for a logarithmic y axis
_LONGEST_LABEL = 40  # characters of the longest name that is beside its line: longer ones leave no room for lines
_BANDS, _WHISKERS = 3, 6  # most lines whose intervals are drawn as bands, and as whiskers
COLOUR_MAP = "cividis"  # reads the same with every kind of colour vision
_SAVED: dict[str, dict[str, Any]] = {"png": {"dpi": 200}, "svg": {"metadata": {"Date": None}, "transparent": True}}
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "path",
    "text.parse_math": False,  # names may have dollars
    "svg.hashsalt": "hf_posenc",
}


class _Form(NamedTuple):
    """``width`` and ``height`` in inches, to which a legend adds; the characters of a line of a title and a legend."""

    width: float
    height: float
    title: int
    legend: int
    legend_columns: int


_WIDE, _NARROW = _Form(7.6, 4.4, 84, 50, 2), _Form(3.5, 3.2, 34, 36, 1)


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: Shown where it ends, or in the legend.
        x, y: Its corners.
        look: How it is drawn.
        low, high: The ends of an interval at each x, or empty.
        raw: Corners of what it was smoothed from, drawn faintly where lines are few; or empty.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    look: Look
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    raw: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Chart:
    """The content of a chart.

    Attributes:
        title: Above it.
        x_label, y_label: With units.
        lines: Named where they end, or in a legend.
        x_ticks: Values on the x axis and their names.
        marks: Values on the x axis with a dashed line, and the words above them.
        log_x: To base 2.
        y_range: Ends of a linear y axis; None for what the values need, logarithmic where they are far apart.
        falls: The x axis falls from left to right.
        shade: A part of the x axis behind which the paper is darker.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_ticks: Sequence[tuple[float, str]]
    marks: Sequence[tuple[float, str]] = ()
    log_x: bool = True
    y_range: tuple[float, float] | None = None
    falls: bool = False
    shade: tuple[float, float] | None = None


@dataclass(frozen=True)
class Drawing:
    """A drawing as the content of files: ``narrow`` is an SVG for phones, or empty."""

    png: bytes
    svg: bytes
    narrow: bytes = b""

    @property
    def files(self) -> dict[str, bytes]:
        """The files that are written beside the page, by suffix."""
        return {".png": self.png, ".svg": self.svg}


def length_ticks(lengths: Sequence[int]) -> list[tuple[float, str]]:
    """Return the ticks of an axis of lengths in tokens."""
    return [(length, length_name(length)) for length in lengths]


def intervals_words(count: int) -> str:
    """Say how the 95 % intervals of so many lines are drawn: what lies over each other hides the lines."""
    if count <= _BANDS:
        return "Bands are the 95 % intervals."
    if count <= _WHISKERS:
        return "Whiskers are the 95 % intervals."
    return "With so many rows, the 95 % intervals are in the table only."


def shows_raw(count: int) -> bool:
    """Say whether what lines were smoothed from is drawn behind them."""
    return count <= _BANDS


def draw(wide: Callable[[], Figure], narrow: Callable[[], Figure] | None = None) -> Drawing:
    """Return the files of figures, which are made in the style of all drawings."""
    import matplotlib

    with matplotlib.rc_context(cast(Any, _STYLE)):  # its stub lists every key
        png, svg = _saved(wide(), "png", "svg")
        return Drawing(png, svg, *_saved(narrow(), "svg") if narrow else ())


def new_figure(size: tuple[float, float]) -> Figure:
    """Return a figure of so many inches, which lays out what is put into it and which pyplot does not know."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _saved(figure: Figure, *kinds: str) -> list[bytes]:
    files = []
    for kind in kinds:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, **_SAVED[kind])
        files.append(buffer.getvalue())
        figure.set_layout_engine("none")  # the next one is laid out as this one
    return files


def draw_chart(chart: Chart) -> Drawing:
    """Draw a chart: each line named where it ends; in a legend below where names are long, and on the narrow form."""
    return draw(partial(_make_figure, chart, _WIDE), partial(_make_figure, chart, _NARROW))


def _make_figure(chart: Chart, form: _Form) -> Figure:
    names, count = [line.name for line in chart.lines], len(chart.lines)
    if has_legend := form is _NARROW or max(map(len, names)) > _LONGEST_LABEL:
        names = [textwrap.fill(name, form.legend) for name in names]
        height = form.height + 0.19 * sum(name.count("\n") + 1 for name in names) / form.legend_columns
    else:
        height = max(form.height, 1.2 + 0.16 * count)
    figure = new_figure((form.width, height))
    axes = figure.subplots()
    for at, (line, name) in enumerate(zip(chart.lines, names, strict=True)):
        _draw_line(axes, replace(line, name=name), at, count)
    _draw_axes(axes, chart)
    axes.set_xlabel(textwrap.fill(chart.x_label, form.title))
    axes.set_title(textwrap.fill(chart.title, form.title), fontsize=10, pad=16)
    if has_legend:
        corner: dict[str, Any] = {"loc": "outside lower left", "ncols": form.legend_columns, "borderaxespad": 0.1}
        figure.legend(handlelength=3.5, **corner)
    else:
        figure.draw_without_rendering()  # the layout has to be known before labels are spread
        _label_lines(axes, chart.lines)
    return figure


def _draw_line(axes: Axes, line: Line, number: int, count: int) -> None:
    colour = line.look.colour
    if line.low and count <= _BANDS:
        axes.fill_between(
            line.x, line.low, line.high, color=colour, alpha=0.13, linewidth=0, zorder=1, gid=f"band-{number}"
        )
    elif line.low and count <= _WHISKERS:
        _draw_whiskers(axes, line, number, number - (count - 1) / 2)
    if line.raw and shows_raw(count):
        axes.plot(*zip(*line.raw, strict=True), color=colour, alpha=0.3, linewidth=0.7, zorder=1, gid=f"raw-{number}")
    every = max(1, len(line.x) // _MARKED)
    at = (number % every, every)  # not where the next line has its own
    axes.plot(line.x, line.y, label=line.name, markevery=at, gid=f"line-{number}", zorder=3, **_look(line.look))


def _draw_whiskers(axes: Axes, line: Line, number: int, steps: float) -> None:
    """Draw a line's intervals, ``steps`` to the right, so that those of lines that meet are side by side."""
    from matplotlib.transforms import ScaledTranslation

    ends = [[y - low for y, low in zip(line.y, line.low, strict=True)]]
    ends.append([high - y for y, high in zip(line.y, line.high, strict=True)])
    beside = ScaledTranslation(steps * _WHISKER_POINTS / 72, 0, cast(Any, axes.figure).dpi_scale_trans)
    _, caps, (bars,) = axes.errorbar(
        line.x, line.y, yerr=ends, fmt="none", ecolor=line.look.colour, elinewidth=1, capsize=1.5, zorder=1.5
    )
    for part in (*caps, bars):
        part.set_transform(axes.transData + beside)
    bars.set_gid(f"whiskers-{number}")


def _look(look: Look) -> dict[str, Any]:
    """Return a look as the arguments of ``plot``."""
    return {
        "color": look.colour,
        "linewidth": 2.4 if look.bold else 1.5,
        "linestyle": look.dashes,
        "marker": look.marker,
        "markersize": 6 if look.bold else 5,
        "fillstyle": "full" if look.fill == "none" else look.fill,  # hollow markers hide the line behind them
        "markerfacecolor": PAPER if look.fill == "none" else look.colour,
        "markerfacecoloralt": PAPER,
    }


def _draw_axes(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    if chart.log_x:
        axes.set_xscale("log", base=2)
    axes.set_xticks([at for at, _ in chart.x_ticks], [name for _, name in chart.x_ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    values = [value for line in chart.lines for value in line.y]
    if chart.y_range is None and min(values) > 0 and max(values) > _LOG_FROM * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(_log_ticks(min(values), max(values))))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    if chart.y_range is not None:
        low, high = chart.y_range
        axes.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")
    )
    draw_lines_across(axes)
    axes.set_ylabel(chart.y_label)
    if chart.shade is not None:
        axes.axvspan(*chart.shade, color=INK, alpha=0.07, linewidth=0)
    for at, words in chart.marks:
        axes.axvline(at, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.7)
        axes.text(at, 1.015, words, ha="center", transform=axes.get_xaxis_transform(), fontsize=8)
    if chart.falls:
        axes.invert_xaxis()


def draw_lines_across(axes: Any) -> None:
    """Draw faint lines at the ticks of the y axis, behind all else."""
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)


def _log_ticks(low: float, high: float) -> list[float]:
    steps = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**decade for decade in decades for step in steps]


def _label_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Write each line's name where it ends, moved apart where lines end close together."""
    points = 72 / axes.figure.dpi
    lowest = axes.bbox.y0 * points + _LABEL_POINTS / 2
    last = max((line.x[-1] for line in lines), key=lambda end: axes.transData.transform((end, 1))[0])
    for end in sorted({line.x[-1] for line in lines}):
        ending = [line for line in lines if line.x[-1] == end]
        ends = [axes.transData.transform((end, line.y[-1]))[1] * points for line in ending]
        below = 0 if end == last else _LABEL_POINTS  # out of the way of lines that run on
        wanted = [at - below for at in ends]
        for line, at, moved in zip(ending, ends, spread_labels(wanted, lowest=lowest), strict=True):
            _label_line(axes, line, moved - at)


def _label_line(axes: Axes, line: Line, up: float) -> None:
    """Write a line's name, and how it is drawn, beside its end, ``up`` points above it."""
    from matplotlib.transforms import ScaledTranslation

    axes.annotate(
        line.name,
        (line.x[-1], line.y[-1]),
        xytext=(34, up),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        fontweight="bold" if line.look.bold else "normal",
        annotation_clip=False,
    )
    end = ScaledTranslation(line.x[-1], line.y[-1], cast(Any, axes.transData))  # its stub wants an affine one
    scale = cast(Any, axes.figure).dpi_scale_trans + end
    x, y = [at / 72 for at in (9, 20, 31)], [up / 72] * 3
    axes.plot(x, y, markevery=[1], transform=scale, clip_on=False, **_look(line.look))


def spread_labels(positions: Sequence[float], gap: float = _LABEL_POINTS, lowest: float = -math.inf) -> list[float]:
    """Move positions as little as keeps them in order, ``gap`` apart and from ``lowest`` on."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    blocks: list[list[float]] = []  # of neighbours that touch, which without their gaps are moved to their mean
    for rank, index in enumerate(order):
        blocks.append([positions[index] - rank * gap])
        while len(blocks) > 1 and fmean(blocks[-1]) < fmean(blocks[-2]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    means = [fmean(block) for block in blocks for _ in block]
    moved = list(positions)
    for rank, (index, mean) in enumerate(zip(order, means, strict=True)):
        moved[index] = max(mean + rank * gap, lowest)
        lowest = moved[index] + gap
    return moved
