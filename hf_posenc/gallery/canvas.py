"""Figures of several plots, drawn twice: side by side, and one below the other for phones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from hf_posenc.report.plot import STYLE, Drawing, figure_files

# What draws on axes; a colour bar is made of what it returns.
Draw = Callable[[Any], Any]
# cividis reads the same with every kind of colour vision.
COLOUR_MAP = "cividis"
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


@dataclass(frozen=True)
class Grid:
    """How plots are laid out.

    Attributes:
        columns: Of the wide form.
        narrow_columns: Of the narrow one.
        aspect: Height / width of one plot with its words.
        bar: What the colours say, for a colour bar of all plots; empty for none.
        bar_ticks: Places on the bar and their words; empty for matplotlib's own.
        projection: ``"3d"``, ``"polar"`` or None.
    """

    columns: int
    narrow_columns: int = 1
    aspect: float = 1.0
    bar: str = ""
    bar_ticks: Sequence[tuple[float, str]] = ()
    projection: str | None = None


def draw_grid(plots: Sequence[Draw], grid: Grid) -> Drawing:
    """Draw plots side by side, row by row, and once more for a narrow screen."""
    wide = _draw(plots, grid, narrow=False)
    return Drawing(wide[".png"], wide[".svg"], _draw(plots, grid, narrow=True)[".svg"])


def _draw(plots: Sequence[Draw], grid: Grid, narrow: bool) -> dict[str, bytes]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = grid.narrow_columns if narrow else grid.columns
    rows = -(-len(plots) // columns)
    width = _NARROW if narrow else _WIDE
    # A bar lies below the plots of the narrow form and stands beside those of the wide one.
    below, beside = (0.6, 0.0) if grid.bar and narrow else (0.0, 0.9 if grid.bar else 0.0)
    height = (width - beside) / columns * grid.aspect * rows + below
    with plt.rc_context(cast(Any, STYLE)):
        figure, every = plt.subplots(
            rows,
            columns,
            figsize=(width, height),
            layout="constrained",
            squeeze=False,
            subplot_kw={"projection": grid.projection},
        )
        axes = list(every.flat)
        drawn = [plot(one) for plot, one in zip(plots, axes, strict=False)]
        for one in axes[len(plots) :]:
            one.set_visible(False)
        if grid.bar:
            _bar(figure, drawn[0], axes, grid, narrow)
        files = figure_files(figure, (".svg",) if narrow else (".png", ".svg"))
        plt.close(figure)
    return files


def _bar(figure: Any, drawn: Any, axes: Sequence[Any], grid: Grid, narrow: bool) -> None:
    place: dict[str, Any] = {"location": "bottom", "aspect": 30} if narrow else {"location": "right", "aspect": 25}
    bar = figure.colorbar(drawn, ax=axes, label=grid.bar, shrink=0.9, **place)
    bar.outline.set_visible(False)
    bar.solids.set_edgecolor("face")  # no seams between its colours
    if grid.bar_ticks:
        bar.set_ticks([at for at, _ in grid.bar_ticks], labels=[words for _, words in grid.bar_ticks])


def heat_map(
    axes: Any,
    values: torch.Tensor,
    extent: tuple[float, float, float, float],
    limits: tuple[float, float],
    *,
    title: str = "",
    labels: tuple[str, str] = ("key position", "query position"),
    name: str = "",
) -> Any:
    """Draw a matrix, its first row on top; cells that are nan stay empty.

    Args:
        axes: Where.
        values: ``(rows, columns)``.
        extent: Left, right, bottom and top of the whole, in the units of the axes.
        limits: The values of the first and the last colour.
        title: Stands above it.
        labels: Of the x and the y axis.
        name: The id of its group in the SVG.
    """
    image = axes.imshow(
        values.numpy(),
        cmap=COLOUR_MAP,
        vmin=limits[0],
        vmax=limits[1],
        extent=extent,
        aspect="auto",
        interpolation="none",
    )
    if name:
        image.set_gid(name)
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    left, right, bottom, top = extent
    axes.set_xticks(*_ticks(left, right))
    axes.set_yticks(*_ticks(top, bottom))
    axes.set_facecolor("none")
    return image


def _ticks(begin: float, end: float) -> tuple[list[float], list[str]]:
    """Return places at the ends and in the middle, and their words: few enough for a phone."""
    places = [begin, (begin + end) / 2, end]
    return places, [tokens_name(place) for place in places]


def tokens_name(tokens: float) -> str:
    """Return ``10k`` for 10000 and ``16k`` for 16384, as each is written."""
    for kilo in (1024, 1000):
        if tokens >= 1000 and tokens % (kilo / 2) == 0:
            return f"{tokens / kilo:g}k"
    return f"{tokens:,.4g}" if tokens < 10000 else f"{tokens:,.0f}"
