"""The pictures of the documentation: their numbers, against float64 by hand and Transformers' own code."""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Callable

import numpy
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.t5.modeling_t5 import T5Attention

from canvas import Picture, tick_name
from distance_rules import RULES, relative_positions
from encoding_pictures import binned, block_means, encoding_pictures
from hf_posenc.explain.explanations import used_distances
from hf_posenc.methods.explained import ModelShape
from hf_posenc.methods.registry import make_method
from hf_posenc.reporting.frequencies import PairRule
from hf_posenc.spec import RopeSpec
from method_pictures import draw_dials, draw_stretch
from pictures import compared_rules, rule_pictures
from svg_values import colours, heat_maps, line_values

PAIRS, BASE = 8, 10000.0
FREQUENCIES = [BASE ** (-pair / PAIRS) for pair in range(PAIRS)]
MODEL = ModelShape(
    num_heads=4, hidden_size=2 * PAIRS, head_dim=2 * PAIRS, length=150, target=600, spec=RopeSpec(2 * PAIRS, BASE, 150)
)


def pictures_of(name: str, *lengths: int) -> dict[str, Picture]:
    """The pictures of an encoding, by their slugs."""
    return {picture.slug: picture for picture in encoding_pictures(make_method(name), MODEL, lengths)}


def rope(distance: int) -> float:
    return sum(math.cos(distance * f) for f in FREQUENCIES) / PAIRS


def xpos(distance: int) -> float:
    fading = [((pair / PAIRS + 0.4) / 1.4) ** (distance / 512) for pair in range(PAIRS)]
    return sum(math.cos(distance * f) * fade for f, fade in zip(FREQUENCIES, fading, strict=True)) / PAIRS


def t5(distance: int) -> float:
    return float(T5Attention._relative_position_bucket(torch.tensor(-distance), False, 32, 128))


def blocks_by_hand(of_distance: Callable[[int], float], length: int, cells: int) -> list[list[float]]:
    """Each pair of a query and a key that is not after it, added up block by block."""
    size, known = length // cells, [of_distance(distance) for distance in range(length)]
    rows = [[math.nan] * cells for _ in range(cells)]
    for row in range(cells):
        for column in range(row + 1):
            found = [
                known[q - k]
                for q in range(row * size, (row + 1) * size)
                for k in range(column * size, (column + 1) * size)
                if q >= k
            ]
            rows[row][column] = sum(found) / len(found)
    return rows


@pytest.mark.parametrize(
    ("name", "of_distance", "limits"),
    [
        ("rope", rope, (-0.2, 1.0)),
        ("xpos", xpos, (-0.2, 1.0)),
        ("sinusoidal", rope, (-0.2, 1.0)),
        ("t5_bias", t5, (0.0, 31.0)),
        ("relative_bias", lambda distance: min(distance, 128), (0.0, 128.0)),
        ("nope", lambda distance: 1.0, (-0.0, 1.0)),
    ],
)
def test_heat_maps_have_the_colours_of_values_by_hand(
    name: str, of_distance: Callable[[int], float], limits: tuple[float, float]
) -> None:
    drawing = pictures_of(name, 100, 300)[f"map_{name}"].drawing
    near, far = heat_maps(drawing.svg.decode())
    for pixels, length in ((near, 100), (far, 300)):
        expected = colours(blocks_by_hand(of_distance, length, 100), *limits)
        assert numpy.abs(pixels.astype(int) - expected.astype(int)).max() <= 2
    assert len({tuple(pixel) for pixel in near.reshape(-1, 4)}) > (1 if name == "nope" else 20)


def test_alibis_maps_are_weight_factors_of_three_heads() -> None:
    maps = heat_maps(pictures_of("alibi", 100)["map_alibi"].drawing.svg.decode())
    for pixels, slope in zip(maps, (2.0**-2, 2.0**-4, 2.0**-8), strict=True):  # of heads 1, 2 and 4 of 4
        expected = [[math.exp(-slope * (q - k)) if q >= k else math.nan for k in range(100)] for q in range(100)]
        assert numpy.abs(pixels.astype(int) - colours(expected, 0, 1).astype(int)).max() <= 2


def test_learned_positions_are_drawn_as_far_as_there_are_rows() -> None:
    (pixels,) = heat_maps(pictures_of("learned", 1000)["map_learned"].drawing.svg.decode())
    seen = pixels[..., 3] > 0
    assert [seen[row].sum() for row in range(100)] == [row + 1 if 10 * row < 150 else 0 for row in range(100)]


def test_blocks_on_the_diagonal_count_no_key_after_the_query() -> None:
    values = torch.arange(6, dtype=torch.float64)
    expected = torch.tensor([[4 / 6, math.nan], [3.0, 4 / 6]], dtype=torch.float64)  # of 3 x 3: 0 0 0 1 1 2
    torch.testing.assert_close(block_means(values, 2), expected, equal_nan=True)


def test_the_decay_chart_shows_the_papers_bound_and_means_of_scores() -> None:
    svg = pictures_of("rope", 10)["rope_decay"].drawing.svg.decode()
    bound = line_values(svg, "plot-1-base-10000", axes=1)
    assert (bound[0][0], bound[-1][0]) == (pytest.approx(0, abs=0.01), pytest.approx(250, abs=0.01))
    assert len(bound) > 100
    for distance, shown in bound:
        sums = [abs(sum(cmath.exp(1j * round(distance) * f) for f in FREQUENCIES[: i + 1])) for i in range(PAIRS)]
        assert shown == pytest.approx(sum(sums) / PAIRS, abs=0.01)
    scores = line_values(svg, "plot-2-base-10000", axes=2, log_x=True)
    assert scores[0] == (pytest.approx(1, rel=1e-3), pytest.approx(rope(1), abs=2e-3))
    (_, mean, lowest, highest) = binned(torch.tensor([rope(d) for d in range(1, 65)]).double())[-1]
    inside = [rope(d) for d in range(1, 65) if round(6 * math.log2(d)) == 36]
    assert (mean, lowest, highest) == pytest.approx((sum(inside) / len(inside), min(inside), max(inside)))


def test_t5s_matrix_is_its_own_code_in_both_directions() -> None:
    causal, both = heat_maps(pictures_of("t5_bias", 10)["t5_buckets"].drawing.svg.decode())
    relative = torch.arange(256) - torch.arange(256)[:, None]
    own = T5Attention._relative_position_bucket(relative, True, 32, 128).double().tolist()
    assert numpy.abs(both.astype(int) - colours(own, 0, 31).astype(int)).max() <= 2
    assert (causal[..., 3] > 0).sum() == 256 * 257 / 2


def test_rules_side_by_side_are_transformers_own() -> None:
    spec = RopeSpec(rotary_dim=64, rope_theta=10000.0, original_max_position_embeddings=2048)
    rules = {rule.name: rule for rule in compared_rules(spec, 4.0)}
    keys = {"yarn": {}, "linear": {}, "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}
    for name, more in keys.items():
        parameters = {"rope_type": name, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
        config = LlamaConfig(head_dim=64, max_position_embeddings=8192, rope_parameters={**parameters, **more})
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[name](config, "cpu")
        torch.testing.assert_close(rules[name].frequencies[0].float(), inv_freq, rtol=1e-5, atol=0)
        assert rules[name].frequencies[1] == pytest.approx(attention_factor)
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(head_dim=64, max_position_embeddings=2048, rope_parameters=parameters)
    for name, length in (("dynamic at the target", 8192), ("dynamic at half of it", 4096)):
        inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=length)
        torch.testing.assert_close(rules[name].frequencies[0].float(), inv_freq, rtol=1e-5, atol=0)
    words = re.findall("<!-- (.*?) -->", rule_pictures(spec, 4.0)[0].drawing.svg.decode())
    assert set(rules) <= set(words)


def test_the_chart_of_a_rule_has_its_stretch_of_each_pair() -> None:
    spec = RopeSpec(rotary_dim=64, rope_theta=10000.0, original_max_position_embeddings=512)
    chart = draw_stretch([PairRule("ntk x3", spec, make_method("ntk", 3.0), 1536)], "stretch", "", "")
    assert chart is not None
    svg = chart.drawing.svg.decode()
    theta = 10000.0 * 3 ** (64 / 62)
    line = line_values(svg, "line-1", log_x=True)
    rotations = [512 * 10000.0 ** (-pair / 32) / (2 * math.pi) for pair in range(32)]
    assert (line[0][0], line[-1][0]) == pytest.approx((rotations[0], rotations[-1]), rel=5e-3)
    for rotation, shown in line:
        pair = 32 * math.log(512 / (2 * math.pi * rotation)) / math.log(10000.0)
        assert shown == pytest.approx((theta / 10000.0) ** (pair / 32), abs=5e-3)
    assert {"ntk x3", "unscaled", "one rotation"} <= set(re.findall("<!-- (.*?) -->", svg))


@pytest.mark.parametrize("rule", RULES)
def test_distances_are_the_papers_pair_by_pair(rule: str) -> None:
    method, options = RULES[rule]
    spec = RopeSpec(rotary_dim=16, rope_theta=10000.0, original_max_position_embeddings=64)
    positions = torch.arange(200)
    used = used_distances(spec, make_method(method, 8.0, options), positions[:, None], positions)
    expected = torch.where(positions[:, None] >= positions, relative_positions(rule, 200), torch.nan)
    torch.testing.assert_close(used, expected, equal_nan=True)


def test_dials_take_a_pair_within_a_turn_and_are_not_drawn_where_there_is_none() -> None:
    spec = RopeSpec(rotary_dim=128, rope_theta=10000.0, original_max_position_embeddings=4096)
    dials = draw_dials(spec, 16384)
    pair = next(i for i in range(64) if 16384 * 10000.0 ** (-i / 64) < 2 * math.pi)
    degrees = math.degrees(4096 * 10000.0 ** (-pair / 64))
    assert dials is not None
    assert dials.caption.startswith(f"Pair {pair}, ")
    assert f"came {degrees:.0f} degrees far (blue)" in dials.caption
    assert f"it comes {4 * degrees:.0f} degrees far" in dials.caption
    assert draw_dials(RopeSpec(8, 100.0, 4096), 16384) is None


def test_lengths_are_named_as_they_are() -> None:
    assert [tick_name(n) for n in (0, 32.5, 500, 1000, 1024, 5000, 10000, 12288, 16384, 12345)] == [
        *("0", "32.5", "500", "1k", "1k", "5k", "10k", "12k", "16k", "12,345")
    ]
