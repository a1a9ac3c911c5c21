"""Requests and models that cannot be: refused with the reason, and nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_posenc import extend_config, patch_model, unpatch_model, verify_model
from hf_posenc.errors import RotaryMismatchError, UnsupportedModelError
from hf_posenc.patching.api import describe
from model_types import tiny_model
from older_transformers import skip_if_left_out
from tiny_models import assert_same_state, logits, make_model, native, state, token_ids

IDS = token_ids(100, rows=2)  # past the original 64


def test_a_config_set_after_loading_is_found() -> None:  # pains row 1
    model = make_model("Llama")
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "linear", "factor": 4.0}
    with pytest.raises(RotaryMismatchError, match="config changed"):
        verify_model(model)
    with pytest.raises(RotaryMismatchError):
        patch_model(model, "yarn", 4, on_scaled="replace", original_max_position_embeddings=64)


def test_the_tutorial_idiom_is_explained() -> None:  # row 18
    model = make_model("Llama")
    model.config.rope_parameters = {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(ValueError, match=r"rope_theta\..*config\.rope_scaling"):
        patch_model(model, "yarn", 4)


def test_an_assigned_rope_theta_is_explained() -> None:  # row 19
    model = make_model("Llama")
    model.config.rope_theta = 1e6
    with pytest.raises(ValueError, match=r"5.*method='abf'"):
        patch_model(model, "yarn", 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"factor": 4, "context_length": 256}, ValueError, r"not both \(got 4 and 256\)"),
        ({"factor": 0.25}, ValueError, r"factor must be >= 1, got 0\.25"),
        ({"factor": "4"}, TypeError, "factor must be a number, got '4'"),
        ({"context_length": 32}, ValueError, "at least the original length, 64 tokens, got 32"),
        ({"context_length": 256.5}, ValueError, "whole number of tokens"),
        ({"factor": 4, "original_max_position_embeddings": 0}, ValueError, "must be >= 1, got 0"),
        ({"factor": 4, "on_scaled": "maybe"}, ValueError, "on_scaled must be 'refuse' or 'replace'"),
        ({"factor": 4, "attn_factor": 1.0}, TypeError, "takes no option 'attn_factor'"),
        ({"factor": 4, "method": "ntk2"}, ValueError, "Did you mean 'ntk'"),
        (
            {"factor": 4, "method": "dynamic", "scope": "batch"},
            ValueError,
            "unknown scope 'batch'. Known: query, sequence",
        ),
    ],
)
def test_bad_input_changes_nothing(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = make_model("Llama")
    before, config_before = state(model), model.config.to_dict()
    with pytest.raises(error, match=message):
        patch_model(model, **arguments)
    assert_same_state(state(model), before)
    assert model.config.to_dict() == config_before
    assert describe(model)["method"] == "none"


def test_patching_twice_is_refused() -> None:
    model = patch_model(make_model("Llama"), "yarn", 4)
    with pytest.raises(ValueError, match=r"\(yarn,.*4\)\..*unpatch_model"):
        patch_model(model, "linear", 2)
    unpatch_model(model)
    with pytest.raises(ValueError, match="not patched"):
        unpatch_model(model)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        {"rope_type": "linear", "factor": 4.0},
    ],
    ids=["yarn", "llama3", "linear"],
)
def test_an_already_scaled_base_is_refused_or_replaced(parameters: dict[str, Any]) -> None:  # row 9
    model = make_model("Llama", rope_parameters={"rope_theta": 1e4, **parameters})
    name = parameters["rope_type"]
    with pytest.raises(ValueError, match=f"{name},.*4,.*on_scaled='replace'"):
        patch_model(model, "yarn", 8)
    original = None
    if name == "linear":
        with pytest.raises(ValueError, match="was trained"):
            patch_model(model, "yarn", 8, on_scaled="replace")
        original = 16
    plain = logits(model, IDS)
    base = make_model("Llama", max_position_embeddings=16)
    expected = logits(native(base, "yarn", 8), IDS)
    patch_model(model, "yarn", 8, on_scaled="replace", original_max_position_embeddings=original)
    assert torch.equal(logits(model, IDS), expected)
    assert "low_freq_factor" not in model.config.rope_parameters
    assert torch.equal(logits(unpatch_model(model), IDS), plain)


@pytest.mark.parametrize("target", [65, 96, 100, 160, 250])
def test_the_three_numbers_agree(target: int) -> None:  # rows 7 and 8
    config = extend_config(make_model("Llama").config, "yarn", context_length=target)
    parameters = config.rope_parameters
    assert parameters["original_max_position_embeddings"] == 64
    assert config.max_position_embeddings == target
    assert parameters["factor"] == target / 64
    by_factor = extend_config(make_model("Llama").config, "yarn", factor=target / 64)
    assert by_factor.to_dict() == config.to_dict()


def test_what_belongs_to_the_family_is_kept() -> None:
    config = make_model("GPTNeoX").config
    before = config.to_dict()
    extended = extend_config(config, "yarn", 4)
    assert extended.rope_parameters["partial_rotary_factor"] == 0.5
    assert extended.rope_parameters["rope_theta"] == 1e4
    assert config.to_dict() == before


def test_what_cannot_be_scaled_is_refused_with_the_reason() -> None:
    with pytest.raises(TypeError, match=r"expected a Transformers model .*, got Linear"):
        patch_model(nn.Linear(2, 2), "yarn", 4)
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16))
    with pytest.raises(UnsupportedModelError, match=r"'gpt2'.*rope_parameters"):
        patch_model(gpt2, "yarn", 4)
    with pytest.raises(ValueError, match="sliding window"):
        patch_model(tiny_model("cohere2"), "yarn", 4)
    skip_if_left_out("gemma4_text")
    with pytest.raises(ValueError, match=r"'gemma4_text':.*head_dim"):
        patch_model(tiny_model("gemma4_text"), "yarn", 4)
    with pytest.raises(ValueError, match="rotates every"):
        patch_model(tiny_model("lfm3"), "dynamic", 4, scope="sequence")
    with pytest.raises(ValueError, match="rotates its"):
        patch_model(tiny_model("deepseek_v4"), "yarn", 4, attention_factor=1.2)


def test_a_rule_that_depends_on_the_forward_is_no_list_of_divisors() -> None:
    """Phi-3 reads lists alone, and those of this rule would be ones: nothing would be extended."""
    model = tiny_model("phi3")
    with pytest.raises(ValueError, match="depends on the length of each forward"):
        patch_model(model, "dynamic", 4, scope="sequence")
    assert describe(model)["method"] == "none"


def test_no_config_can_say_what_changes_the_softmax_scale() -> None:
    with pytest.raises(ValueError, match="temperature 'logits'"):
        extend_config(tiny_model("phi").config, "yarn", 4, temperature="logits", original_max_position_embeddings=64)


def test_options_count_at_factor_1_too() -> None:
    model = make_model("Llama")
    by_lists = extend_config(model.config, "yarn", 1, ramp="paper", attention_factor=1.2)
    assert by_lists.rope_parameters["attention_factor"] == 1.2
    patch_model(tiny_model("phi3"), "abf", 1, rope_theta=1e6)  # verified against the closed form


@pytest.mark.parametrize("method", ["yarn", "dca"])
def test_a_whole_number_is_a_length_whatever_its_type(method: str) -> None:
    model, other = make_model("Llama"), make_model("Llama")
    patch_model(model, method, 4, original_max_position_embeddings=32.0)  # type: ignore[arg-type]  # half of 64
    patch_model(other, method, 4, original_max_position_embeddings=32)
    assert torch.equal(logits(model, IDS), logits(other, IDS))
    assert type(describe(model)["original_max_position_embeddings"]) is int


def test_what_is_wrong_with_the_model_is_not_said_of_the_method() -> None:
    model = make_model("Llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
        model.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"NaN|not a number|finite") as caught:
        patch_model(model, "dca", 4)
    assert "another method" not in str(caught.value)


def test_a_plain_model_without_data_can_be_described() -> None:
    with torch.device("meta"):
        model = type(make_model("Llama"))(make_model("Llama").config)
    assert "no data yet" in str(verify_model(model))
