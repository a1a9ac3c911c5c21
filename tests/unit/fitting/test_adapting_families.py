"""Low-rank changes of every model type whose attention can be replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import PreTrainedModel

from hf_posenc.errors import HfPosencError, InvalidRequestError
from hf_posenc.families.family_data import attention_capabilities
from hf_posenc.fitting.adapter import Adapter
from hf_posenc.fitting.config import FitConfig
from hf_posenc.fitting.fitting import fit_method
from hf_posenc.patching.extension import plain_spec
from model_types import rotary_types, sharp_model
from tiny_models import assert_same_state, load_tiny, logits, state, token_ids

TARGET = 256
TYPES = [t for t in rotary_types() if attention_capabilities().get(t, "") is None]
REFUSED = {
    "diffllama": "more than once",
    "hrm_text": "more than once",
    "jetmoe": "are not known among kv_proj",
    "zaya": "are not known among o_proj",
    **dict.fromkeys(("ministral3", "mistral", "mixtral", "phi3", "phi4_multimodal", "starcoder2"), "sliding window"),
}
# Linear attention and Mamba without their kernels.
SLOW = {"granitemoehybrid", "zamba2", "qwen3_next", *(f"qwen3_5{rest}" for rest in ("", "_moe", "_moe_text", "_text"))}
# Windows, a tower with projections of the same names, fused projections, caps, two head sizes, interleaved pairs.
TELLING = {
    "cwm",
    "gemma2",
    "moss_transcribe_diarize",
    "gpt_neox",
    "dbrx",
    "mimo_v2_flash",
    "glm",
    "diffllama",
    "jetmoe",
}


def adapted(model: PreTrainedModel, original: int, adapt_options: dict[str, Any], **changes: Any) -> Adapter:
    texts = [token_ids(TARGET)[0], token_ids(TARGET)[0].flip(0)]
    config = FitConfig(TARGET, max_texts=2, held_out=0, hide_progress=True, adapt_options=adapt_options, **changes)
    config.original_max_position_embeddings = original
    adapter = fit_method(model, None, texts, config).adapter
    assert adapter is not None
    return adapter


@pytest.mark.parametrize("model_type", [pytest.param(t, marks=() if t in TELLING else pytest.mark.slow) for t in TYPES])
def test_under_the_plain_frequencies_each_layer_gives_what_the_model_gives(model_type: str, tmp_path: Path) -> None:
    """Texts are longer than windows; before a change, the attention of some queries is that of the model itself."""
    model, original = sharp_model(model_type), 192
    spec = plain_spec(model.config.get_text_config(decoder=True))
    ones = [1.0] * spec.rotated_pairs
    options = {"long_factor": ones, "short_factor": ones, "attention_factor": 1.0, "fitted_rope_theta": spec.rope_theta}
    options |= {"fitted_original_length": original, "fitted_length": TARGET}
    rule = tmp_path / "plain.json"
    rule.write_text(json.dumps({"method": "fitted", "options": options}))
    one_step = {"rule": str(rule), "rank": 4, "steps": 1, "short_steps": 0}
    before = state(model)
    if (reason := REFUSED.get(model_type)) is not None:
        with pytest.raises(HfPosencError, match=reason):
            adapted(model, original, one_step, teacher="none")
    else:
        errors = adapted(model, original, one_step, teacher="none").errors
        assert all(error < 1e-9 for error, _ in errors), errors
    assert_same_state(state(model), before)


@pytest.mark.parametrize("model_type", [pytest.param(t, marks=pytest.mark.slow) for t in TYPES if t not in REFUSED])
def test_changes_are_of_extended_layers_and_bring_them_nearer(model_type: str) -> None:
    """Merged, they are what the adapter is."""
    model, ids = sharp_model(model_type), token_ids(100)
    steps = 4 if model_type in SLOW else 40
    adapter = adapted(model, 64, {"rank": 8, "steps": steps, "short_steps": 1})
    assert all(after < before for before, after in adapter.errors), adapter.errors
    assert len(adapter.weights) == 2 * len(adapter.errors) * (1 if "q_proj" not in str(adapter.modules) else 2)
    plain, wrapped = logits(model, ids), adapter.wrap(model)
    changed = logits(wrapped, ids)
    assert (changed - plain).abs().max() > 1e-4
    torch.testing.assert_close(logits(wrapped.merge_and_unload(), ids), changed, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "gpt_neox", "glm"])
def test_families(model_type: str) -> None:
    """Biases, norms of queries and keys, fused projections, partial and interleaved rotation."""
    errors = adapted(sharp_model(model_type), 64, {"steps": 120, "short_steps": 1}).errors
    assert all(after < 0.95 * before for before, after in errors), errors


def test_models_that_cannot_be_adapted() -> None:
    with pytest.raises(InvalidRequestError, match="'deepseek_v3'"):
        adapted(sharp_model("deepseek_v3"), 64, {})
    model: Any = load_tiny()
    model.is_quantized = True
    with pytest.raises(InvalidRequestError, match="quantised"):
        adapted(model, 64, {})
    model = cpu_offload(load_tiny(), execution_device=torch.device("cpu"))
    with pytest.raises(InvalidRequestError, match="offloaded"):
        adapted(model, 64, {})


def test_numbers_that_are_not_finite() -> None:
    with pytest.raises(InvalidRequestError, match="layer 0 gave numbers that are not finite"):
        adapted(load_tiny(), 64, {"learning_rate": 1e30, "steps": 8, "short_steps": 0})
