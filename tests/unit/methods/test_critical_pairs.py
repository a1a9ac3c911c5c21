"""ntk_rcd and yarn_rcd: against numbers worked here, LongRoPE2's published list, Transformers, and the methods."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc import describe, patch_model
from hf_posenc.methods.base import RotatedPart
from hf_posenc.methods.registry import make_method
from hf_posenc.spec import RopeSpec
from model_types import tiny_model
from patched_and_undone import REQUEST, assert_patched_saved_and_undone
from tiny_models import make_model

LLAMA3 = RopeSpec(rotary_dim=128, rope_theta=5e5, original_max_position_embeddings=8192)
PHI3 = RopeSpec(rotary_dim=96, rope_theta=1e4, original_max_position_embeddings=2048)
ODD = RopeSpec(rotary_dim=31, rope_theta=1e4, original_max_position_embeddings=512)
# long_factor of microsoft/nnscaler, examples/longrope2/llama3_8b_longrope2_config.json: 8192 to 131072 tokens.
LLAMA3_LIST = [
    *(1, 1.097906416, 1.205398499, 1.323414747, 1.452985542, 1.595242149, 1.751426591, 1.922902493, 2.111166985),
    *(2.317863779, 2.544797515, 2.79394952, 3.067495105, 3.367822558, 3.697553996, 4.059568257, 4.457026037),
    *(4.893397485, 5.372492496, 5.898493984, 6.475994392, 7.110035795, 7.806153921, 8.570426477, 9.40952622),
    *(10.33077921, 11.34222878, 12.45270576, 13.67190555, 15.01047283, 16.48009443, 18.09360142, 19.8650811, 21.81),
    *(21.87, 21.88, 22.23, 22.28, 22.53, 22.65, 22.73, 22.89, 22.92, 23.18, 23.23, 23.36, 23.42, 23.47, 23.51, 23.52),
    *(23.75, 23.82, 23.89, 24.06, 24.13, 24.14, 24.3, 24.53, 24.67, 24.75, 24.97, 25.49, 26.01, 26.05),
]


def plain(spec: RopeSpec) -> list[float]:
    return [spec.rope_theta ** (-2 * i / spec.rotary_dim) for i in range((spec.rotary_dim + 1) // 2)]


def found_divisors(method: str, spec: RopeSpec, factor: float, **options: Any) -> tuple[list[float], float]:
    inv_freq, attention_factor = make_method(method, factor, options).frequencies(spec)
    assert inv_freq.dtype == torch.float64
    return [own / new for own, new in zip(plain(spec), inv_freq.tolist(), strict=True)], attention_factor


def last_pair_of_a_rotation(spec: RopeSpec) -> int:
    """The last pair that makes a full rotation within the original length, found by counting."""
    rotations = [spec.original_max_position_embeddings * frequency / (2 * math.pi) for frequency in plain(spec)]
    return sum(count > 1 for count in rotations) - 1


@pytest.mark.parametrize("spec", [LLAMA3, PHI3, ODD])
@pytest.mark.parametrize(("critical", "scale"), [(None, None), (None, 9.5), (7, None), (13, 21.81)])
def test_ntk_rcd_in_numbers(spec: RopeSpec, critical: int | None, scale: float | None) -> None:
    pair, by = critical or last_pair_of_a_rotation(spec), scale or 8
    options = {name: value for name, value in (("critical_pair", critical), ("scale", scale)) if value is not None}
    rising = [by ** (i / pair) for i in range(len(plain(spec)))]
    divisors, attention_factor = found_divisors("ntk_rcd", spec, 8, **options)
    assert divisors == pytest.approx(rising, rel=1e-12)
    assert attention_factor == 1
    divisors, attention_factor = found_divisors("ntk_rcd", spec, 8, beyond_critical="constant", **options)
    assert divisors == pytest.approx([min(by, divisor) for divisor in rising], rel=1e-12)
    assert attention_factor == 1


@pytest.mark.parametrize("spec", [LLAMA3, PHI3, ODD])
@pytest.mark.parametrize(("critical", "scale"), [(None, None), (None, 9.5), (12, None), (13, 21.81)])
def test_yarn_rcd_in_numbers(spec: RopeSpec, critical: int | None, scale: float | None) -> None:
    end, by = critical or last_pair_of_a_rotation(spec), scale or 8
    options = {name: value for name, value in (("critical_pair", critical), ("scale", scale)) if value is not None}
    rotations = [spec.original_max_position_embeddings * frequency / (2 * math.pi) for frequency in plain(spec)]
    begin = min(sum(count >= 32 for count in rotations) - 1, end - 1)
    expected = []
    for i, frequency in enumerate(plain(spec)):
        share = 0 if i <= begin else 1 if i >= end else (i - begin) / (end - begin)
        expected.append(frequency / (frequency / by * share + frequency * (1 - share)))
    divisors, attention_factor = found_divisors("yarn_rcd", spec, 8, **options)
    assert divisors == pytest.approx(expected, rel=1e-12)
    assert attention_factor == pytest.approx(0.1 * math.log(8) + 1, rel=1e-15)  # of the factor, whatever the scale


def test_yarn_rcd_options() -> None:
    divisors, attention_factor = found_divisors(
        "yarn_rcd", LLAMA3, 16, critical_pair=30, beta_fast=8, attention_factor=1.5
    )
    assert attention_factor == 1.5
    # A pair of 8 rotations has the index 64 ln(8192 / 16 pi) / ln(500000) = 24.8, rounded down.
    assert [divisors[i] for i in (24, 25, 29, 30, 63)] == pytest.approx([1, 32 / 27, 32 / 7, 16, 16], rel=1e-12)
    # As many rotations as no pair before the critical one lacks: a step.
    step, _ = found_divisors("yarn_rcd", LLAMA3, 16, critical_pair=10)
    assert step == pytest.approx([1] * 10 + [16] * 54, rel=1e-12)


@pytest.mark.parametrize(
    ("spec", "pair"), [(LLAMA3, 34), (PHI3, 30), (RopeSpec(64, 1e4, 4), 1), (RopeSpec(8, 1e4, 10**9), 3)]
)
def test_the_critical_pair_in_theory(spec: RopeSpec, pair: int) -> None:
    # The paper's section 2.1 names pairs 35 and 31 of the first two models, counted from 1; the others are the limits.
    divisors, _ = found_divisors("ntk_rcd", spec, 8)
    assert divisors[pair] == pytest.approx(8, rel=1e-12)
    divisors, _ = found_divisors("yarn_rcd", spec, 8)
    assert divisors[pair] == pytest.approx(8, rel=1e-12)
    assert divisors[pair - 1] < 7.9


def test_longrope2_list_of_llama3_is_ntk_rcd_up_to_its_critical_pair() -> None:
    options = {"critical_pair": 33, "scale": 21.81}
    rising, _ = found_divisors("ntk_rcd", LLAMA3, 16, **options)
    constant, _ = found_divisors("ntk_rcd", LLAMA3, 16, beyond_critical="constant", **options)
    assert len(LLAMA3_LIST) == 64
    assert rising[:34] == pytest.approx(LLAMA3_LIST[:34], rel=4e-10)
    assert constant[:34] == pytest.approx(LLAMA3_LIST[:34], rel=4e-10)
    for low, published, high in zip(constant[34:], LLAMA3_LIST[34:], rising[34:], strict=True):
        assert low == pytest.approx(21.81)
        assert low < published < high
    assert rising[63] > 300


@pytest.mark.parametrize("critical", [20, 30, 34, 63])
@pytest.mark.parametrize("factor", [2.0, 16.0])
def test_transformers_computes_the_same_from_what_is_written(critical: int, factor: float) -> None:
    for method, rope_type, options in (
        ("yarn_rcd", "yarn", {"critical_pair": critical}),
        ("yarn_rcd", "yarn", {"critical_pair": critical, "scale": factor, "beta_fast": 40, "attention_factor": 1.25}),
        ("yarn_rcd", "longrope", {"critical_pair": critical, "scale": 1.2 * factor}),
        ("yarn_rcd", "longrope", {"critical_pair": 9}),
        ("ntk_rcd", "longrope", {"critical_pair": critical, "scale": 1.2 * factor, "beyond_critical": "constant"}),
    ):
        made = make_method(method, factor, options)
        written = made.rope_parameters(LLAMA3)
        assert written["rope_type"] == rope_type
        config = LlamaConfig(
            hidden_size=512,
            num_attention_heads=4,
            max_position_embeddings=int(8192 * factor),
            rope_parameters={"rope_theta": 5e5, **written},
        )
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=10_000)
        ours, temperature = made.frequencies(LLAMA3)
        torch.testing.assert_close(inv_freq.double(), ours, rtol=1e-6, atol=0)
        assert attention_factor == pytest.approx(temperature, rel=1e-12)


def test_ntk_rcd_is_written_as_a_larger_base() -> None:
    written = make_method("ntk_rcd", 16, {"critical_pair": 33, "scale": 21.81}).rope_parameters(LLAMA3)
    assert written == {"rope_type": "default", "rope_theta": pytest.approx(5e5 * 21.81 ** (64 / 33), rel=1e-12)}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("ntk_rcd", {}),
    ("ntk_rcd", {"critical_pair": 2, "scale": 5.5}),
    ("ntk_rcd", {"critical_pair": 3, "beyond_critical": "constant"}),
    ("yarn_rcd", {}),
    ("yarn_rcd", {"critical_pair": 3, "scale": 5.5}),
    ("yarn_rcd", {"critical_pair": 1, "attention_factor": 1.1}),
]


@pytest.mark.parametrize(("method", "options"), CASES)
@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "Phi3"])
def test_live_equals_what_plain_transformers_loads(
    family: str, method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    assert_patched_saved_and_undone(make_model(family), tmp_path / "model", method, **options)


def test_a_scale_without_a_factor_is_applied() -> None:
    spec = RopeSpec(16, 1e4, 64)
    options: dict[str, Any]
    for method, more in (("ntk_rcd", {}), ("ntk_rcd", {"beyond_critical": "constant"}), ("yarn_rcd", {})):
        options = {"scale": 3.0, "critical_pair": 2, **more}
        model = patch_model(make_model("Llama"), method, 1, **options)
        assert describe(model)["options"] == options
        inv_freq = model.get_decoder().rotary_emb.inv_freq
        assert inv_freq[2].item() == pytest.approx(plain(spec)[2] / 3, rel=1e-6)


@pytest.mark.parametrize("method", ["ntk_rcd", "yarn_rcd"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": 0.5}, ValueError, r"scale must be >= 1, got 0\.5"),
        ({"scale": "2"}, TypeError, "scale must be a number, got '2'"),
        ({"critical_pair": 0}, ValueError, "critical_pair must be >= 1, got 0. It is the index of a pair.*always kept"),
        ({"critical_pair": 2.5}, ValueError, "critical_pair must be a whole number, the index of a pair.*got 2.5"),
        ({"critical_pair": True}, TypeError, "critical_pair must be a number, got True"),
        ({"critical_pair": 64}, ValueError, "critical_pair must be at most 63, the slowest pair.*from 0.*got 64"),
    ],
)
def test_bad_options(method: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_method(method, 4, options).frequencies(LLAMA3)
    with pytest.raises(error, match=message):
        make_method(method, 4, options).rope_parameters(LLAMA3)


def test_what_does_not_fit_the_model() -> None:
    with pytest.raises(ValueError, match=r"beyond_critical.*'flat'"):
        make_method("ntk_rcd", 4, {"beyond_critical": "flat"})
    unrotated = dataclasses.replace(LLAMA3, unrotated_pairs=32)
    with pytest.raises(ValueError, match="31,"):
        make_method("ntk_rcd", 4, {"critical_pair": 40}).frequencies(unrotated)
    for method in ("ntk_rcd", "yarn_rcd"):
        with pytest.raises(ValueError, match="least two"):
            make_method(method, 4).frequencies(RopeSpec(2, 1e4, 64))


def test_yarn_rcd_where_a_temperature_cannot_be_said() -> None:
    latent = tiny_model("deepseek_v3")
    with pytest.raises(ValueError, match=r"multi-head.*attention_factor"):
        patch_model(latent, "yarn_rcd", 4, **REQUEST)
    patch_model(latent, "yarn_rcd", 4, attention_factor=1.0, **REQUEST)
    made = make_method("yarn_rcd", 4).temperature_for(RotatedPart.HEADS_AND_VALUES)
    assert made.frequencies(LLAMA3)[1] == 1
    with pytest.raises(ValueError, match="rotates its"):
        make_method("yarn_rcd", 4, {"attention_factor": 1.2}).temperature_for(RotatedPart.HEADS_AND_VALUES)
