"""Rules as published checkpoints have them: whatever Transformers runs is read, verified, measured and replaced."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc import describe, diagnose, patch_model, perplexity, verify_model
from hf_posenc.doctor.mending import mended
from hf_posenc.patching.extension import declared_scaling
from model_types import config_class_of, tiny_config, tiny_model
from tiny_llama import TINY_SIZES, make_tiny_llama
from tiny_models import logits, token_ids

LENGTH = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, LENGTH: 64}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 64}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, LENGTH: 64}
# Values at and beyond what a request may have, each of which Transformers builds a module from.
PUBLISHED: dict[str, dict[str, Any]] = {
    "kimi-k2": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-betas-crossed": {**YARN, "beta_fast": 1.0, "beta_slow": 8.0},
    "yarn-betas-crossed-truncate": {**YARN, "beta_fast": 1.0, "beta_slow": 8.0, "truncate": False},
    "yarn-betas-equal-truncate": {**YARN, "beta_fast": 2, "beta_slow": 2, "truncate": False},
    "yarn-beta-0": {**YARN, "beta_fast": 0, "beta_slow": 0},
    "yarn-beta-null": {**YARN, "beta_fast": None, "beta_slow": None, "attention_factor": None},
    "yarn-truncate-null": {**YARN, "truncate": None},
    "yarn-truncate-0": {**YARN, "truncate": 0},
    "yarn-factor-null": {**YARN, "factor": None},
    "yarn-factor-1": {**YARN, "factor": 1},
    "yarn-factor-below-1": {**YARN, "factor": 0.5},
    "yarn-attention-0": {**YARN, "attention_factor": 0},
    "yarn-mscale-0": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0},
    "yarn-mscale-alone": {**YARN, "mscale": 0.707},
    "yarn-mscale-all-dim-alone": {**YARN, "mscale_all_dim": 0.707},
    "yarn-mscale-pair": {**YARN, "mscale": 0.707, "mscale_all_dim": 1},
    "yarn-other-words": {**YARN, "ramp": "paper", "temperature": "logits"},  # which Transformers does not read
    "llama3-equal": {**LLAMA3, "low_freq_factor": 4.0},
    "llama3-crossed": {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
    "llama3-factor-below-1": {**LLAMA3, "factor": 0.5},
    "longrope-factor-null": {**LONGROPE, "factor": None},
    "longrope-factor-below-1": {**LONGROPE, "factor": 0.5},
    "longrope-attention-0": {**LONGROPE, "attention_factor": 0.0},
    "longrope-divisors-below-1": {**LONGROPE, "short_factor": [0.5] * 8},
    "linear-factor-below-1": {"rope_type": "linear", "factor": 0.25},
    "linear-original-null": {"rope_type": "linear", "factor": 2, LENGTH: None},
    "dynamic-factor-below-1": {"rope_type": "dynamic", "factor": 0.5},
    "dynamic-with-original": {"rope_type": "dynamic", "factor": 4.0, LENGTH: 64},
    "proportional-factor-below-1": {"rope_type": "proportional", "factor": 0.5, "partial_rotary_factor": 0.5},
}


def published(rule: dict[str, Any]) -> LlamaForCausalLM:
    """Return a tiny Llama whose config has the rule from the beginning."""
    config = LlamaConfig(**{**TINY_SIZES, "max_position_embeddings": 256}, rope_parameters={"rope_theta": 1e4, **rule})
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(make_tiny_llama().state_dict())
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_transformers_runs_is_read(name: str, tmp_path: Path) -> None:
    model = published(PUBLISHED[name])
    assert verify_model(model).modules
    declared = declared_scaling(model.config)
    assert declared is not None
    for length in (64, 300):  # longer than the config says, where dynamic and longrope change
        inv_freq, factor = ROPE_INIT_FUNCTIONS[PUBLISHED[name]["rope_type"]](model.config, seq_len=length)
        ours, ours_factor = declared.method.frequencies(declared.spec, length)
        torch.testing.assert_close(ours.float(), inv_freq, rtol=1e-6, atol=0)
        assert math.isclose(ours_factor, factor, rel_tol=1e-6)
    assert describe(model)["method"] == declared.method.name
    assert diagnose(model).sound
    model.save_pretrained(tmp_path)
    wrong = {finding.code for finding in diagnose(tmp_path, live=True).findings}
    assert ("loaded-otherwise" in wrong) == ("dynamic-raised" in wrong) == (name == "dynamic-with-original")
    replaced = patch_model(model, "yarn", 2, original_max_position_embeddings=64, on_scaled="replace")
    expected = patch_model(make_tiny_llama(), "yarn", 2)
    if "partial_rotary_factor" not in PUBLISHED[name]:
        torch.testing.assert_close(logits(replaced, token_ids(100)), logits(expected, token_ids(100)))


def test_truncate_is_read_where_transformers_looks_for_it() -> None:
    """Beside the layer types, and not in theirs."""
    rule = {**YARN, "rope_theta": 1e4, "truncate": False, "beta_fast": 16.0}
    for beside in ({}, {"truncate": False}):
        layers = {"full_attention": rule, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
        config = tiny_config(config_class_of("gemma3_text"))
        config.rope_parameters = {**layers, **beside}
        model = tiny_model("gemma3_text", config)
        assert verify_model(model).extension["options"] == {"beta_fast": 16.0, **beside}


def test_two_original_lengths_of_dynamic_are_both_said() -> None:
    model = published(PUBLISHED["dynamic-with-original"])
    assert describe(model)[LENGTH] is None
    with pytest.warns(UserWarning, match=r"64 \(original_max_.*\).*256 \(max_position.*\)\..*64"):
        patch_model(model, "yarn", 2, on_scaled="replace")
    assert describe(model)[LENGTH] == 64


def test_the_same_values_are_refused_in_a_request() -> None:
    for options in ({"beta_fast": 1.0, "beta_slow": 1.0}, {"mscale": 0.0}, {"factor": 0.5}):
        with pytest.raises(ValueError, match="must be"):
            patch_model(make_tiny_llama(), "yarn", **{"factor": 4.0, **options})


def test_kimi_k2_is_measured_and_its_softmax_scale_verified() -> None:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
    }
    small = {**TINY_SIZES, **sizes, **experts, "num_key_value_heads": TINY_SIZES["num_attention_heads"]}
    rule = {**PUBLISHED["kimi-k2"], "rope_theta": 5e4, "factor": 32.0}
    torch.manual_seed(0)
    model: PreTrainedModel = DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**small, "max_position_embeddings": 2048, "rope_parameters": rule})
    ).eval()
    assert verify_model(model).extension["options"] == {
        "beta_fast": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    attention = model.model.layers[0].self_attn
    assert math.isclose(attention.scaling, (0.1 * math.log(32) + 1) ** 2 / math.sqrt(32), rel_tol=1e-6)
    record = perplexity(model, [token_ids(100)[0].tolist()], context_lengths=[64])[0]
    assert (record.method, record.factor) == ("yarn", 32.0)
    written = mended({**model.config.to_dict(), "rope_scaling": rule, "rope_parameters": None})
    assert written["rope_parameters"] == {key: value for key, value in rule.items() if key != "beta_slow"}
