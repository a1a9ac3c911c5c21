"""The numbers that are fitted: where they begin, what stays as it is, and their bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_posenc.fitting.rule import RuleParameters, rotations_in_training
from hf_posenc.methods.registry import make_method
from hf_posenc.spec import RopeSpec

SPEC = RopeSpec(rotary_dim=32, rope_theta=1e4, original_max_position_embeddings=256)
UNROTATED = RopeSpec(rotary_dim=32, rope_theta=1e4, original_max_position_embeddings=256, unrotated_pairs=6)
FACTOR = 4


def by_hand(method: str, spec: RopeSpec) -> tuple[list[float], float]:
    """NTK-aware scaling and YaRN in plain Python (bloc97 2023; Peng et al. 2023, section 3.2, ends rounded outward)."""
    dim, base, original = spec.rotary_dim, spec.rope_theta, spec.original_max_position_embeddings
    if method == "ntk":
        base *= FACTOR ** (dim / (dim - 2))
        return [base ** (-2 * i / dim) for i in range(dim // 2)], 1.0

    def pair_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), dim - 1)
    found = []
    for i in range(dim // 2):
        plain, divided = base ** (-2 * i / dim), min(max((i - low) / (high - low), 0), 1)
        found.append(plain * (1 - divided) + plain / FACTOR * divided)
    return found, 0.1 * math.log(FACTOR) + 1


def rule(method: str = "ntk", spec: RopeSpec = SPEC, **settings: Any) -> RuleParameters:
    start = make_method(method, FACTOR).frequencies(spec)
    return RuleParameters(spec, start, **{"keep_rotations": 1e9, **settings})


@pytest.mark.parametrize("method", ["ntk", "yarn"])
def test_it_begins_at_a_published_rule(method: str) -> None:
    wanted, factor = by_hand(method, SPEC)
    begun = rule(method)
    assert begun.inv_freq().tolist() == pytest.approx(wanted, rel=5e-7)
    assert float(begun.attention_factor().detach()) == pytest.approx(factor, rel=1e-6)
    divisors = [1e4 ** (-2 * i / 32) / one for i, one in enumerate(wanted)]
    assert begun.numbers()[0] == pytest.approx(divisors, rel=1e-6)
    assert begun.numbers()[1] == pytest.approx(factor, rel=1e-6)


def test_a_temperature_that_is_not_fitted_is_1() -> None:
    begun = rule("yarn", temperature=False)
    assert float(begun.attention_factor().detach()) == 1
    assert not begun.log_factor.requires_grad


def test_rotations_in_training() -> None:
    found = rotations_in_training(UNROTATED)
    assert found.tolist() == pytest.approx([256 * 1e4 ** (-2 * i / 32) / (2 * math.pi) for i in range(10)], rel=1e-12)


@pytest.mark.parametrize("keep_rotations", [30.0, 13.0, 1.0])
def test_fast_pairs_keep_their_frequency(keep_rotations: float) -> None:
    begun = rule("ntk", keep_rotations=keep_rotations)
    rotations = [256 * 1e4 ** (-2 * i / 32) / (2 * math.pi) for i in range(16)]
    fast = sum(rotation >= keep_rotations for rotation in rotations)
    assert 0 < fast < 16
    plain = torch.tensor([1e4 ** (-2 * i / 32) for i in range(16)], dtype=torch.float64).float()
    with torch.no_grad():
        begun.log_divisors += 0.3
    assert torch.equal(begun.inv_freq()[:fast], plain[:fast])
    assert bool((begun.inv_freq()[fast:] < plain[fast:]).all())
    assert begun.numbers()[0][:fast] == (1.0,) * fast
    begun.inv_freq().sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert begun.log_divisors.grad is not None
    assert begun.log_divisors.grad.shape == (16 - fast,)


def test_unrotated_pairs_stay_0() -> None:
    begun = rule("ntk", UNROTATED)
    with torch.no_grad():
        begun.log_divisors -= 1
    assert begun.inv_freq().shape == (16,)
    assert begun.inv_freq()[10:].tolist() == [0.0] * 6
    assert bool((begun.inv_freq()[:10] > 0).all())
    assert len(begun.numbers()[0]) == 10


def test_project_keeps_lower_bounds() -> None:
    bounds = torch.cat((torch.full((10,), 1e-6), torch.full((6,), 4.0))).double()
    bound = rule(lowest=bounds)  # ntk's divisors rise to 4 at the last pair only
    assert bound.numbers()[0][10:] == pytest.approx([4.0] * 6, rel=1e-6)
    with torch.no_grad():
        bound.log_divisors.copy_(torch.full((16,), 0.5).log())
    bound.project()
    assert bound.numbers()[0] == pytest.approx([0.5] * 10 + [4.0] * 6, rel=1e-6)


def test_project_makes_divisors_rise() -> None:
    rising = rule(monotone=True)
    with torch.no_grad():
        rising.log_divisors.copy_(torch.tensor([-1.0, 0.2, 0.1, 0.5, -3.0, 0.6, *[0.4] * 10]))
    rising.project()
    assert rising.log_divisors.tolist() == pytest.approx([0, 0.2, 0.2, 0.5, 0.5, *[0.6] * 11])


def test_roughness_is_the_mean_squared_second_difference() -> None:
    begun = rule(keep_rotations=13.0)  # pairs kept at 1 count: leaving them abruptly is rough
    values = [0.0, 0.0, *begun.log_divisors.tolist()]
    with torch.no_grad():
        begun.log_divisors[3] += 0.7
        values[5] += 0.7
    second = [values[i] - 2 * values[i + 1] + values[i + 2] for i in range(len(values) - 2)]
    assert float(begun.roughness().detach()) == pytest.approx(sum(one**2 for one in second) / len(second), rel=1e-5)
