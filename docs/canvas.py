"""Figures of several plots, drawn twice: side by side, and one below the other for phones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_posenc.reporting.plot import COLOUR_MAP, Drawing, draw, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What draws on axes; a colour bar is made of what it returns.
Draw = Callable[[Any], Any]
_WIDE, _NARROW = 7.6, 3.9  # inches, as those of report.plot


@dataclass(frozen=True)
class Picture:
    """A drawing with its words.

    Attributes:
        slug: Names its files.
        title: Its heading on a page.
        caption: What is to be seen, with what the colours and axes are.
        drawing: The content of its files.
    """

    slug: str
    title: str
    caption: str
    drawing: Drawing


def draw_grid(
    plots: Sequence[Draw],
    columns: int,
    *,
    narrow_columns: int = 1,
    aspect: float = 1.0,
    bar: str = "",
    projection: str | None = None,
) -> Drawing:
    """Draw plots side by side, row by row, and once more for a narrow screen.

    Args:
        plots: What draws each of them.
        columns: Of the wide form.
        narrow_columns: Of the narrow one.
        aspect: Height / width of one plot with its words.
        bar: What the colours say, for a colour bar of all plots; empty for none.
        projection: ``"3d"``, ``"polar"`` or None.
    """

    def make_figure(columns: int, width: float, location: str) -> Figure:
        rows = -(-len(plots) // columns)
        # The bar is below the plots of the narrow form and beside those of the wide one.
        below, beside = (0.6 if bar and location == "bottom" else 0.0), (0.9 if bar and location == "right" else 0.0)
        figure = new_figure((width, (width - beside) / columns * aspect * rows + below))
        axes = list(figure.subplots(rows, columns, squeeze=False, subplot_kw={"projection": projection}).flat)
        drawn = [plot(one) for plot, one in zip(plots, axes, strict=False)]
        for one in axes[len(plots) :]:
            one.set_visible(False)
        if bar:
            shape: Any = {"location": location, "aspect": 30 if location == "bottom" else 25}
            colours: Any = figure.colorbar(drawn[0], ax=axes, label=bar, shrink=0.9, **shape)
            colours.outline.set_visible(False)
            colours.solids.set_edgecolor("face")  # no seams between its colours
        return figure

    wide, narrow = (columns, _WIDE, "right"), (narrow_columns, _NARROW, "bottom")
    return draw(partial(make_figure, *wide), partial(make_figure, *narrow))


@dataclass(frozen=True)
class HeatMap:
    """A matrix to be drawn, its first row on top.

    Attributes:
        values: ``(rows, columns)``; cells that are nan stay empty.
        edges: What the right and the bottom edge are in the units of the axes, which begin at 0.
        title: Above it.
        name: The id of its group in the SVG.
        labels: Of the x and the y axis.
        note: Words inside.
    """

    values: torch.Tensor
    edges: tuple[float, float]
    title: str
    name: str
    labels: tuple[str, str] = ("key position", "query position")
    note: str = ""


def draw_heat_maps(maps: Iterable[HeatMap], limits: tuple[float, float], columns: int, **layout: Any) -> Drawing:
    """Draw matrices as ``draw_grid`` does; ``limits`` are the values of the first and the last colour."""
    return draw_grid([partial(_heat_map, one=one, limits=limits) for one in maps], columns, **layout)


def _heat_map(axes: Any, one: HeatMap, limits: tuple[float, float]) -> Any:
    right, bottom = one.edges
    image = axes.imshow(
        one.values.numpy(),
        cmap=COLOUR_MAP,
        vmin=limits[0],
        vmax=limits[1],
        extent=(0, right, bottom, 0),
        aspect="auto",
        interpolation="none",
    )
    image.set_gid(one.name)
    axes.set_title(one.title)
    axes.set(xlabel=one.labels[0], ylabel=one.labels[1], facecolor="none")
    for set_ticks, end in ((axes.set_xticks, right), (axes.set_yticks, bottom)):  # few enough for a phone
        set_ticks([0, end / 2, end], [tick_name(0), tick_name(end / 2), tick_name(end)])
    if one.note:
        axes.text(0.35, 0.5, one.note, transform=axes.transAxes, va="center", fontsize=8.5)
    return image


def quarters(length: float) -> list[tuple[float, str]]:
    """Return the ticks of an axis of tokens, one at each quarter, and their words."""
    return [(at * length / 4, tick_name(at * length / 4)) for at in range(5)]


def tick_name(tokens: float) -> str:
    """Return ``10k`` for 10000 and ``16k`` for 16384, as each is written."""
    for kilo in (1024, 1000):
        if tokens >= 1000 and tokens % (kilo / 2) == 0:
            return f"{tokens / kilo:g}k"
    return f"{tokens:,.4g}" if tokens < 10000 else f"{tokens:,.0f}"
