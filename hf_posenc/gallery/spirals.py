"""Pairs of features that turn: as spirals along the positions, and as dials of the angles they were trained on."""

from __future__ import annotations

import math
from typing import Any

import torch

from hf_posenc.gallery.canvas import Draw, Grid, Picture, draw_grid, tokens_name
from hf_posenc.methods.base import plain_frequencies
from hf_posenc.report.looks import COLOURS, INK
from hf_posenc.spec import RopeSpec

_TOKENS = 128  # of a spiral
_TRAINED, _NEW = COLOURS[0], COLOURS[1]


def draw_spirals(spec: RopeSpec) -> Picture:
    """Draw three pairs over the first tokens, the position as the third axis."""
    inv_freq = plain_frequencies(spec)[: spec.rotated_pairs]
    # A fast pair, one of a few turns in the picture, and one that hardly moves in it.
    wanted = (0, _nearest(inv_freq, 2 * math.pi / (_TOKENS / 3)), _nearest(inv_freq, 2 * math.pi / (8 * _TOKENS)))
    pairs = sorted(set(wanted))
    plots = [_spiral(pair, float(inv_freq[pair])) for pair in pairs]
    caption = (
        f"What becomes of the features (1, 0) of a pair at the positions 0 to {_TOKENS - 1}, base {spec.rope_theta:g}: "
        "they go round a circle, each pair at its own speed. Dots are tokens. A score sees only how far one dot has "
        "turned from another, so it depends on the distance and not on the place."
    )
    drawing = draw_grid(plots, Grid(len(pairs), aspect=1.25, projection="3d"))
    return Picture("rope_spirals", "RoPE: pairs as spirals", caption, drawing)


def _nearest(inv_freq: torch.Tensor, wanted: float) -> int:
    return int((inv_freq.log() - math.log(wanted)).abs().argmin())


def _spiral(pair: int, frequency: float) -> Draw:
    fine = torch.linspace(0, _TOKENS - 1, 1200, dtype=torch.float64)
    tokens = torch.arange(_TOKENS, dtype=torch.float64)

    def draw(axes: Any) -> None:
        axes.plot((fine * frequency).cos(), (fine * frequency).sin(), fine, color=INK, linewidth=0.8, alpha=0.5)
        angles = tokens * frequency
        axes.scatter(angles.cos(), angles.sin(), tokens, c=tokens, cmap="cividis", s=7, depthshade=False)
        axes.set(xlim=(-1, 1), ylim=(-1, 1), xticks=(-1, 0, 1), yticks=(0, 1), zticks=(0, 64, 128))
        axes.set_xlabel("first feature", labelpad=-6, fontsize=7.5)
        axes.set_ylabel("second feature", labelpad=-6, fontsize=7.5)
        axes.set_zlabel("position", labelpad=-6, fontsize=7.5)
        axes.tick_params(labelsize=7, pad=-2)
        axes.set_title(f"pair {pair}: a turn every {2 * math.pi / frequency:,.3g} tokens", fontsize=8.5, pad=0)
        axes.set_box_aspect((1, 1, 1.5), zoom=0.85)
        for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
            axis.pane.set_alpha(0.0)

    return draw


def draw_dials(spec: RopeSpec, target: int, scaled: torch.Tensor | None = None, rule: str = "") -> Picture | None:
    """Draw the angles a slow pair had in training, and those it meets at the target; None if all pairs complete a turn.

    Args:
        spec: What the model was trained with.
        target: Tokens it is to read.
        scaled: ``inv_freq`` of a rule, float64 ``(num_pairs,)``; None for linear's.
        rule: Its name.
    """
    original, plain = spec.original_max_position_embeddings, plain_frequencies(spec)
    if scaled is None:
        scaled, rule = plain * original / target, f"linear x{target / original:g}"
    reached = plain[: spec.rotated_pairs] * original
    slow = torch.nonzero(reached * target / original < 2 * math.pi).flatten()
    if target <= original or float(reached[-1]) >= 2 * math.pi:
        return None
    # The fastest that stays within one turn, of which the most is to be seen; or the slowest.
    pair = int(slow[0]) if len(slow) else spec.rotated_pairs - 1
    before, after = float(plain[pair]), float(scaled[pair])
    seen = before * original
    plots = [
        _dial(before, original, seen, f"trained: {tokens_name(original)}"),
        _dial(before, target, seen, f"unscaled, {tokens_name(target)}"),
        _dial(after, target, seen, f"{rule}, {tokens_name(target)}"),
    ]
    caption = (
        f"Pair {pair}, a turn every {2 * math.pi / before:,.0f} tokens, with the position as the growing radius. "
        f"Within the {original:,} tokens of training it came {math.degrees(before * original):.0f} degrees far (blue). "
        f"Unscaled at {target:,} tokens it comes {math.degrees(before * target):.0f} degrees far, to angles it never "
        f"had (orange); under {rule} it comes {math.degrees(after * target):.0f} degrees far."
    )
    drawing = draw_grid(plots, Grid(3, aspect=1.1, projection="polar"))
    return Picture("dials", "Angles a slow pair was trained on", caption, drawing)


def _dial(frequency: float, length: int, seen: float, title: str) -> Draw:
    """Draw a pair's angles up to a length, those within ``seen`` radians in one colour and new ones in another."""
    places = torch.linspace(0, length, 1500, dtype=torch.float64)
    angles = places * frequency
    is_new = angles.remainder(2 * math.pi) > seen * (1 + 1e-9)

    def draw(axes: Any) -> None:
        for mask, colour in ((~is_new, _TRAINED), (is_new, _NEW)):
            axes.plot(angles, torch.where(mask, 0.25 + places / length, torch.nan), color=colour, linewidth=2.2)
        axes.plot(angles[-1:], [1.25], "o", color=_NEW if is_new[-1] else _TRAINED, markersize=4)
        axes.set(ylim=(0, 1.35), yticks=())
        axes.set_xticks([at * math.pi / 2 for at in range(4)], ["0°", "90°", "180°", "270°"], fontsize=7.5)
        axes.set_title(title, fontsize=9)
        axes.grid(color=INK, alpha=0.15)
        axes.spines["polar"].set_alpha(0.3)
        axes.set_facecolor("none")

    return draw
