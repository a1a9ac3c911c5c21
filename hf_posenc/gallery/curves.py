"""How scores fall with the distance: RoPE with the paper's bound, and xPos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_posenc.gallery.canvas import Draw, Grid, Picture, draw_grid
from hf_posenc.gallery.maps import Shape
from hf_posenc.gallery.scores import XPOS_SCALE_BASE, rope_score, xpos_score
from hf_posenc.methods.encodings.rope import rope_decay_bound
from hf_posenc.methods.encodings.xpos import xpos_decay
from hf_posenc.report.looks import COLOURS, DASHES, INK

_MAX_DISTANCE = 8192
_PAPERS = 250  # tokens, the x axis of the paper's figure
_BASES = (1e4, 5e5)  # Llama's and Llama 3's


def draw_decay(shape: Shape) -> Picture:
    """Draw the bound of RoPE's scores, as the paper does, and scores below it."""
    plots = [_bound_plot(shape.num_pairs, shape.base), _score_plot(shape.num_pairs, shape.base)]
    others = [base for base in _BASES if base != shape.base]
    named = " and ".join(f"{base:g}" for base in others)
    caption = (
        f"Left, as in the paper's figure 2: the mean over i of |S_i|, S_i the sum of the first i of {shape.num_pairs} "
        f"unit vectors turned by the distance, at base {shape.base:g} and, for comparison, at {named}. A score is at "
        f"most this times {shape.num_pairs} times the largest step between the products of neighbouring pairs, so far "
        "keys are bounded lower than near ones; with a larger base the bound falls later. Right: the score of a query "
        "and a key with the same features, which does fall; of unlike vectors the score may be anything below the "
        "bound."
    )
    return Picture("rope_decay", "RoPE: long-term decay and its bound", caption, draw_grid(plots, Grid(2, aspect=0.85)))


def _bound_plot(num_pairs: int, base: float) -> Draw:
    distances = torch.arange(0, _PAPERS + 1)
    bases = [base, *(other for other in _BASES if other != base)]

    def draw(axes: Any) -> None:
        for at, one in enumerate(bases):
            bound = rope_decay_bound(distances, num_pairs, one)
            _line(axes, distances, bound, f"base {one:g}", at)
        _dress(axes, "bound of the score", "distance in tokens", "mean |S_i|")
        axes.set_ylim(bottom=0)

    return draw


def _score_plot(num_pairs: int, base: float) -> Draw:
    distances = torch.arange(1, _MAX_DISTANCE + 1)
    bases = [base, *(other for other in _BASES if other != base)]

    def draw(axes: Any) -> None:
        for at, one in enumerate(bases):
            _band(axes, rope_score(distances, num_pairs, one), f"base {one:g}", at)
        _dress(axes, "score of equal vectors", "distance in tokens", "score, 1 at distance 0")
        _log_distances(axes)

    return draw


def draw_xpos(shape: Shape) -> Picture:
    """Draw what xPos makes of RoPE's scores, and how single pairs fade."""
    scale_base = shape.options.get("scale_base", XPOS_SCALE_BASE)
    plots = [_xpos_plot(shape, scale_base), _fading_plot(shape.num_pairs, scale_base)]
    caption = (
        "Left: the score of a query and a key with the same features. xPos follows RoPE up to some hundred tokens and "
        "then fades, where RoPE goes on turning at angles it may never have been trained on. Right: what each pair's "
        f"part is multiplied by, {shape.num_pairs} pairs, decay once every {scale_base:g} tokens."
    )
    return Picture("xpos_decay", "xPos: RoPE that fades", caption, draw_grid(plots, Grid(2, aspect=0.85)))


def _xpos_plot(shape: Shape, scale_base: float) -> Draw:
    distances = torch.arange(1, _MAX_DISTANCE + 1)

    def draw(axes: Any) -> None:
        _band(axes, rope_score(distances, shape.num_pairs, shape.base), "RoPE", 0)
        _band(axes, xpos_score(distances, shape.num_pairs, shape.base, scale_base), "xPos", 1)
        _dress(axes, "score of equal vectors", "distance in tokens", "score, 1 at distance 0")
        _log_distances(axes)

    return draw


def _fading_plot(num_pairs: int, scale_base: float) -> Draw:
    distances = torch.arange(0, _MAX_DISTANCE + 1, 32)
    pairs = (0, num_pairs // 3, 2 * num_pairs // 3, num_pairs - 1)

    def draw(axes: Any) -> None:
        for at, pair in enumerate(pairs):
            fading = xpos_decay(num_pairs)[pair] ** (distances / scale_base)
            _line(axes, distances, fading, f"pair {pair}", at)
        _dress(axes, "factor of single pairs", "distance in tokens", "factor")
        axes.legend(frameon=False, fontsize=8, loc="center right")
        axes.set_xticks([0, 2048, 4096, 6144, 8192], ["0", "2k", "4k", "6k", "8k"])

    return draw


def binned(values: torch.Tensor, per_octave: int = 6) -> list[tuple[float, float, float, float]]:
    """Return distance, mean, lowest and highest of what depends on the distances 1, 2, ..., by stretches of them.

    Args:
        values: Float64 ``(n,)``.
        per_octave: Stretches in each doubling of the distance; near ones hold one distance each.
    """
    distances = torch.arange(1, len(values) + 1)
    stretches = (distances.double().log2() * per_octave).round()
    rows = []
    for stretch in sorted(set(stretches.tolist())):
        inside = stretches == stretch
        found = values[inside]
        middle = float(distances[inside].double().log().mean().exp())
        rows.append((middle, float(found.mean()), float(found.min()), float(found.max())))
    return rows


def _band(axes: Any, values: torch.Tensor, name: str, at: int) -> None:
    """Draw the mean around each distance, and from the lowest to the highest there as a band."""
    middles, means, lows, highs = zip(*binned(values), strict=True)
    axes.fill_between(middles, lows, highs, color=COLOURS[at], alpha=0.22, linewidth=0)
    axes.plot(middles, means, color=COLOURS[at], linestyle=DASHES[at], linewidth=1.6, label=name, gid=_id(axes, name))


def _id(axes: Any, name: str) -> str:
    """Return the id of a line in the SVG, by its plot and its name."""
    return f"plot-{axes.get_subplotspec().num1 + 1}-{name.replace(' ', '-')}"


def _line(axes: Any, x: torch.Tensor, y: torch.Tensor, name: str, at: int) -> None:
    axes.plot(x, y, color=COLOURS[at], linestyle=DASHES[at], linewidth=1.4, label=name, gid=_id(axes, name))


def _log_distances(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 8, 64, 512, 4096], ["1", "8", "64", "512", "4k"])
    axes.minorticks_off()


def _dress(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def curves(shape: Shape) -> Sequence[Picture]:
    """Return both pictures."""
    return draw_decay(shape), draw_xpos(shape)
