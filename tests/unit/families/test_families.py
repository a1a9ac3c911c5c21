"""Families whose configs decide what can be scaled: refused with the true reason, or what Transformers builds."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_posenc import (
    describe,
    extend_config,
    patch_model,
    unpatch_model,
    verify_model,
)
from hf_posenc.families import family_data
from hf_posenc.families.family_data import Family, family_of
from hf_posenc.families.refusals import REASONS
from model_types import IDS, config_class_of, tiny_config, tiny_model
from patched_and_undone import REQUEST, assert_patched_saved_and_undone
from tiny_models import logits

METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "ntk": {},
    "ntk_by_parts": {},
    "ntk_rcd": {"critical_pair": 3},
    "yarn": {},
    "yarn_rcd": {},
    "llama3": {},
    "abf": {"rope_theta": 1e8},
}


def tiny(model_type: str, **overrides: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    kind = config_class_of(model_type)
    return AutoModelForCausalLM.from_config(kind(**{**tiny_config(kind).to_dict(), **overrides})).eval()


@pytest.mark.parametrize("method", METHODS)
def test_pairs_that_never_turn_stay_still(method: str, tmp_path: Path) -> None:
    model = tiny_model("lfm3")  # 16 features, the faster half of the pairs turns
    assert_patched_saved_and_undone(model, tmp_path / "model", method, **METHODS[method])
    patch_model(model, method, 4, **REQUEST, **METHODS[method])
    inv_freq = model.model.rotary_emb.full_attention_inv_freq.double()
    plain = 1e6 ** -(torch.arange(8).double() / 8)
    assert torch.equal(inv_freq[4:], torch.zeros(4).double())
    assert torch.all(inv_freq[:4] > 0)
    if method != "abf":  # the slowest pair that turns is stretched by the factor
        assert inv_freq[3].item() == pytest.approx(plain[3].item() / 4, rel=1e-6)


def test_a_temperature_reaches_the_features_that_never_turn() -> None:
    model = patch_model(tiny_model("lfm3"), "yarn", 4, **REQUEST)
    cos, _ = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[9]]), layer_type="full_attention")
    assert cos[0, 0, 4:8].tolist() == pytest.approx([0.1 * math.log(4) + 1] * 4)


def test_longrope_takes_a_number_for_each_pair_that_turns(tmp_path: Path) -> None:
    model = tiny_model("lfm3")
    with pytest.raises(ValueError, match=r"long_factor.*4"):
        patch_model(model, "longrope", 4, **REQUEST, long_factor=[2.0] * 8)
    assert_patched_saved_and_undone(model, tmp_path / "model", "longrope", long_factor=[1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("method", ["linear", "ntk", "abf"])
def test_gemma_4_is_divided_by_transformers_own_proportional_rule(method: str, tmp_path: Path) -> None:
    model = tiny_model("gemma4_text")
    plain = model.model.rotary_emb.full_attention_inv_freq.clone()
    sliding = model.model.rotary_emb.sliding_attention_inv_freq.clone()
    assert_patched_saved_and_undone(model, tmp_path / "model", method, **METHODS[method])
    patch_model(model, method, 4, **REQUEST, **METHODS[method])
    rotary = model.model.rotary_emb
    assert model.config.rope_parameters["full_attention"]["rope_type"] == "proportional"
    assert torch.equal(rotary.sliding_attention_inv_freq, sliding)
    assert torch.equal(rotary.full_attention_inv_freq == 0, plain == 0)
    if method == "linear":
        assert torch.equal(rotary.full_attention_inv_freq, plain / 4)


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_gemma_4_assistants_are_refused_by_their_config(model_type: str) -> None:
    text = tiny_config(config_class_of(f"{model_type}_text")).to_dict()
    alone = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2}
    config = config_class_of(f"{model_type}_assistant")(text_config={**text, **alone})
    with pytest.raises(ValueError, match="layers read"):
        extend_config(config, "linear", 4)


def test_a_proportional_checkpoint_with_a_factor_is_scaled_already() -> None:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.3,  # 2 of 8 pairs
            "factor": 8.0,
        },
    }
    model = tiny("lfm3", rope_parameters=rope)
    verify_model(model)
    with pytest.raises(ValueError, match="already scaled: linear, factor 8, original length not recorded"):
        patch_model(model, "yarn", 4)
    plain = logits(model, IDS)
    patch_model(model, "yarn", 4, **REQUEST, on_scaled="replace")
    assert int((model.model.rotary_emb.full_attention_inv_freq != 0).sum()) == 2
    patch_model(unpatch_model(model), "linear", 8, **REQUEST, on_scaled="replace")
    assert torch.equal(logits(model, IDS), plain)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rotary_dim", [7, 11])
def test_odd_rotary_widths(rotary_dim: int, method: str, tmp_path: Path) -> None:
    # Transformers' own yarn cannot be built: it counts the pairs of such a width in two ways.
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": (rotary_dim + 0.1) / 16}
    model = tiny("glm4_moe", rope_parameters=rope, partial_rotary_factor=rope["partial_rotary_factor"])
    assert_patched_saved_and_undone(model, tmp_path / "model", method, **METHODS[method])
    patch_model(model, method, 4, **REQUEST, **METHODS[method])
    inv_freq = model.model.rotary_emb.inv_freq.double()
    assert len(inv_freq) == (rotary_dim + 1) // 2
    if method in ("linear", "ntk", "yarn"):
        assert inv_freq[-1].item() == pytest.approx(1e4 ** -((rotary_dim - 1) / rotary_dim) / 4, rel=1e-6)


@pytest.mark.parametrize("method", ["yarn", "ntk", "abf"])
@pytest.mark.parametrize("model_type", ["granite_swa", "granitemoe_swa"])
def test_a_base_that_layers_have_or_not(model_type: str, method: str, tmp_path: Path) -> None:
    model = tiny(model_type, layer_rope_theta=[0, 10000.0])
    assert_patched_saved_and_undone(model, tmp_path / "model", method, **METHODS[method])
    assert model.config.layer_rope_theta == [0, 10000.0]


def test_bases_that_differ_by_layer_are_refused() -> None:
    model = tiny("granite_swa", layer_rope_theta=[5000.0, 10000.0])
    with pytest.raises(ValueError, match=r"\(layer_rope_theta: 5000, 10000\),"):
        patch_model(model, "yarn", 4)
    model = tiny("granite_swa", layer_rope_theta=[10000.0, 0])
    with pytest.raises(ValueError, match="full-attention"):
        patch_model(model, "yarn", 4)


def test_deepseek_v4_scales_what_reads_the_whole_context_compressed(tmp_path: Path) -> None:
    model = tiny_model("deepseek_v4")
    rotary = model.model.rotary_emb
    main = rotary.main_inv_freq.clone()
    assert_patched_saved_and_undone(model, tmp_path / "model", "yarn")
    modules = {check.name for check in verify_model(patch_model(model, "yarn", 4, **REQUEST)).modules}
    assert len(modules) == 4  # the model's, one for each compressor, and the indexer's
    assert torch.equal(rotary.main_inv_freq, main)
    assert rotary.compress_attention_scaling == 1.0  # values turn too, and would grow
    assert describe(model)["options"] == {"attention_factor": 1.0}
    assert logits(model, IDS[:, :90]).isfinite().all()


def test_llama_4_in_chunks_smaller_than_the_text(tmp_path: Path) -> None:
    # A query's temperature grows every 16 tokens.
    options = {"attention_chunk_size": 32, "floor_scale": 16, "num_key_value_heads": 4}
    with pytest.raises(ValueError, match=r"\(of 32"):
        patch_model(tiny("llama4_text", **options), "yarn", 4)
    layers = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 1]}
    model = tiny("llama4_text", **options, **layers)
    whole = logits(model, IDS)
    assert_patched_saved_and_undone(model, tmp_path / "model", "yarn")
    cut = logits(tiny("llama4_text", **{**options, "attention_chunk_size": 8192}, **layers), IDS)
    assert torch.equal(whole[:, :32], cut[:, :32])
    assert not torch.equal(whole, cut)


def test_cohere_2_moe_whose_first_layers_read_everything_and_turn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sliding window"):
        patch_model(tiny_model("cohere2_moe"), "yarn", 4)
    layers = {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]}
    assert_patched_saved_and_undone(tiny("cohere2_moe", **layers), tmp_path / "model", "yarn")


def test_every_exception_has_a_reason_and_is_of_a_known_family() -> None:
    table = tomllib.loads(Path(family_data.__file__).with_name("exceptions.toml").read_text(encoding="utf-8"))
    assert table["full_attention"]["why"]
    kinds = {field.name for field in dataclasses.fields(Family)}
    assert table["exceptions"].keys() == kinds
    for kind, entry in table["exceptions"].items():
        assert entry["why"], kind
        assert entry.keys() == {"why", "model_types"}
        assert len(set(entry["model_types"])) == len(entry["model_types"]), kind
        for model_type in entry["model_types"]:
            assert getattr(family_of(model_type), kind) not in (None, False, ()), (kind, model_type)
    codes = [
        code
        for kind in ("refused", "refused_in_attention")
        for code in table["exceptions"][kind]["model_types"].values()
    ]
    assert set(codes) <= REASONS.keys()
    assert family_of("llama") == family_of(None) == Family()
