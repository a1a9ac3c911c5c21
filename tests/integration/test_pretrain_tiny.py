"""``scripts/pretrain_tiny.py``: a run that was killed ends with the weights of one that was not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

STREAM = torch.arange(1, 400) % 97


@pytest.fixture
def script() -> Iterator[ModuleType]:
    import pretrain_tiny

    yield pretrain_tiny
    del sys.modules["pretrain_tiny"]


def trained(script: ModuleType, unfinished: Path, seed: int = 0, **changes: Any) -> list[torch.Tensor]:
    settings = {"tokens": 6 * 32, "context_length": 16, "step_tokens": 32, "learning_rate": 1e-2, "device": "cpu"}
    torch.manual_seed(seed)
    model = script.build_model()
    script.train(model, STREAM, argparse.Namespace(**settings, **changes), unfinished)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_killed_run_goes_on_to_the_same_weights(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = trained(script, tmp_path / "a")
    assert not list(tmp_path.iterdir())  # too short to be kept
    monkeypatch.setattr(script, "SAVE_STEPS", 2)
    own, steps = script.save_state, []

    def killed(unfinished: Path, state: dict[str, Any]) -> None:
        own(unfinished, state)
        steps.append(state["step"])
        if len(steps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(script, "save_state", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(script, tmp_path / "b")
    monkeypatch.setattr(script, "save_state", own)
    again = trained(script, tmp_path / "b", seed=1)  # the weights it began with are in the file
    assert "going on after step 4" in capsys.readouterr().out
    for one, other in zip(again, straight, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(SystemExit, match="other settings"):
        trained(script, tmp_path / "b", seed=0, note=1)
