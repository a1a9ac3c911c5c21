"""Rotary pairs under a rule: how far each is stretched, and how often it turns before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_posenc.gallery.canvas import Picture
from hf_posenc.methods.base import plain_frequencies
from hf_posenc.methods.registry import make_method
from hf_posenc.methods.yarn import Yarn
from hf_posenc.report.looks import COLOURS, PLAIN, Look, numbered_look
from hf_posenc.report.plot import Chart, Line, draw_chart
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.units import length_name


@dataclass(frozen=True)
class Stretched:
    """A rule's frequencies.

    Attributes:
        name: In charts.
        inv_freq: Float64 ``(num_pairs,)``, radians per token; 0 for a pair that is stopped.
        attention_factor: Multiplies cos and sin.
    """

    name: str
    inv_freq: torch.Tensor
    attention_factor: float = 1.0


def turns_of(spec: RopeSpec) -> list[float]:
    """Return the turns of each pair that turns over the original length."""
    inv_freq = plain_frequencies(spec)[: spec.rotated_pairs]
    return (inv_freq * spec.original_max_position_embeddings / (2 * math.pi)).tolist()


def stretch_lines(spec: RopeSpec, rules: Sequence[Stretched]) -> list[Line]:
    """Return for each rule how many times longer a pair's wavelength becomes, by its turns over the original length.

    A pair that is stopped is stretched without end: rules with one are left out.
    """
    plain, turns = plain_frequencies(spec)[: spec.rotated_pairs], turns_of(spec)
    lines: list[Line] = []
    for rule in rules:
        stretch = plain / rule.inv_freq[: spec.rotated_pairs]
        if bool(torch.isfinite(stretch).all()):
            lines.append(Line(rule.name, turns, stretch.tolist(), numbered_look(len(lines))))
    return lines


def draw_stretch(spec: RopeSpec, rules: Sequence[Stretched], slug: str, title: str, caption: str) -> Picture | None:
    """Draw how far rules stretch each pair, the fast ones to the left; None if there is nothing to draw."""
    lines = stretch_lines(spec, rules)
    if not lines:
        return None
    turns, original = turns_of(spec), length_name(spec.original_max_position_embeddings)
    decades = [10.0**power for power in range(-9, 10) if turns[-1] <= 10.0**power <= turns[0]]
    slow = turns[-1] < 1 < turns[0]
    chart = Chart(
        title,
        f"turns of the pair within the {original} tokens of training",
        "stretch of its wavelength",
        [Line("unscaled", turns, [1.0] * len(turns), PLAIN), *lines],
        [(at, f"{at:,.4g}") for at in decades],
        [(1.0, "one turn")] if slow else [],
        falls=True,
        shade=(turns[-1], 1.0) if slow else None,
    )
    return Picture(slug, title, caption, draw_chart(chart))


def draw_wavelengths(spec: RopeSpec, rule: Stretched, target: int) -> Picture | None:
    """Draw the tokens of a turn of each pair, before and after; None of a rule that stops pairs."""
    plain, scaled = (one[: spec.rotated_pairs] for one in (plain_frequencies(spec), rule.inv_freq))
    if bool((scaled == 0).any()):
        return None
    pairs, original = list(range(spec.rotated_pairs)), spec.original_max_position_embeddings
    ends = [0, spec.rotated_pairs - 1]
    lines = [
        Line("unscaled", pairs, (2 * math.pi / plain).tolist(), PLAIN),
        Line(rule.name, pairs, (2 * math.pi / scaled).tolist(), numbered_look(0)),
        Line(f"trained on: {length_name(original)}", ends, [original] * 2, Look(COLOURS[2], "", (0, (4, 3)))),
    ]
    if target > original:
        lines.append(Line(f"asked for: {length_name(target)}", ends, [target] * 2, Look(COLOURS[3], "", (0, (1, 2)))))
    step = max(1, spec.rotated_pairs // 8)
    chart = Chart(
        "Tokens of one turn",
        "pair",
        "wavelength in tokens",
        lines,
        [(at, str(at)) for at in range(0, spec.rotated_pairs, step)],
        log_x=False,
    )
    caption = (
        "A pair below the line of the training length completes at least one turn there, so it had every angle. One "
        "above it had only a part of the circle, and met with longer texts turns on to angles it never had."
    )
    return Picture("wavelengths", "Wavelengths", caption, draw_chart(chart))


# What the gallery compares at factor 4: name, method, options, and the length it is looked at as a share of the target.
_COMPARED: tuple[tuple[str, str, Mapping[str, object], float], ...] = (
    ("linear", "linear", {}, 1.0),
    ("ntk", "ntk", {}, 1.0),
    ("ntk_by_parts", "ntk_by_parts", {}, 1.0),
    ("yarn", "yarn", {}, 1.0),
    ("llama3", "llama3", {}, 1.0),
    ("dynamic at the target", "dynamic", {"scope": "sequence"}, 1.0),
    ("dynamic at half of it", "dynamic", {"scope": "sequence"}, 0.5),
    ("abf, base 500000", "abf", {"rope_theta": 500000.0}, 1.0),
)
_RAMPS = (("code", "yarn, ramp=code"), ("paper", "yarn, ramp=paper"), ("harmonic", "yarn, ramp=harmonic"))


def compared_rules(spec: RopeSpec, factor: float) -> list[Stretched]:
    """Return the static rules at a factor, the dynamic one at the target and at half of it."""
    target = factor * spec.original_max_position_embeddings
    rules = []
    for name, method, options, share in _COMPARED:
        rule = make_method(method, factor, options)
        rules.append(Stretched(name, *rule.frequencies(spec, round(share * target))))
    return rules


def rule_pictures(spec: RopeSpec, factor: float) -> list[Picture]:
    """Return the curves of all rules side by side, and of YaRN's three ramps."""
    where = (
        f"{spec.rotated_pairs} pairs at base {spec.rope_theta:g}, trained on "
        f"{spec.original_max_position_embeddings:,} tokens, factor {factor:g}"
    )
    every = draw_stretch(
        spec,
        compared_rules(spec, factor),
        "rules",
        f"How far each rule stretches each pair, x{factor:g}",
        f"{where}. Fast pairs are to the left; in the grey are those that never complete a turn in training, which a "
        f"rule has to stretch by {factor:g} if they are to stay at angles they had. Transformers' dynamic rule at the "
        "target and at half of it; abf is as far as its base goes, whatever the factor.",
    )
    ramps = [Stretched(name, *Yarn(factor, ramp=ramp).frequencies(spec)) for ramp, name in _RAMPS]
    yarn = draw_stretch(
        spec,
        ramps,
        "yarn_ramps",
        f"YaRN's three ramps, x{factor:g}",
        f"{where}. Three published curves between what is kept (32 turns and more) and what is stretched in full (one "
        "turn and less): the authors' code, the paper's text, and PoSE's.",
    )
    return [picture for picture in (every, yarn) if picture is not None]
