"""Rules and low-rank changes that are fitted on the GPU are those that are fitted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_posenc.assets import tiny_model_path
from hf_posenc.fitting.config import FitConfig
from hf_posenc.fitting.fitting import FitResult, fit_method
from tiny_models import token_ids

pytestmark = pytest.mark.gpu
TARGET = 1024


def fit(device: torch.device, dtype: torch.dtype, **settings: Any) -> FitResult:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=dtype).to(device)
    texts = [token_ids(TARGET)[0], token_ids(TARGET)[0].flip(0)]
    config = FitConfig(TARGET, held_out=0, max_texts=2, hide_progress=True, **settings)  # type: ignore[arg-type]  # an int
    return fit_method(model.eval(), None, texts, config)


def test_a_rule(device: torch.device) -> None:
    expected, found = (fit(each, torch.float32, steps=3) for each in (torch.device("cpu"), device))
    assert found.options["long_factor"] == pytest.approx(expected.options["long_factor"], rel=1e-3)
    assert found.options["attention_factor"] == pytest.approx(expected.options["attention_factor"], rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_changed_weights(dtype: torch.dtype, device: torch.device) -> None:
    settings: dict[str, Any] = {"adapt_options": {"steps": 12, "short_steps": 2}}
    expected = fit(torch.device("cpu"), torch.float32, **settings).adapter
    found = fit(device, dtype, **settings).adapter
    assert expected is not None
    assert found is not None
    rounding = 1e-2 if dtype == torch.float32 else 0.15
    for one, other in zip(found.errors, expected.errors, strict=True):
        assert one == pytest.approx(other, rel=rounding)
        assert one[1] < one[0]
    assert {weight.device.type for weight in found.weights.values()} == {"cpu"}
