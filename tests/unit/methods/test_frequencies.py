"""The closed forms against Transformers' own functions, against numbers worked by hand, and in their directions."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc.methods.base import STOPPED, Frequencies, Unscaled, plain_frequencies
from hf_posenc.methods.ntk import ntk_theta
from hf_posenc.methods.registry import make_method
from hf_posenc.methods.yarn import Yarn, yarn_ramp
from hf_posenc.spec import RopeSpec

SHAPES = [(64, 1e4, 2048), (80, 1e4, 4096), (128, 5e5, 8192), (128, 1e6, 32768)]
LLAMA2 = RopeSpec(rotary_dim=128, rope_theta=1e4, original_max_position_embeddings=4096)


def theirs(
    spec: RopeSpec, factor: float, seq_len: int | None = None, **parameters: object
) -> tuple[torch.Tensor, float]:
    """What Transformers computes, in float32."""
    rope_type = str(parameters["rope_type"])
    config = LlamaConfig(
        hidden_size=4 * spec.rotary_dim,
        num_attention_heads=4,
        head_dim=spec.rotary_dim,
        max_position_embeddings=spec.original_max_position_embeddings,
        rope_parameters={"rope_theta": spec.rope_theta, "factor": factor, **parameters},
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=seq_len)
    return inv_freq.double(), attention_factor


def ours(name: str, spec: RopeSpec, factor: float, seq_len: int | None = None, **options: object) -> Frequencies:
    return make_method(name, factor, options).frequencies(spec, seq_len)


def assert_same(ours: Frequencies, theirs: tuple[torch.Tensor, float], rtol: float = 1e-6) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=rtol, atol=0)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-12)


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 32.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_rules_equal_transformers(shape: tuple[int, float, int], factor: float) -> None:
    spec = RopeSpec(*shape)
    original = {"original_max_position_embeddings": spec.original_max_position_embeddings}
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **original}
    divisors = [1.0 + 0.1 * i for i in range(spec.rotary_dim // 2)]
    lists = {"short_factor": [1.0] * len(divisors), "long_factor": divisors}
    assert_same(ours("linear", spec, factor), theirs(spec, factor, rope_type="linear"))
    assert_same(ours("yarn", spec, factor), theirs(spec, factor, rope_type="yarn", **original))
    assert_same(ours("llama3", spec, factor), theirs(spec, factor, rope_type="llama3", **llama3))
    for seq_len in (None, shape[2], shape[2] + 1, 3 * shape[2]):
        assert_same(
            ours("longrope", spec, factor, seq_len, long_factor=divisors),
            theirs(spec, factor, seq_len, rope_type="longrope", **lists, **original),
        )
        assert_same(
            ours("dynamic", spec, factor, seq_len, scope="sequence"), theirs(spec, factor, seq_len, rope_type="dynamic")
        )


@pytest.mark.parametrize(
    "options",
    [
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"truncate": False},
        {"attention_factor": 1.25},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"beta_fast": 1.0, "beta_slow": 0.999},  # both ends fall on one pair: the reference code adds 0.001
    ],
)
def test_yarn_options_equal_transformers(options: dict[str, float]) -> None:
    original = {"original_max_position_embeddings": 4096}
    assert_same(ours("yarn", LLAMA2, 16, **options), theirs(LLAMA2, 16, rope_type="yarn", **original, **options))


@pytest.mark.parametrize("shape", SHAPES)
def test_ntk_by_parts_is_llama3_between_1_and_32_turns(shape: tuple[int, float, int]) -> None:
    spec = RopeSpec(*shape)
    parameters = {"low_freq_factor": 1.0, "high_freq_factor": 32.0, "original_max_position_embeddings": shape[2]}
    assert_same(ours("ntk_by_parts", spec, 8), theirs(spec, 8, rope_type="llama3", **parameters))


@pytest.mark.parametrize(("factor", "base"), [(2, 20_221), (4, 40_890), (8, 82_685), (16, 167_199)])
def test_ntk_base_table(factor: float, base: int) -> None:
    assert round(ntk_theta(LLAMA2, factor)) == base


def test_plain_frequencies_by_hand() -> None:
    inv_freq, attention_factor = Unscaled().frequencies(RopeSpec(4, 100.0, 16))
    assert inv_freq.tolist() == pytest.approx([1.0, 0.1])
    assert attention_factor == 1.0


def test_by_parts_by_hand() -> None:
    # 2048 tokens; pairs of 325.9 and 3.259 turns: the first is kept, the second is (3.259 - 1) / 31 of the way up.
    spec = RopeSpec(4, 1e4, 2048)
    keep = (2048 * 0.01 / (2 * math.pi) - 1) / 31
    inv_freq, _ = ours("ntk_by_parts", spec, 4)
    assert inv_freq.tolist() == pytest.approx([1.0, 0.01 * keep + 0.0025 * (1 - keep)], rel=1e-12)


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [
        ((128, 1e4, 2048), 16.13, 40.21),
        ((128, 1e4, 4096), 20.94, 45.03),
        ((128, 5e5, 8192), 18.08, 34.98),
        ((128, 1e6, 32768), 23.60, 39.65),
        ((64, 1e4, 2048), 8.06, 20.11),
    ],
)
def test_yarn_ramp_ends(shape: tuple[int, float, int], low: float, high: float) -> None:
    ramp = yarn_ramp(RopeSpec(*shape), Yarn(4))
    assert (ramp == 0).sum() == math.floor(low) + 1
    assert int((ramp < 1).sum()) == math.ceil(high)


@pytest.mark.parametrize(
    ("original", "beta_fast", "share"), [(300_000, 32.0, (7 - 6) / (10 - 6)), (10**10, 1e9, (7 - 0) / (15 - 0))]
)
def test_a_ramp_that_ends_past_the_last_pair(original: int, beta_fast: float, share: float) -> None:
    """Pair 7 is the last, and rotates more than once: the ramp ends at pair 10, or at pair 15 = rotary_dim - 1."""
    spec, lengths = RopeSpec(16, 1e4, original), {"original_max_position_embeddings": original}
    assert float(yarn_ramp(spec, Yarn(4, beta_fast=beta_fast))[-1]) == pytest.approx(share)
    expected = theirs(spec, 4, rope_type="yarn", beta_fast=beta_fast, **lengths)
    assert_same(ours("yarn", spec, 4, beta_fast=beta_fast), expected)


def test_dynamic_leaves_a_forward_within_the_original_length_as_it_is() -> None:
    for seq_len in (1, 63, 64):
        spec = RopeSpec(16, 1e4, 64)
        found = ours("dynamic", spec, 4, seq_len, scope="sequence")
        assert_same(found, (plain_frequencies(spec), 1.0))
        assert_same(found, theirs(spec, 4, seq_len, rope_type="dynamic"))


@pytest.mark.parametrize(
    ("ramp", "stretch"),
    [
        ("code", [1.17, 1.41, 1.76, 2.36, 3.59, 7.43]),
        ("paper", [1.53, 2.61, 4.36, 6.99, 10.57, 14.86]),
        ("harmonic", [3.31, 5.62, 7.92, 10.23, 12.54, 14.85]),
    ],
)
def test_three_published_yarn_curves(ramp: str, stretch: list[float]) -> None:
    plain = plain_frequencies(LLAMA2)
    scaled, _ = ours("yarn", LLAMA2, 16, ramp=ramp)
    found = (plain / scaled)[[24, 28, 32, 36, 40, 44]]
    assert found.tolist() == pytest.approx(stretch, abs=0.006)


@pytest.mark.parametrize(("factor", "value"), [(1, 1.0), (2, 1.069), (4, 1.139), (8, 1.208), (16, 1.277), (32, 1.347)])
def test_yarn_temperature_table(factor: float, value: float) -> None:
    assert ours("yarn", LLAMA2, factor)[1] == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize("method", ["yarn", "ntk_by_parts", "llama3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fast_pairs_are_kept_and_slow_ones_divided(method: str, shape: tuple[int, float, int]) -> None:
    spec = RopeSpec(*shape)
    plain = plain_frequencies(spec)
    scaled, _ = ours(method, spec, 4)
    turns = spec.original_max_position_embeddings * plain / (2 * math.pi)
    fast, slow = turns >= 32, turns <= 0.9
    assert fast.any()
    assert slow.any()
    torch.testing.assert_close(scaled[fast], plain[fast], rtol=1e-12, atol=0)
    torch.testing.assert_close(scaled[slow], plain[slow] / 4, rtol=1e-12, atol=0)


def test_ntk_keeps_the_fastest_pair_and_stretches_the_slowest_as_linear_does() -> None:
    plain, linear, ntk = (
        ours(m, LLAMA2, 4)[0] if m != "none" else plain_frequencies(LLAMA2) for m in ("none", "linear", "ntk")
    )
    assert ntk[0] == plain[0]
    torch.testing.assert_close(ntk[-1], linear[-1], rtol=1e-12, atol=0)
    assert (ntk[1:-1] > linear[1:-1]).all()


STATIC = [
    ("linear", {}),
    ("ntk", {}),
    ("ntk_by_parts", {}),
    ("yarn", {}),
    ("yarn", {"ramp": "paper"}),
    ("yarn", {"ramp": "harmonic"}),
    ("llama3", {}),
]


@pytest.mark.parametrize(("method", "options"), STATIC)
def test_factor_one_is_the_identity_and_frequencies_fall(method: str, options: dict[str, object]) -> None:
    plain = plain_frequencies(LLAMA2)
    same, attention_factor = ours(method, LLAMA2, 1, **options)
    torch.testing.assert_close(same, plain, rtol=1e-12, atol=0)
    assert attention_factor == 1.0
    scaled, _ = ours(method, LLAMA2, 8, **options)
    assert (scaled.diff() < 0).all()
    assert (scaled <= plain).all()
    assert (scaled >= plain / 8 * (1 - 1e-12)).all()


def test_abf_and_longrope_say_what_they_need() -> None:
    with pytest.raises(ValueError, match="rope_theta"):
        ours("abf", LLAMA2, 4)
    with pytest.raises(ValueError, match="10000"):
        ours("abf", LLAMA2, 4, rope_theta=5000)
    with pytest.raises(ValueError, match=r"long_factor,.*64"):
        ours("longrope", LLAMA2, 4)
    with pytest.raises(ValueError, match=r"64.*,.*2"):
        ours("longrope", LLAMA2, 4, long_factor=[1.0, 2.0])


def test_abf_uses_the_given_base() -> None:
    inv_freq, _ = ours("abf", LLAMA2, 4, rope_theta=5e5)
    assert inv_freq[32].item() == pytest.approx(5e5**-0.5)


def test_nope_stops_every_pair_at_any_factor() -> None:
    for factor in (1, 4):
        assert_same(ours("nope", LLAMA2, factor), (torch.zeros(64, dtype=torch.float64), 1.0))
    assert ours("nope", LLAMA2, 4, attention_factor=1.2)[1] == 1.2
    # A longrope config without our mark says the same by its divisors.
    stopped = [STOPPED] * 64
    assert_same(ours("longrope", LLAMA2, 4, 9000, long_factor=stopped, attention_factor=1.0), ours("nope", LLAMA2, 4))
