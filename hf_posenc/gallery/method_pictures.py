"""What one method does to one model, drawn: its ramp, its temperature, its stages."""

from __future__ import annotations

import dataclasses

import torch

from hf_posenc.attention.staged import Stages
from hf_posenc.gallery.canvas import Picture, tokens_name
from hf_posenc.gallery.stretching import Stretched
from hf_posenc.gallery.told import spread_places
from hf_posenc.methods.base import AttentionMethod, Method, StagedMethod, plain_frequencies
from hf_posenc.report.looks import numbered_look
from hf_posenc.report.plot import Chart, Line, draw_chart
from hf_posenc.spec import RopeSpec

_POINTS = 48  # of a curve


def draw_ramp(spec: RopeSpec, method: Method, rule: Stretched) -> Picture | None:
    """Draw how much of its interpolation each pair has; None at factor 1, or of a rule that goes beyond dividing."""
    if method.factor == 1:
        return None
    turning = spec.rotated_pairs
    plain, scaled = plain_frequencies(spec)[:turning], rule.inv_freq[:turning]
    share = (plain - scaled) / (plain - plain / method.factor)
    if float(share.max()) > 1.01 or float(share.min()) < -0.01:
        return None
    pairs = list(range(turning))
    chart = Chart(
        "The ramp: share of interpolation",
        "pair",
        "0: kept, 1: divided by the factor",
        [Line(rule.name, pairs, share.clamp(0, 1).tolist(), numbered_look(0))],
        [(at, str(at)) for at in range(0, turning, max(1, turning // 8))],
        _first_slow(spec),
        log_x=False,
    )
    caption = (
        "Frequencies between the plain one (0) and that divided by the factor (1), by pair, the fast ones to the left. "
        "The dashed line is where pairs begin that complete no turn in training."
    )
    return Picture("ramp", "The ramp", caption, draw_chart(chart))


def _first_slow(spec: RopeSpec) -> list[tuple[float, str]]:
    turns = plain_frequencies(spec)[: spec.rotated_pairs] * spec.original_max_position_embeddings / (2 * torch.pi)
    slow = torch.nonzero(turns < 1).flatten()
    return [(int(slow[0]) - 0.5, "no whole turn in training")] if 0 < len(slow) < len(turns) else []


def draw_temperature(spec: RopeSpec, method: Method) -> Picture | None:
    """Draw what multiplies logits by the factor; None of a rule without a temperature, or with a given one."""
    if getattr(method, "attention_factor", None) is not None or method.factor <= 1:
        return None
    most = max(8.0, 2 * method.factor)
    factors = torch.linspace(1, most, _POINTS, dtype=torch.float64).tolist()
    logits = [dataclasses.replace(method, factor=one).frequencies(spec)[1] ** 2 for one in factors]
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
    caption = (
        "What multiplies the logits of the pairs that turn, at every length: the square of what multiplies cos and sin."
    )
    return Picture("temperature", "Temperature", caption, draw_chart(chart))


def draw_stages(spec: RopeSpec, method: StagedMethod, reach: int) -> Picture:
    """Draw the scale of queries, and what multiplies their logits, by where they stand."""
    stages = Stages(spec, method)
    x: list[float] = []
    scales: list[float] = []
    logits: list[float] = []
    begin = 0
    for stage, end in enumerate(stages.ends(reach)):
        x += [begin, end]
        scales += [stages.factor(stage)] * 2
        logits += [stages.frequencies(stage)[1] ** 2] * 2
        begin = end
    lines = [Line("scale", x, scales, numbered_look(0))]
    if max(logits) > 1:
        lines.append(Line("logits multiplied by", x, logits, numbered_look(1)))
    chart = Chart(
        "Stages",
        "position of the query, in tokens",
        "scale, and factor of the logits",
        lines,
        [(at * x[-1] / 4, tokens_name(at * x[-1] / 4)) for at in range(5)],
        [(spec.original_max_position_embeddings, "trained on")],
        log_x=False,
    )
    caption = (
        "The scale of a query, for itself and for all keys it looks at. Up to the original length it is 1, and the "
        "model is the unpatched one."
    )
    return Picture("stages", "Stages", caption, draw_chart(chart))


def draw_query_factors(spec: RopeSpec, method: AttentionMethod, reach: int) -> Picture | None:
    """Draw what multiplies queries by where they stand; None if nothing does."""
    places = spread_places(reach, 200)
    factors = method.query_factors(spec, places)
    if factors is None:
        return None
    chart = Chart(
        "Queries by where they stand",
        "position of the query, in tokens",
        "multiplied by",
        [Line("log_n" if method.log_n else "sharpen", places.tolist(), factors.tolist(), numbered_look(0))],
        [(at * reach / 4, tokens_name(at * reach / 4)) for at in range(5)],
        [(spec.original_max_position_embeddings, "trained on")],
        log_x=False,
    )
    caption = (
        "What multiplies a query, and with it its logits, by its position: attention over many keys is made sharper."
    )
    return Picture("query_factors", "Queries by where they stand", caption, draw_chart(chart))
