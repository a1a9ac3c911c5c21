"""Pictures of a method: what it does to pairs and to distances, its ramp, its temperature, its stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from canvas import Draw, HeatMap, Picture, draw_grid, draw_heat_maps, quarters, tick_name
from hf_posenc.attention.staged import Stages
from hf_posenc.explain.explanations import last_row, used_distances
from hf_posenc.explain.sections import evenly
from hf_posenc.methods.base import AttentionMethod, Method, StagedMethod, plain_frequencies
from hf_posenc.reporting.frequencies import PairRule, stretch_chart, wavelengths
from hf_posenc.reporting.looks import COLOURS, INK, PLAIN, Look, numbered_look
from hf_posenc.reporting.plot import COLOUR_MAP, Chart, Line, draw_chart
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.units import length_name

_POINTS = 48  # of a curve over factors
_DISTANCES = 400  # of a curve over distances
_CELLS = 128  # of a row and a column of a map
_TOKENS = 128  # of a spiral
_TRAINED, _NEW = COLOURS[0], COLOURS[1]


def drawn(*found: Picture | None) -> list[Picture]:
    """Return those pictures that there are."""
    return [picture for picture in found if picture is not None]


def draw_stretch(rules: Sequence[PairRule], slug: str, title: str, caption: str) -> Picture | None:
    """Draw how far rules stretch each pair of one model, the fast ones to the left; None if there is nothing to draw.

    A pair that is stopped is stretched without end: rules with one are left out.
    """
    rotations = rules[0].rotations[: rules[0].spec.rotated_pairs]
    shown = [rule for rule in rules if math.isfinite(max(rule.stretch))]
    lines = [Line("unscaled", rotations, [1.0] * len(rotations), PLAIN)]
    lines += [Line(rule.name, rotations, rule.stretch, numbered_look(at)) for at, rule in enumerate(shown)]
    return Picture(slug, title, caption, draw_chart(stretch_chart(title, rules[0], lines))) if shown else None


def draw_wavelengths(rule: PairRule) -> Picture | None:
    """Draw the tokens of a rotation of each pair, before and after; None of a rule that stops pairs."""
    spec, target, original = rule.spec, rule.reach, rule.spec.original_max_position_embeddings
    if math.isinf(max(rule.stretch)):
        return None
    pairs, ends = list(range(spec.rotated_pairs)), [0, spec.rotated_pairs - 1]
    scaled = 2 * math.pi / rule.frequencies[0][: spec.rotated_pairs]
    lines = [
        Line("unscaled", pairs, wavelengths(spec), PLAIN),
        Line(rule.name, pairs, scaled.tolist(), numbered_look(0)),
        Line(f"trained on: {length_name(original)}", ends, [original] * 2, Look(COLOURS[2], "", (0, (4, 3)))),
    ]
    if target > original:
        lines.append(Line(f"target: {length_name(target)}", ends, [target] * 2, Look(COLOURS[3], "", (0, (1, 2)))))
    chart = Chart("Tokens of one rotation", "pair", "wavelength in tokens", lines, _pair_ticks(spec), log_x=False)
    caption = (
        "A pair below the line of the training length completes at least one rotation there, so it had every angle. "
        "One above it had only a part of the circle, and in longer texts it goes on to angles it never had."
    )
    return Picture("wavelengths", "Wavelengths", caption, draw_chart(chart))


def _pair_ticks(spec: RopeSpec) -> list[tuple[float, str]]:
    return [(at, str(at)) for at in range(0, spec.rotated_pairs, max(1, spec.rotated_pairs // 8))]


def draw_ramp(rule: PairRule) -> Picture | None:
    """Draw how much of its interpolation each pair has; None where it divides by 1, or goes beyond dividing."""
    spec, scale, rotated = rule.spec, rule.method.ramp_scale, rule.spec.rotated_pairs
    if scale == 1:
        return None
    plain, scaled = plain_frequencies(spec)[:rotated], rule.frequencies[0][:rotated]
    share = (plain - scaled) / (plain - plain / scale)
    if float(share.max()) > 1.01 or float(share.min()) < -0.01:
        return None
    slow, _ = rule.incomplete()
    whole = "the factor" if scale == rule.method.factor else f"{scale:.4g}"
    chart = Chart(
        "The ramp: share of interpolation",
        "pair",
        f"0: kept, 1: divided by {whole}",
        [Line(rule.name, list(range(rotated)), share.clamp(0, 1).tolist(), numbered_look(0))],
        _pair_ticks(spec),
        [(rotated - slow - 0.5, "no complete rotation in training")] if 0 < slow < rotated else [],
        log_x=False,
    )
    caption = (
        f"Frequencies between the plain one (0) and that divided by {whole} (1), by pair, the fast ones to the left. "
        "The dashed line is where pairs begin that complete no rotation in training."
    )
    return Picture("ramp", "The ramp", caption, draw_chart(chart))


def draw_temperature(spec: RopeSpec, method: Method) -> Picture | None:
    """Draw what multiplies logits by the factor; None of a rule without a temperature, or with a given one."""
    if getattr(method, "attention_factor", None) is not None or method.factor <= 1:
        return None
    most = max(8.0, 2 * method.factor)
    factors = torch.linspace(1, most, _POINTS, dtype=torch.float64).tolist()
    logits = [dataclasses.replace(method, factor=factor).frequencies(spec)[1] ** 2 for factor in factors]
    if max(logits) == min(logits):
        return None
    here = method.frequencies(spec)[1] ** 2
    step = most / 8
    chart = Chart(
        "Temperature",
        "factor: target / original length",
        "logits are multiplied by",
        [Line(method.name, factors, logits, numbered_look(0))],
        [(1.0, "1"), *((at * step, f"{at * step:g}") for at in range(1, 9) if at * step > 1)],
        [(method.factor, f"x{method.factor:g}: {here:.3f}")],
        log_x=False,
    )
    caption = "What multiplies the logits of rotated pairs, at every length: the square of what multiplies cos and sin."
    return Picture("temperature", "Temperature", caption, draw_chart(chart))


def draw_stages(spec: RopeSpec, method: StagedMethod, reach: int) -> Picture:
    """Draw the scale of queries, and what multiplies their logits, by their position."""
    stages = Stages(spec, method)
    ends = stages.ends(reach)
    x = [at for begin, end in zip([0, *ends], ends, strict=False) for at in (begin, end)]
    scales = [stages.factor(stage) for stage in range(len(ends)) for _ in range(2)]
    logits = [stages.frequencies(stage)[1] ** 2 for stage in range(len(ends)) for _ in range(2)]
    lines = [Line("scale", x, scales, numbered_look(0))]
    if max(logits) > 1:
        lines.append(Line("logits multiplied by", x, logits, numbered_look(1)))
    chart = Chart(
        "Stages",
        "position of the query, in tokens",
        "scale, and factor of the logits",
        lines,
        quarters(x[-1]),
        [(spec.original_max_position_embeddings, "trained on")],
        log_x=False,
    )
    caption = (
        "The scale of a query, for itself and for all keys it looks at. Up to the original length it is 1, and the "
        "model is the unpatched one."
    )
    return Picture("stages", "Stages", caption, draw_chart(chart))


def draw_query_factors(spec: RopeSpec, method: AttentionMethod, reach: int) -> Picture | None:
    """Draw what multiplies queries by their position; None if nothing does."""
    positions = torch.tensor(evenly(reach, 200))
    factors = method.query_factors(spec, positions)
    if factors is None:
        return None
    chart = Chart(
        "Queries by their position",
        "position of the query, in tokens",
        "multiplied by",
        [Line(method.name, positions.tolist(), factors.tolist(), numbered_look(0))],
        quarters(reach),
        [(spec.original_max_position_embeddings, "trained on")],
        log_x=False,
    )
    caption = (
        "What multiplies a query, and with it its logits, by its position: attention over many keys is made sharper."
    )
    return Picture("query_factors", "Queries by their position", caption, draw_chart(chart))


def draw_distances(spec: RopeSpec, rules: Sequence[tuple[str, Method]], length: int) -> Picture:
    """Draw the distances used for the last token of a text, by the true ones."""
    original = spec.original_max_position_embeddings
    positions = torch.tensor(evenly(length, _DISTANCES))
    x = positions.tolist()
    lines = [Line("true distance", x, x, PLAIN)]
    for at, (name, method) in enumerate(rules):
        lines.append(Line(name, x, last_row(spec, method, length)[positions].tolist(), numbered_look(at)))
    chart = Chart(
        f"Distances used for the last of {tick_name(length)} tokens",
        "true distance in tokens",
        "distance used, in tokens",
        lines,
        quarters(length),
        [(original, f"trained on {tick_name(original)}")] if original < length else [],
        log_x=False,
    )
    caption = (
        f"The distance by which the query of the last token and each key are rotated apart. The model was trained on "
        f"distances below {original:,}; the rules leave near ones as they are and keep far ones below that."
    )
    return Picture("used_distances", "Distances used", caption, draw_chart(chart))


def draw_distance_maps(spec: RopeSpec, rules: Sequence[tuple[str, Method]], length: int) -> Picture:
    """Draw the distances used as matrices, query by key."""
    size = -(-length // _CELLS)
    positions = torch.arange(min(_CELLS, length)) * size
    edge = len(positions) * size
    highest = spec.original_max_position_embeddings
    maps = [
        HeatMap(used_distances(spec, method, positions[:, None], positions), (edge, edge), name, f"distances-{number}")
        for number, (name, method) in enumerate(rules)
    ]
    caption = (
        f"The distance used for each query and key, in a text of {length:,} tokens; one pair of positions a cell. "
        f"The last colour is {highest:,} tokens, the length the model was trained on: true distances would "
        "pass it."
    )
    columns, aspect = (2, 0.85) if len(rules) > 1 else (1, 0.6)
    drawing = draw_heat_maps(maps, (0, highest), columns, aspect=aspect, bar="distance used, in tokens")
    return Picture("used_distance_maps", "Distances used, by query and key", caption, drawing)


def draw_spirals(spec: RopeSpec) -> Picture:
    """Draw three pairs over the first tokens, the position as the third axis."""
    inv_freq = plain_frequencies(spec)[: spec.rotated_pairs]
    # A fast pair, one of a few rotations in the picture, and one that hardly moves in it.
    wanted = (0, _nearest(inv_freq, 2 * math.pi / (_TOKENS / 3)), _nearest(inv_freq, 2 * math.pi / (8 * _TOKENS)))
    pairs = sorted(set(wanted))
    plots = [_spiral(pair, float(inv_freq[pair])) for pair in pairs]
    caption = (
        f"What becomes of the features (1, 0) of a pair at the positions 0 to {_TOKENS - 1}, base {spec.rope_theta:g}: "
        "they go round a circle, each pair at its own speed. Dots are tokens. A score depends only on the angle "
        "between two dots, so it depends on the distance and not on the position."
    )
    drawing = draw_grid(plots, len(pairs), aspect=1.25, projection="3d")
    return Picture("rope_spirals", "RoPE: pairs as spirals", caption, drawing)


def _nearest(inv_freq: torch.Tensor, wanted: float) -> int:
    return int((inv_freq.log() - math.log(wanted)).abs().argmin())


def _spiral(pair: int, frequency: float) -> Draw:
    fine = torch.linspace(0, _TOKENS - 1, 1200, dtype=torch.float64)
    tokens = torch.arange(_TOKENS, dtype=torch.float64)

    def draw(axes: Any) -> None:
        axes.plot((fine * frequency).cos(), (fine * frequency).sin(), fine, color=INK, linewidth=0.8, alpha=0.5)
        angles = tokens * frequency
        axes.scatter(angles.cos(), angles.sin(), tokens, c=tokens, cmap=COLOUR_MAP, s=7, depthshade=False)
        axes.set(xlim=(-1, 1), ylim=(-1, 1), xticks=(-1, 0, 1), yticks=(0, 1), zticks=(0, 64, 128))
        for axis, words in ((axes.xaxis, "first feature"), (axes.yaxis, "second feature"), (axes.zaxis, "position")):
            axis.set_label_text(words, fontsize=7.5)
            axis.labelpad = -6
            axis.pane.set_alpha(0.0)
        axes.tick_params(labelsize=7, pad=-2)
        axes.set_title(
            f"pair {pair}: a rotation every {2 * math.pi / frequency:,.3g} tokens", loc="center", fontsize=8.5, pad=0
        )
        axes.set_box_aspect((1, 1, 1.5), zoom=0.85)

    return draw


def draw_dials(spec: RopeSpec, target: int, scaled: torch.Tensor | None = None, rule: str = "") -> Picture | None:
    """Draw the angles a slow pair had in training, and those it meets at the target; None if all complete a rotation.

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
    # The fastest that stays within one rotation, of which the most is to be seen; or the slowest.
    pair = int(slow[0]) if len(slow) else spec.rotated_pairs - 1
    before, after = float(plain[pair]), float(scaled[pair])
    seen = before * original
    plots = [
        _dial(before, original, seen, f"trained: {tick_name(original)}"),
        _dial(before, target, seen, f"unscaled, {tick_name(target)}"),
        _dial(after, target, seen, f"{rule}, {tick_name(target)}"),
    ]
    caption = (
        f"Pair {pair}, a rotation every {2 * math.pi / before:,.0f} tokens, with the position as the growing radius. "
        f"Within the {original:,} tokens of training it came {math.degrees(before * original):.0f} degrees far (blue). "
        f"Unscaled at {target:,} tokens it comes {math.degrees(before * target):.0f} degrees far, to angles it never "
        f"had (orange); under {rule} it comes {math.degrees(after * target):.0f} degrees far."
    )
    drawing = draw_grid(plots, 3, aspect=1.1, projection="polar")
    return Picture("dials", "Angles a slow pair was trained on", caption, drawing)


def _dial(frequency: float, length: int, seen: float, title: str) -> Draw:
    """Draw a pair's angles up to a length, those within ``seen`` radians in one colour and new ones in another."""
    positions = torch.linspace(0, length, 1500, dtype=torch.float64)
    angles = positions * frequency
    is_new = angles.remainder(2 * math.pi) > seen * (1 + 1e-9)

    def draw(axes: Any) -> None:
        for mask, colour in ((~is_new, _TRAINED), (is_new, _NEW)):
            axes.plot(angles, torch.where(mask, 0.25 + positions / length, torch.nan), color=colour, linewidth=2.2)
        axes.plot(angles[-1:], [1.25], "o", color=_NEW if is_new[-1] else _TRAINED, markersize=4)
        axes.set(ylim=(0, 1.35), yticks=())
        axes.set_xticks([at * math.pi / 2 for at in range(4)], ["0°", "90°", "180°", "270°"], fontsize=7.5)
        axes.set_title(title, loc="center")
        axes.grid(color=INK, alpha=0.15)
        axes.spines["polar"].set_alpha(0.3)
        axes.set_facecolor("none")

    return draw
