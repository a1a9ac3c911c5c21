"""Tables and bias matrices: the sinusoidal table, ALiBi's bias by head, T5's buckets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hf_posenc.gallery.canvas import Draw, Grid, Picture, draw_grid, heat_map
from hf_posenc.gallery.maps import Shape
from hf_posenc.methods.encodings.alibi import alibi_slopes
from hf_posenc.methods.encodings.sinusoidal import sinusoidal_table
from hf_posenc.methods.encodings.t5_bias import t5_buckets
from hf_posenc.report.looks import COLOURS, INK

_TOKENS = 256  # of a bias matrix
_LOWEST = -8.0  # nats: an attention weight is divided by 3000


def draw_sinusoidal_table(shape: Shape, rows: int = 256, width: int = 128) -> Picture:
    """Draw the table: positions down, features across, as the paper interleaves them and sines before cosines."""
    base = shape.options.get("base", 10000.0)
    table = sinusoidal_table(torch.arange(rows), width, base)
    apart = torch.cat((table[:, ::2], table[:, 1::2]), dim=-1)
    plots: list[Draw] = [
        partial(_table, values=values, title=title, name=name)
        for values, title, name in (
            (table, "sines and cosines in turn (paper)", "table-paper"),
            (apart, "sines, then cosines (tensor2tensor)", "table-halves"),
        )
    ]
    caption = (
        f"The rows that are added to the words at the positions 0 to {rows - 1}, {width} features at base {base:g}: "
        "fast waves in the first features, ever slower ones to the right, the last of "
        f"{2 * torch.pi * base ** (1 - 2 / width):,.0f} tokens. Both orders hold the same numbers."
    )
    drawing = draw_grid(plots, Grid(2, aspect=0.95, bar="value"))
    return Picture("sinusoidal_table", "Sinusoidal positions: the table", caption, drawing)


def _table(axes: Any, values: torch.Tensor, title: str, name: str) -> Any:
    rows, width = values.shape
    extent = (0, width, rows, 0)
    return heat_map(axes, values, extent, (-1, 1), title=title, labels=("feature", "position"), name=name)


def draw_alibi_bias(shape: Shape) -> Picture:
    """Draw the bias of three heads as matrices: what is added to a score."""
    slopes = alibi_slopes(shape.num_heads)
    heads = sorted({0, (shape.num_heads - 1) // 2, shape.num_heads - 1})
    plots: list[Draw] = [
        partial(
            _bias, values=_causal(-slopes[head]), limits=(_LOWEST, 0.0), title=_head(head, slopes), name=f"bias-{head}"
        )
        for head in heads
    ]
    caption = (
        f"What is added to the scores of {_TOKENS} tokens, in three of {shape.num_heads} heads: minus the slope times "
        "the distance. No number is trained."
    )
    drawing = draw_grid(plots, Grid(len(heads), aspect=0.95, bar="bias in nats, -8 or less"))
    return Picture("alibi_bias", "ALiBi: the bias of three heads", caption, drawing)


def _head(head: int, slopes: torch.Tensor) -> str:
    return f"head {head + 1}: slope {slopes[head]:.3g}"


def _causal(slope: torch.Tensor) -> torch.Tensor:
    places = torch.arange(_TOKENS)
    apart = places[:, None] - places
    return torch.where(apart >= 0, slope * apart, torch.nan)


def _bias(axes: Any, values: torch.Tensor, limits: tuple[float, float], title: str, name: str) -> Any:
    return heat_map(axes, values, (0, _TOKENS, _TOKENS, 0), limits, title=title, name=name)


def draw_alibi_slopes(heads: Sequence[int] = (8, 12, 32)) -> Picture:
    """Draw each head's reach: the distance at which a weight falls to a hundredth."""

    def draw(axes: Any) -> None:
        for at, number in enumerate(heads):
            reach = torch.log(torch.tensor(100.0, dtype=torch.float64)) / alibi_slopes(number)
            places = torch.linspace(0, 1, number)
            axes.plot(
                places,
                reach,
                color=COLOURS[at],
                marker=("s", "^", "D")[at % 3],
                markersize=4,
                linewidth=1,
                label=f"{number} heads",
                gid=f"reach-{number}",
            )
        axes.set_yscale("log")
        axes.set_xticks([0, 0.5, 1], ["first head", "", "last head"])
        axes.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
        axes.set_xlabel("head")
        axes.set_ylabel("tokens until the weight is a hundredth")
        axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
        axes.legend(frameon=False, fontsize=8.5)

    caption = (
        "How far each head looks: the distance at which ALiBi divides an attention weight by 100. The slopes of 12 "
        "heads, which is no power of two, are those of 8 and then every other one of 16, as the paper's code has them."
    )
    return Picture("alibi_reach", "ALiBi: how far heads look", caption, draw_grid([draw], Grid(1, aspect=0.5)))


def draw_t5_buckets(shape: Shape) -> Picture:
    """Draw which learned number each query and key share, causal and in both directions."""
    buckets, farthest = shape.options.get("num_buckets", 32), shape.options.get("max_distance", 128)
    size = 2 * farthest
    places = torch.arange(size)
    relative = places - places[:, None]  # key minus query
    causal = t5_buckets(relative, num_buckets=buckets, max_distance=farthest).double()
    both = t5_buckets(relative, bidirectional=True, num_buckets=buckets, max_distance=farthest).double()
    shown = ((torch.where(relative <= 0, causal, torch.nan), "causal (decoder)"), (both, "both directions (encoder)"))
    plots: list[Draw] = [
        partial(
            heat_map,
            values=values,
            extent=(0, size, size, 0),
            limits=(0, buckets - 1),
            title=title,
            name=f"buckets-{at}",
        )
        for at, (values, title) in enumerate(shown)
    ]
    caption = (
        f"Which of a head's {buckets} learned numbers a query adds to the score of a key, among {size} tokens. In both "
        "directions half of them are for later keys. The numbers themselves come from training, and differ by head."
    )
    drawing = draw_grid(plots, Grid(2, aspect=0.85, bar="bucket"))
    return Picture("t5_buckets", "T5's bias: who shares a number", caption, drawing)
