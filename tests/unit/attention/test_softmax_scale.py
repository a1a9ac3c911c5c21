"""Multi-head latent attention: the temperature reaches the whole logit through the softmax scale."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc import (
    RotaryMismatchError,
    describe,
    load_extended,
    patch_model,
    save_extended,
    unpatch_model,
    verify_model,
)
from hf_posenc.checkpoint.plain_loading import plain_loading
from model_types import IDS, tiny_model
from tiny_models import logits

REQUEST = {"original_max_position_embeddings": 64, "on_scaled": "replace"}
TEMPERATURE = 0.1 * math.log(4) + 1  # YaRN's attention factor for factor 4
PLAIN = (16 + 16) ** -0.5  # of heads with 16 turning and 16 other features


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash"])
def test_yarn_multiplies_whole_logits_by_the_square_of_its_factor(model_type: str) -> None:
    model = tiny_model(model_type)
    before = [m.scaling for m in model.modules() if hasattr(m, "qk_head_dim")]
    assert before == pytest.approx([PLAIN] * len(before), rel=1e-12)
    patch_model(model, "yarn", 4, **REQUEST)
    assert model.model.rotary_emb.attention_scaling == 1.0
    found = [m.scaling for m in model.modules() if hasattr(m, "qk_head_dim")]
    assert found == pytest.approx([PLAIN * TEMPERATURE**2] * len(before), rel=1e-12)
    unpatch_model(model)
    assert [m.scaling for m in model.modules() if hasattr(m, "qk_head_dim")] == before


def test_an_attention_factor_of_the_users_stays_on_the_rotated_part_as_published() -> None:
    model = patch_model(tiny_model("deepseek_v3"), "yarn", 4, attention_factor=TEMPERATURE, **REQUEST)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(TEMPERATURE)
    assert model.model.layers[0].self_attn.scaling == pytest.approx(PLAIN, rel=1e-12)


def test_deepseeks_own_pair_is_kept(tmp_path) -> None:
    model = patch_model(tiny_model("deepseek_v2"), "yarn", 40, mscale=0.707, mscale_all_dim=0.707, **REQUEST)
    scale = model.model.layers[0].self_attn.scaling
    assert scale == pytest.approx(PLAIN * (0.1 * 0.707 * math.log(40) + 1) ** 2, rel=1e-12)
    plain = AutoModelForCausalLM.from_pretrained(save_extended(model, tmp_path / "model")).eval()
    assert torch.equal(logits(plain, IDS), logits(model, IDS))


@pytest.mark.parametrize("ramp", ["paper", "harmonic"])
def test_a_ramp_whose_config_has_no_key_for_the_scale_is_refused_with_that_reason(ramp: str) -> None:
    model = tiny_model("deepseek_v3")
    with pytest.raises(ValueError, match=f"ramp='{ramp}'.*multi-head.*attention_f"):
        patch_model(model, "yarn", 4, ramp=ramp, **REQUEST)
    patch_model(model, "yarn", 4, ramp=ramp, attention_factor=TEMPERATURE, **REQUEST)
    assert model.model.layers[0].self_attn.scaling == pytest.approx(PLAIN, rel=1e-12)


def test_a_changed_scale_is_found() -> None:
    model = patch_model(tiny_model("deepseek_v3"), "yarn", 4, **REQUEST)
    model.model.layers[1].self_attn.scaling = PLAIN
    with pytest.raises(RotaryMismatchError, match=r"layers\.1\.self_attn:.*0\.17"):
        verify_model(model)


@pytest.mark.parametrize("model_type", ["phi", "stablelm", "glm"])
def test_on_partial_rotary_models_the_temperature_can_reach_whole_logits(model_type: str, tmp_path, caplog) -> None:
    model = tiny_model(model_type)
    plain = logits(model, IDS)
    # Independently: no temperature on cos and sin, and queries multiplied by its square.
    reference = patch_model(tiny_model(model_type), "yarn", 4, attention_factor=1.0)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "q_proj" in name:
                parameter *= TEMPERATURE**2
    published = logits(patch_model(tiny_model(model_type), "yarn", 4), IDS)

    patch_model(model, "yarn", 4, temperature="logits")
    whole = logits(model, IDS)
    torch.testing.assert_close(whole, logits(reference, IDS), rtol=1e-4, atol=1e-6)
    assert (whole - published).abs().max() > 100 * (whole - logits(reference, IDS)).abs().max()
    path = save_extended(model, tmp_path / "model")
    assert "load_extended" in caplog.text
    assert torch.equal(logits(load_extended(path).eval(), IDS), whole)
    with plain_loading():  # as without hf_posenc
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(path).eval(), IDS), published)
    model.model.layers[0].self_attn.scaling *= 1.01
    with pytest.raises(RotaryMismatchError, match="softmax scale"):
        verify_model(model)
    unpatch_model(model)
    assert torch.equal(logits(model, IDS), plain)


def test_where_all_of_a_head_turns_it_is_the_same() -> None:
    model = patch_model(tiny_model("llama"), "yarn", 4, temperature="logits", original_max_position_embeddings=64)
    reference = patch_model(tiny_model("llama"), "yarn", 4, original_max_position_embeddings=64)
    assert torch.equal(logits(model, IDS), logits(reference, IDS))
    assert describe(model)["options"] == {}
    with pytest.raises(ValueError, match="mscale_all_dim"):
        patch_model(tiny_model("deepseek_v3"), "yarn", 4, temperature="logits", attention_factor=1.1, **REQUEST)
    with pytest.raises(ValueError, match="'all'"):
        patch_model(tiny_model("phi"), "yarn", 4, temperature="all")
    other = tiny_model("phi")
    for layer in other.model.layers:
        layer.self_attn.scaling = torch.tensor(layer.self_attn.scaling)  # not the plain number it should be
    with pytest.raises(ValueError, match="scaling that"):
        patch_model(other, "yarn", 4, temperature="logits")


def test_layers_that_keep_their_rule_keep_their_temperature() -> None:
    model = tiny_model("mimo_v2_flash")
    before = [layer.self_attn.scaling for layer in model.model.layers]
    patch_model(model, "yarn", 4, temperature="logits", original_max_position_embeddings=64)
    for layer, plain, kind in zip(model.model.layers, before, model.config.layer_types, strict=True):
        factor = TEMPERATURE**2 if kind == "full_attention" else 1.0
        assert layer.self_attn.scaling == pytest.approx(plain * factor)
    assert {"full_attention", "sliding_attention"} <= set(model.config.layer_types)
