"""The steps that a budget leaves to low-rank changes, by a clock that passes only in steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapted_models import adapt_config as config
from hf_posenc.errors import InvalidRequestError
from hf_posenc.fitting import config as fit_config
from hf_posenc.fitting import layer_matching, short_matching
from hf_posenc.fitting.adapter import Adapter
from hf_posenc.fitting.fitting import fit_method
from tiny_models import load_tiny, token_ids


class Clock:
    """Time that passes only in steps: a second for one in a layer, ten for one on short texts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of_length: float = 0.0) -> None:
        """Let one on short texts take so many seconds more for each token of a stretch."""
        self.now, self.in_layers, self.on_short = 100.0, 0, 0
        error, divergence, draw = layer_matching.LayerMatching._error, short_matching.divergence, short_matching._draw
        monkeypatch.setattr("hf_posenc.fitting.budget.time.perf_counter", lambda: self.now)

        def of_a_layer(matching: Any, *args: Any) -> torch.Tensor:
            self.now, self.in_layers = self.now + 1, self.in_layers + 1
            return error(matching, *args)

        def drawn(*args: Any) -> torch.Tensor:
            self.drawn = draw(*args)
            return self.drawn

        def of_short_texts(*args: Any) -> torch.Tensor:
            self.now, self.on_short = self.now + 10 + of_length * self.drawn.shape[1], self.on_short + 1
            return divergence(*args)

        monkeypatch.setattr(layer_matching.LayerMatching, "_error", of_a_layer)
        monkeypatch.setattr(short_matching, "_draw", drawn)
        monkeypatch.setattr(short_matching, "divergence", of_short_texts)


def test_a_budget_takes_fewer_steps_in_layers_and_on_short_texts(tmp_path: Path, monkeypatch: Any) -> None:
    """Six layers and four texts, two of them in pieces.

    Twenty steps are timed; of the 550 seconds that are left three fifths are for 23 steps in each layer and its errors
    in 32. Then three on short texts are timed, and 190 seconds are left.
    """
    clock = Clock(monkeypatch)
    monkeypatch.setattr(fit_config, "_MOST_ROUNDS", 3)  # not with a budget
    request = config(held_out=0, budget=570.0, adapt_options={"steps": 40, "short_steps": 40})
    texts = [token_ids(1024)[0], token_ids(1024)[0].flip(0)]
    result = fit_method(load_tiny(), None, texts, request, work_dir=tmp_path)
    assert (clock.in_layers, clock.on_short) == (20 + 6 * 55, 3 + 19)
    fewer = {"steps": 23, "short_steps": 19}
    assert {name: result.facts["adapted"][name] for name in fewer} == fewer
    none = config(held_out=0, budget=570.0, adapt_options={"steps": 40, "short_steps": 0})
    assert fit_method(load_tiny(), None, texts, none, work_dir=tmp_path).facts["adapted"]["short_steps"] == 0
    again = fit_method(load_tiny(), None, texts, request, work_dir=tmp_path)
    assert (clock.in_layers, clock.on_short) == (20 + 6 * 55, 3 + 19)
    monkeypatch.setattr(fit_config, "_MOST_ROUNDS", 1)
    alone = fit_method(load_tiny(), None, texts, config(held_out=0, adapt_options=fewer))
    for adapter in (again.adapter, alone.adapter):
        assert adapter is not None
        assert result.adapter is not None
        assert adapter.errors == result.adapter.errors
        assert all(torch.equal(weight, adapter.weights[name]) for name, weight in result.adapter.weights.items())


def test_a_budget_knows_that_longer_stretches_take_more(monkeypatch: Any) -> None:
    """Of the original length 256; steps on 16, 64 and 256 tokens take 18, 42 and 138 seconds, 66 on average."""
    clock = Clock(monkeypatch, of_length=0.5)
    request = config(held_out=0, budget=1000.0, adapt_options={"steps": 40, "short_steps": 40})
    texts = [token_ids(1024)[0], token_ids(1024)[0].flip(0)]
    result = fit_method(load_tiny(), None, texts, request)
    assert result.facts["adapted"]["short_steps"] == (1000 - 20 - 6 * 72 - (18 + 18 + 42)) // 66
    assert 900 < clock.now - 100 <= 1000


def test_a_budget_keeps_time_for_the_measurement_and_each_seed(monkeypatch: Any) -> None:
    """Of 2300 seconds, 300 are kept to measure three rules; a second seed has what the first one leaves."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr("hf_posenc.fitting.fitting.time_pass", lambda rotary, ids: 100.0)
    monkeypatch.setattr("hf_posenc.fitting.fitting.measure_rows", lambda run, *rest: ({}, [str(run.budget.left)]))
    taken: list[tuple[int, int]] = []
    wrap = Adapter.__init__

    def noted(adapter: Adapter, settings: Any, *rest: Any) -> None:
        taken.append((settings.steps, settings.short_steps))
        wrap(adapter, settings, *rest)

    monkeypatch.setattr(Adapter, "__init__", noted)
    texts = [token_ids(1024)[0], token_ids(1024)[0].flip(0), token_ids(1024)[0].roll(1)]
    request = config(seeds=2, budget=2300.0, adapt_options={"steps": 100, "short_steps": 100})
    fit_method(load_tiny(), None, texts, request)
    # After 20 seconds of timing 1980 x 1/2 x 3/5 / 6 layers - 32 (measured), after 30 more 1356 x 1/2 / 10; then of 686
    assert taken == [(67, 67), (34, 24)]
    assert clock.now - 100 <= 2000


def test_a_budget_that_is_too_short_for_the_layers(tmp_path: Path, monkeypatch: Any) -> None:
    Clock(monkeypatch)
    texts = [token_ids(1024)[0], token_ids(1024)[0].flip(0)]
    with pytest.raises(InvalidRequestError, match=r"60 s is too short: 20 steps in each layer need 9\.0 min in all"):
        fit_method(load_tiny(), None, texts, config(held_out=0, budget=60.0), work_dir=tmp_path)
