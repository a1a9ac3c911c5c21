"""Every causal language model type of Transformers: patched to what Transformers would build, or refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from folders import HELPERS, ROOT
from hf_posenc import describe, load_extended, patch_model, save_extended, unpatch_model, verify_model
from hf_posenc.errors import RunStoppedError
from hf_posenc.evaluation.lm_head import decoder_body, token_losses
from hf_posenc.families.family_data import capabilities
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.unmasked_layers import unmasked_layers
from hf_posenc.training.chunked_loss import chunked_causal_lm_loss
from hf_posenc.training.start_checks import probe_isolation
from model_types import (
    IDS,
    config_class_of,
    error_refused,
    expected,
    refusal_of,
    rotary_types,
    tabled_types,
    tiny_config,
    tiny_model,
)
from older_transformers import known_here
from other_transformers import python_with
from tiny_models import assert_same_state, logits, native, state

pytestmark = pytest.mark.filterwarnings("ignore:config.sliding_window is 128")  # the small window of these models

REQUEST: dict[str, Any] = {"original_max_position_embeddings": 64, "on_scaled": "replace"}
METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "yarn": {},
    "ntk": {},
    "ntk_by_parts": {},
    "llama3": {},
    "longrope": {},
    "abf": {"rope_theta": 1e9},
    "nope": {},
}
FAST = ("linear", "yarn")
# Transformers' own longrope code asks these configs for a number that differs by layer.
CANNOT_BUILD = {("dots3_note_text", "longrope"), ("dots3_note_text", "nope")} | {
    (model_type, method)
    for model_type in ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
    for method in ("yarn", "ntk_by_parts", "llama3", "longrope", "nope")  # pairs that never rotate: as longrope
}


def options_of(method: str, model: PreTrainedModel) -> dict[str, Any]:
    if method != "longrope":
        return METHODS[method]
    pairs = [
        int((b != 0).sum())  # those that rotate
        for name, b in sorted(model.named_buffers(), key=lambda named: "full" in named[0])
        if name.endswith("original_inv_freq")
    ]
    return {"long_factor": [1.0 + i for i in range(pairs[-1] if pairs else 8)]}


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in FAST else pytest.mark.slow) for m in METHODS])
@pytest.mark.parametrize("model_type", rotary_types())
def test_patched_to_what_transformers_would_build_or_refused(model_type: str, method: str) -> None:
    model = tiny_model(model_type)
    before, plain = state(model), logits(model, IDS)
    options = {**REQUEST, **options_of(method, model)}
    reason = expected()[model_type]
    if reason is not None or (model_type, method) in CANNOT_BUILD:
        with pytest.raises(ValueError, match=re.escape(reason or "this Transformers cannot check longrope")):
            patch_model(model, method, 4, **options)
    else:
        patch_model(model, method, 4, **options)
        verify_model(model)
        extended = logits(model, IDS)
        assert not torch.equal(extended, plain)
        unpatch_model(model)
        assert torch.equal(extended, logits(native(model, method, 4, **options), IDS))
    assert_same_state(state(model), before)
    assert torch.equal(logits(model, IDS), plain)


# What families do to their logits, strongly enough to be seen where a config has the name.
LOGITS_CHANGED = {
    "final_logit_softcapping": 0.05,
    "lm_head_multiplier": 0.25,
    "logit_scale": 0.25,
    "logits_scaling": 8.0,
    "unpadded_vocab_size": 100,
}


@pytest.mark.parametrize("model_type", [t for t in rotary_types() if expected()[t] is None])
def test_losses_in_chunks_and_their_gradients_are_those_of_the_model_s_own_logits(model_type: str) -> None:
    config = tiny_config(config_class_of(model_type))
    text = config.get_text_config(decoder=True)
    for name, value in LOGITS_CHANGED.items():
        if name in text.to_dict():  # no property, such as MiniCPM3 has
            setattr(text, name, value)
    model, ids = tiny_model(model_type, config), IDS[:, :40]
    expected_loss = causal_loss(model(input_ids=ids, use_cache=False).logits, ids)
    expected_loss.backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    hidden = decoder_body(model)(input_ids=ids, use_cache=False).last_hidden_state
    loss = chunked_causal_lm_loss(model, hidden, ids, rows_per_chunk=11)
    loss.backward()
    losses = token_losses(model, hidden[0, :-1].detach(), ids[0, 1:], rows_per_chunk=11)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(losses.mean(), expected_loss.detach(), rtol=1e-5, atol=0)
    assert gradients(model).keys() == expected_gradients.keys()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-6, msg=name)


def causal_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:])


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


# Their text models are built here alone, for which Transformers has no auto class to load them by.
NO_AUTO_CLASS = {"emu3", "mllama"}
# Rotary settings for each layer type, a softmax scale or a serialization of their own: others are saved as a Llama.
OWN_SERIALIZATION = {
    "gemma3",
    "gemma3_text",
    "gemma3n_text",
    "olmo3",
    "laguna",
    "zaya",
    "modernbert-decoder",
    "mimo_v2_flash",
}
OWN_SERIALIZATION |= {
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "phimoe",
    "phi3",
    "ministral3",
    "gpt_oss",
    "gpt_neox",
}
OWN_SERIALIZATION |= {"gemma4_text", "lfm3", "granite_swa"}


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(t, marks=() if t in OWN_SERIALIZATION else pytest.mark.slow)
        for t in rotary_types()
        if expected()[t] is None and t not in NO_AUTO_CLASS
    ],
)
def test_saved_and_loaded_by_plain_transformers(model_type: str, tmp_path: Path) -> None:
    model, method = tiny_model(model_type), "linear" if (model_type, "yarn") in CANNOT_BUILD else "yarn"
    patch_model(model, method, 4, **REQUEST)
    wanted = logits(model, IDS)
    path = save_extended(model, tmp_path / "model")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(path).eval(), IDS), wanted)
    loaded = load_extended(path).eval()
    assert torch.equal(logits(loaded, IDS), wanted)
    assert describe(loaded) == describe(model)
    with pytest.raises(ValueError, match=f"{method},.*4"):
        patch_model(loaded, method, 4)


# Built here without its head (see NO_AUTO_CLASS).
HEADLESS = {"mllama"}


@pytest.mark.parametrize(
    "model_type", [one for one in rotary_types() if expected()[one] is None and one not in HEADLESS]
)
def test_packed_documents_are_apart_where_every_layer_has_a_mask(model_type: str) -> None:
    """What the types of the layers say of packing is what the gradient of the outputs says."""
    rotary = RotaryModel(tiny_model(model_type))
    if unmasked_layers(rotary):
        with pytest.raises(RunStoppedError, match="gradient there"):
            probe_isolation(rotary)
    else:
        assert probe_isolation(rotary) <= 1e-6


def test_the_table_is_true_for_every_type() -> None:
    found = {model_type: refusal_of(error_refused(model_type)) for model_type in tabled_types()}
    assert found == known_here(capabilities())
    patched = [model_type for model_type, reason in capabilities().items() if reason is None]
    assert len(patched) > 100
    without_rotary = set(tabled_types()) - set(rotary_types())
    assert {capabilities()[model_type] is None for model_type in without_rotary - {"dots3_note", "gemma3n"}} == {False}


def rows_of_transformers_5_0(*methods: str) -> list[tuple[str, str, str]]:
    run = [python_with("5.0.0"), str(HELPERS / "model_types_elsewhere.py"), *methods]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(run, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_on_transformers_5_0_every_type_is_patched_to_the_bit_or_refused_untouched() -> None:
    rows = rows_of_transformers_5_0("linear", "yarn")
    outcomes = Counter(outcome.partition(":")[0] for _, _, outcome in rows)
    assert set(outcomes) <= {"equal", "refused", "cannot be built"}, [row for row in rows if row[2] not in outcomes]
    assert outcomes["equal"] > 125
    assert outcomes["cannot be built"] < 30
    assert {"llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "deepseek_v3", "gpt_oss", "olmo2"} <= {
        model_type for model_type, method, outcome in rows if method == "yarn" and outcome == "equal"
    }


@pytest.mark.slow
def test_on_transformers_5_0_methods_that_run_in_attention_are_exact_or_refused_untouched() -> None:
    rows = rows_of_transformers_5_0("dynamic_yarn", "self_extend")
    outcomes = Counter(outcome.partition(":")[0] for _, _, outcome in rows)
    allowed = {"equal", "refused", "cannot be built", "equal without a cache"}
    assert set(outcomes) <= allowed, [row for row in rows if row[2].partition(":")[0] not in allowed]
    assert outcomes["equal"] > 90
    for model_type in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_neox", "phi3", "smollm3"):
        for method in ("dynamic_yarn", "self_extend"):
            assert (model_type, method, "equal") in rows
