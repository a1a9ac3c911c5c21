"""Distance heat maps: what each encoding says of a query and a key, by where both stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hf_posenc.gallery.canvas import Draw, Grid, Picture, draw_grid, heat_map
from hf_posenc.gallery.scores import XPOS_SCALE_BASE, block_means, rope_score, xpos_score
from hf_posenc.methods.encodings.alibi import alibi_slopes
from hf_posenc.methods.encodings.t5_bias import t5_buckets

LENGTHS = (100, 1000, 10000)
_CELLS = 100  # of a row and a column: a map of 10,000 tokens has the means of 100 by 100
_EQUAL = "score, 1 at distance 0"
_SCORES = (-0.2, 1.0)  # of equal vectors: what the colours of RoPE, xPos and sinusoids go from and to
_LABELS = ("key position", "query position")

# What depends on the distance alone: float64, same shape as the int64 distances.
OfDistance = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that its encoding depends on.

    Attributes:
        num_pairs: Of a head, that turn.
        base: ``rope_theta``.
        num_heads: Of a layer.
        width: Features of a token.
        rows: Of a table of learned positions: tokens it was trained on.
        options: Of the encoding, as ``encodings_facts`` names them.
    """

    num_pairs: int = 64
    base: float = 10000.0
    num_heads: int = 8
    width: int = 512
    rows: int = 1024
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Maps:
    """The heat maps of one encoding.

    Attributes:
        title: Names it.
        rows: Words for a row of maps, and what it shows.
        bar: What the colours say.
        limits: The values of the first and the last colour.
        caption: What is to be seen.
    """

    title: str
    rows: Sequence[tuple[str, OfDistance]]
    bar: str
    limits: tuple[float, float]
    caption: str


def _rope(shape: Shape) -> Maps:
    return Maps(
        "RoPE",
        [("", partial(rope_score, num_pairs=shape.num_pairs, base=shape.base))],
        _EQUAL,
        _SCORES,
        f"The score of a query and a key with the same features, {shape.num_pairs} pairs at base {shape.base:g}. It "
        "falls with the distance and depends on nothing else: lines along the diagonal have one colour.",
    )


def _xpos(shape: Shape) -> Maps:
    scale_base = shape.options.get("scale_base", XPOS_SCALE_BASE)
    score = partial(xpos_score, num_pairs=shape.num_pairs, base=shape.base, scale_base=scale_base)
    return Maps(
        "xPos",
        [("", score)],
        _EQUAL,
        _SCORES,
        f"As RoPE, and each pair fades besides, the fast ones most (scale_base {scale_base:g}): after some thousands "
        "of tokens nothing is left.",
    )


def _sinusoidal(shape: Shape) -> Maps:
    base = shape.options.get("base", 10000.0)
    return Maps(
        "Sinusoidal",
        [("", partial(rope_score, num_pairs=shape.width // 2, base=base))],
        "product, 1 at distance 0",
        _SCORES,
        f"The dot product of the rows of two positions, {shape.width} features. It depends on the distance alone, but "
        "the rows are added to the words before the first layer, whose weights may make anything of them.",
    )


def _alibi(shape: Shape) -> Maps:
    slopes = alibi_slopes(shape.num_heads).tolist()
    heads = sorted({0, (shape.num_heads - 1) // 2, shape.num_heads - 1})
    rows: list[tuple[str, OfDistance]] = [
        (f"head {head + 1}, slope {slopes[head]:.3g}", partial(_faded, slope=slopes[head])) for head in heads
    ]
    return Maps(
        "ALiBi",
        rows,
        "weight factor, exp(bias)",
        (0.0, 1.0),
        "What the bias multiplies an attention weight by, before weights are made to sum to 1. Each head looks back "
        "as far as its slope lets it, and no further in a longer text.",
    )


def _faded(distances: torch.Tensor, slope: float) -> torch.Tensor:
    return torch.exp(-slope * distances.double())


def _t5(shape: Shape) -> Maps:
    buckets, farthest = shape.options.get("num_buckets", 32), shape.options.get("max_distance", 128)
    return Maps(
        "T5's bias",
        [("", lambda distances: t5_buckets(-distances, num_buckets=buckets, max_distance=farthest).double())],
        "bucket: which learned number",
        (0.0, buckets - 1.0),
        f"Which of a head's {buckets} learned numbers is added to the score. Near keys have one each, farther ones "
        f"share, and from {farthest} tokens on all have the last: past it, near and far are the same.",
    )


def _relative(shape: Shape) -> Maps:
    farthest = shape.options.get("max_distance", 128)
    return Maps(
        "Relative bias, clipped",
        [("", lambda distances: distances.clamp(max=farthest).double())],
        "which learned number",
        (0.0, float(farthest)),
        f"Which of a head's {farthest + 1} learned numbers is added to the score: one for each distance, and all keys "
        f"{farthest} or more tokens away share the last.",
    )


def _nope(shape: Shape) -> Maps:
    return Maps(
        "NoPE",
        [("", lambda distances: torch.ones_like(distances, dtype=torch.float64))],
        _EQUAL,
        (0.0, 1.0),
        "Nothing is said of positions: all keys up to the query are alike. Only the causal mask, which cuts off the "
        "upper half, tells queries apart.",
    )


_MAPS: dict[str, Callable[[Shape], Maps]] = {
    "rope": _rope,
    "xpos": _xpos,
    "sinusoidal": _sinusoidal,
    "alibi": _alibi,
    "t5_bias": _t5,
    "relative_bias": _relative,
    "nope": _nope,
}
ENCODINGS = (*_MAPS, "learned")


def make_maps(name: str, shape: Shape) -> Maps:
    """Return what the maps of an encoding show; ``learned`` has none of distances."""
    return _MAPS[name](shape)


def map_values(of_distance: OfDistance, length: int) -> tuple[torch.Tensor, int]:
    """Return the matrix of a text of ``length`` tokens, and the tokens on its edge: whole blocks, so perhaps a few "
    "more."""
    cells = min(_CELLS, length)
    size = -(-length // cells)
    return block_means(of_distance(torch.arange(cells * size)), cells), cells * size


def learned_values(rows: int, length: int, width: int = 64) -> torch.Tensor:
    """Return cosines of the rows of an untrained table, float64 ``(cells, cells)``; nan where there is no row.

    Args:
        rows: Of the table.
        length: Of the text, in tokens; one token of each block is looked at.
        width: Features of a row.
    """
    cells = min(_CELLS, length)
    places = torch.arange(cells) * -(-length // cells)
    table = torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table = torch.nn.functional.normalize(table, dim=-1)
    found = table[places.clamp(max=rows - 1)]
    values = found @ found.T
    there = (places < rows)[:, None] & (places < rows) & (places[:, None] >= places)
    return torch.where(there, values, torch.nan)


def draw_maps(name: str, shape: Shape, lengths: Sequence[int] = LENGTHS) -> Picture:
    """Draw an encoding's maps: a column for each length of text."""
    if name == "learned":
        return _draw_learned(shape, lengths)
    maps = make_maps(name, shape)
    several = len(maps.rows) > 1
    plots: list[Draw] = []
    for row, (words, of_distance) in enumerate(maps.rows):
        for column, length in enumerate(lengths):
            title = f"{length:,} tokens" if row == 0 else ""
            labels = _labels(words, row == len(maps.rows) - 1, column == 0) if several else _LABELS
            number = len(plots)
            plots.append(_plot(*map_values(of_distance, length), maps.limits, title, labels, number))
    grid = Grid(len(lengths), len(lengths) if several else 1, aspect=0.95, bar=maps.bar)
    caption = f"{maps.caption} Each cell is the mean of its pairs; keys after the query are left out."
    return Picture(f"map_{name}", f"{maps.title}: by query and key", caption, draw_grid(plots, grid))


def _labels(words: str, last_row: bool, first_column: bool) -> tuple[str, str]:
    return _LABELS[0] if last_row else "", f"{words}\n{_LABELS[1]}" if first_column else ""


def _plot(
    values: torch.Tensor, edge: int, limits: tuple[float, float], title: str, labels: tuple[str, str], number: int
) -> Draw:
    extent = (0, edge, edge, 0)
    return lambda axes: heat_map(axes, values, extent, limits, title=title, labels=labels, name=f"map-{number}")


def _draw_learned(shape: Shape, lengths: Sequence[int]) -> Picture:
    plots = [_plot_learned(shape.rows, length, number) for number, length in enumerate(lengths)]
    caption = (
        f"The cosine of the rows of two positions in a table of {shape.rows:,} rows as it is initialised: no two are "
        "alike, and what becomes of it is up to the training. One pair of positions a cell. Past the last row there is "
        "nothing, and the map stays empty."
    )
    grid = Grid(len(lengths), aspect=0.95, bar="cosine of two rows")
    return Picture("map_learned", "Learned positions: by query and key", caption, draw_grid(plots, grid))


def _plot_learned(rows: int, length: int, number: int) -> Draw:
    plot = _plot(learned_values(rows, length), length, (-1.0, 1.0), f"{length:,} tokens", _LABELS, number)

    def draw(axes: Any) -> Any:
        image = plot(axes)
        if rows < length:
            words = f"no row for\nposition {rows:,}\nand later"
            axes.text(0.35, 0.5, words, transform=axes.transAxes, va="center", fontsize=8.5)
        return image

    return draw
