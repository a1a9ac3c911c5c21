"""The steps of a fit: against torch's own Adam; stopped and gone on with; losses that are not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from hf_posenc.fitting.descent import Descent
from hf_posenc.fitting.objectives.base import Objective
from hf_posenc.fitting.rule import RuleParameters
from hf_posenc.methods.registry import make_method
from hf_posenc.spec import RopeSpec

SPEC = RopeSpec(rotary_dim=16, rope_theta=1e4, original_max_position_embeddings=64)
STEPS, RATE = 13, 0.05


class Noisy(Objective):
    """A loss of random targets, and one that counts its samples; it may fail in one of them."""

    name: ClassVar[str] = "noisy"

    def __init__(self, rule: RuleParameters, generator: torch.Generator, fails_in: int = 0) -> None:
        self.rule, self.generator, self.fails_in, self.drawn = rule, generator, fails_in, 0

    def losses(self) -> Iterator[torch.Tensor]:
        self.drawn += 1
        if self.drawn == self.fails_in:
            raise KeyboardInterrupt
        wanted = torch.rand(8, generator=self.generator)
        yield (self.rule.log_divisors - wanted).square().sum() * self.rule.attention_factor()
        yield (self.rule.log_divisors * self.drawn).sin().sum()

    def state(self) -> list[int]:
        return [self.drawn]

    def load_state(self, state: list[int]) -> None:
        (self.drawn,) = state


class NaN(Noisy):
    def losses(self) -> Iterator[torch.Tensor]:
        yield self.rule.log_divisors.sum() * (math.nan if self.fails_in else 1e38) * 1e10


def prepare(file: Path, fails_in: int = 0, kind: type[Noisy] = Noisy, **settings: Any) -> Descent:
    rule = RuleParameters(SPEC, make_method("yarn", 4).frequencies(SPEC), keep_rotations=1e9)
    generator = torch.Generator().manual_seed(3)
    objectives: dict[str, tuple[Objective, float]] = {"noisy": (kind(rule, generator, fails_in), 0.5)}
    given = {"steps": STEPS, "learning_rate": RATE, "smoothness": 0.0, "identity": "one", **settings}
    descent = Descent(rule, objectives, generator, file=file, **given)
    descent.load()
    return descent


def numbers(descent: Descent) -> list[torch.Tensor]:
    return [descent.rule.log_divisors.detach().clone(), descent.rule.log_factor.detach().clone()]


@pytest.mark.parametrize("smoothness", [0.0, 2.0])
def test_steps_are_those_of_torchs_adam(tmp_path: Path, smoothness: float) -> None:
    descent = prepare(tmp_path / "state.json", smoothness=smoothness)
    rule = RuleParameters(SPEC, make_method("yarn", 4).frequencies(SPEC), keep_rotations=1e9)
    objective = Noisy(rule, torch.Generator().manual_seed(3))
    optimizer = torch.optim.Adam(rule.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    path = []
    for step in range(STEPS):
        # A cosine from the learning rate down to a twentieth of it.
        optimizer.param_groups[0]["lr"] = RATE * (0.05 + 0.95 * (1 + math.cos(math.pi * step / STEPS)) / 2)
        optimizer.zero_grad()
        values = torch.cat((torch.zeros(2), rule.log_divisors))
        roughness = (values[:-2] - 2 * values[1:-1] + values[2:]).square().mean()
        (0.5 * sum(objective.losses()) + smoothness * roughness).backward()  # type: ignore[no-untyped-call, union-attr]
        optimizer.step()
        path.append([one.detach().clone() for one in (rule.log_divisors, rule.log_factor)])
        descent.step()
        for found, wanted in zip(numbers(descent), path[-1], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(path[0][0], path[-1][0], atol=0.05)
    descent.run(show_progress=False)  # no step is left: the mean of the last quarter, 3 of 13
    for at, found in enumerate(numbers(descent)):
        torch.testing.assert_close(found, sum(one[at] for one in path[-3:]) / 3, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fails_in", [3, 6, 8, 13])
def test_a_stopped_fit_ends_at_the_same_numbers(tmp_path: Path, fails_in: int) -> None:
    whole = prepare(tmp_path / "whole.json")
    whole.run(show_progress=False)
    file = tmp_path / "stopped.json"
    with pytest.raises(KeyboardInterrupt):
        prepare(file, fails_in).run(show_progress=False)
    again = prepare(file)
    assert again.done == (fails_in - 1) // 5 * 5  # saved every 5 steps
    again.run(show_progress=False)
    assert all(map(torch.equal, numbers(again), numbers(whole)))
    assert [step.losses for step in again.history] == [step.losses for step in whole.history]
    over = prepare(file)
    over.run(show_progress=False)
    assert over.done == STEPS
    assert all(map(torch.equal, numbers(over), numbers(whole)))


def test_a_state_of_another_request_is_not_used(tmp_path: Path) -> None:
    prepare(tmp_path / "state.json").run(show_progress=False)
    before = prepare(tmp_path / "none.json")
    other = prepare(tmp_path / "state.json", identity="another")
    assert other.done == 0
    assert all(map(torch.equal, numbers(other), numbers(before)))
    longer = prepare(tmp_path / "state.json", steps=STEPS + 1)  # another rate, and another mean
    assert longer.done == 0
    assert all(map(torch.equal, numbers(longer), numbers(before)))
    other.run(show_progress=False)
    assert json.loads((tmp_path / "state.json").read_text())["identity"] == "another"


def test_timing_a_step_changes_nothing(tmp_path: Path) -> None:
    whole, timed = prepare(tmp_path / "whole.json"), prepare(tmp_path / "timed.json")
    whole.run(show_progress=False)
    assert timed.seconds_of_a_step() > 0
    assert timed.done == 0
    timed.run(show_progress=False)
    assert all(map(torch.equal, numbers(timed), numbers(whole)))


@pytest.mark.parametrize("fails_in", [1, 0])
def test_losses_that_are_not_finite(tmp_path: Path, fails_in: int) -> None:
    descent = prepare(tmp_path / "state.json", fails_in, NaN)
    with pytest.raises(ValueError, match=r"1.*bfloat16.*--learning-rate"):
        descent.run(show_progress=False)
    assert not (tmp_path / "state.json").exists()


def test_bounds_hold_after_every_step(tmp_path: Path) -> None:
    descent = prepare(tmp_path / "state.json")
    descent.rule.monotone = True
    while descent.done < STEPS:
        descent.step()
        assert bool((numbers(descent)[0].diff() >= 0).all())
