"""Our attention for every type that can be extended: the same numbers however a text is fed, or refused."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from attention_models import in_chunks
from hf_posenc import RotaryMismatchError, unpatch_model, verify_model
from hf_posenc.attention.interface import FULL, attention_of
from hf_posenc.attention.rotation import Rotation
from hf_posenc.errors import UnsupportedModelError
from hf_posenc.families.family_data import Family, attention_capabilities, capabilities, family_of
from hf_posenc.families.sliding_window import window_of_all_layers
from model_types import (
    NEIGHBOURS,
    REQUEST,
    config_class_of,
    error_not_in_attention,
    patch_in_attention,
    refusal_of,
    rotary_types,
    sharp_model,
    sharpened,
    tabled_types,
    tiny_config,
    tiny_model,
)
from older_transformers import known_here
from tiny_models import assert_same_state, logits, native, state, token_ids

ORIGINAL = 64  # tokens
IDS = token_ids(180)
EXTENDED = [t for t in rotary_types() if attention_capabilities().get(t, "") is None]
# Their layers with a sliding window rotate by the same module: our attention leaves those plain, Transformers does not.
SHARED_WITH_WINDOWS = {"cwm", "gemma2", "gpt_oss", "vaultgemma"}
# How these rotate in bfloat16 is not as in Llama.
OTHER_ROUNDING = NEIGHBOURS | {"modernbert-decoder", "olmo", "olmo2", "olmo3", "flex_olmo", "olmo_hybrid"}
# Caps, sinks, or values in two halves.
OWN_SOFTMAX = {"llama", "gemma2", "gpt_oss", "mimo_v2_flash", "diffllama", "glm"}


def assert_exact_and_undone(model_type: str, method: str, **options: Any) -> None:
    """Full forward == chunks == 20 single tokens; plain up to the original length; undone to the bit."""
    model = sharp_model(model_type)
    before, plain, short = state(model), logits(model, IDS), logits(model, IDS[:, :ORIGINAL])
    patch_in_attention(model, method, 4, **REQUEST, **options)
    verify_model(model)
    full = logits(model, IDS)
    if model_type != "minimax":  # not exact with its cache without us either: see below
        torch.testing.assert_close(in_chunks(model, IDS, [37, 60, 5]), full, atol=1e-5, rtol=0)
        torch.testing.assert_close(in_chunks(model, IDS, [160, *[1] * 20]), full, atol=1e-5, rtol=0)
    torch.testing.assert_close(full[:, :ORIGINAL], plain[:, :ORIGINAL], atol=1e-5, rtol=0)
    assert torch.equal(logits(model, IDS[:, :ORIGINAL]), short)
    assert (full - plain)[:, ORIGINAL:].abs().max() > 1e-3
    unpatch_model(model)
    assert_same_state(state(model), before)
    assert torch.equal(logits(model, IDS), plain)


def test_minimax_as_transformers_has_it_is_not_exact_with_its_cache() -> None:
    model = sharp_model("minimax")
    in_pieces = in_chunks(model, IDS, [37, 60, 5], MiniMaxCache())
    assert (in_pieces - logits(model, IDS)).abs().max() > 1e-2


@pytest.mark.parametrize("model_type", EXTENDED)
def test_staged_is_exact_with_a_cache(model_type: str) -> None:
    assert_exact_and_undone(model_type, "dynamic_yarn", stage=32)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EXTENDED)
def test_self_extend_is_exact_with_a_cache(model_type: str) -> None:
    assert_exact_and_undone(model_type, "self_extend", group=3, window=ORIGINAL)


@pytest.mark.parametrize("model_type", EXTENDED)
def test_one_stage_is_the_model_transformers_builds_with_yarn(model_type: str) -> None:
    """With an original length of 1 all that matters is in the first stage: plain YaRN of the factor it ends at.

    The betas put YaRN's ramp over the pairs of so short a text; the usual ones would leave every pair alone.
    """
    layer_types = ["full_attention"] * 2 if model_type in SHARED_WITH_WINDOWS else None
    model = sharp_model(model_type, layer_types)
    config = model.config.get_text_config(decoder=True)
    for key in family_of(config.model_type).keys_read_in_attention:  # no rule may change what it reads
        config.rope_parameters[key] = 1
    window = "off" if window_of_all_layers(config) else "keep"
    request: dict[str, Any] = {"original_max_position_embeddings": 1, "on_scaled": "replace", "sliding_window": window}
    request |= {"beta_fast": 0.05, "beta_slow": 0.005}
    if model_type == "gpt_oss":  # the first token alone has a temperature to feel: its sink
        request["attention_factor"] = 1.0
    ids = IDS[:, :100]
    reference = logits(native(model, "yarn", 100, **request), ids)
    assert (reference - logits(model, ids)).abs().max() > 1e-3
    patch_in_attention(model, "dynamic_yarn", 100, stage=99, **request)
    torch.testing.assert_close(logits(model, ids), reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "model_type", [pytest.param(t, marks=() if t in OWN_SOFTMAX else pytest.mark.slow) for t in EXTENDED]
)
def test_self_extend_in_groups_of_one_is_the_plain_model(model_type: str) -> None:
    """Near and far keys are then rotated alike, through two parts of one softmax: caps, sinks, masks of each family."""
    model = sharp_model(model_type)
    config = model.config.get_text_config(decoder=True)
    if window_of_all_layers(config):
        config.sliding_window = 4096
    plain = logits(model, IDS)
    patch_in_attention(model, "self_extend", 4, group=1, window=8, **REQUEST)
    torch.testing.assert_close(logits(model, IDS), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(t, marks=() if t in OTHER_ROUNDING else pytest.mark.slow) for t in EXTENDED],
)
def test_in_bfloat16_short_texts_are_the_plain_model_to_the_bit(model_type: str) -> None:
    model = sharp_model(model_type)
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.to(torch.bfloat16)
    for name, value in frequencies.items():  # as from_pretrained(dtype=...) leaves them
        owner, _, buffer = name.rpartition(".")
        model.get_submodule(owner)._buffers[buffer] = value
    plain = logits(model, IDS[:, :ORIGINAL])
    patch_in_attention(model, "dynamic_yarn", 4, stage=32, **REQUEST)
    assert torch.equal(logits(model, IDS[:, :ORIGINAL]), plain)
    attentions = [attention_of(module) for module in model.modules()]
    assert {attention.rotation for attention in attentions if attention} == {
        Rotation(neighbours=model_type in NEIGHBOURS)
    }


@pytest.mark.parametrize("method", ["dynamic_yarn", "self_extend"])
@pytest.mark.parametrize("model_type", [t for t in rotary_types() if attention_capabilities().get(t)])
def test_refused_with_the_reason_and_untouched(model_type: str, method: str) -> None:
    model = tiny_model(model_type)
    before, plain = state(model), logits(model, IDS)
    refusal = attention_capabilities()[model_type]
    assert refusal is not None
    with pytest.raises(UnsupportedModelError, match=re.escape(str(refusal.error(method)))) as caught:
        patch_in_attention(model, method, 4, **REQUEST)
    assert (caught.value.method, caught.value.code) == (method, refusal.code)
    assert str(caught.value).endswith(" Static rules such as 'yarn' may be.")
    assert not any(attention_of(module) for module in model.modules())
    assert_same_state(state(model), before)
    assert torch.equal(logits(model, IDS), plain)


def test_the_table_is_true_for_every_type() -> None:
    extended = [model_type for model_type in tabled_types() if capabilities()[model_type] is None]
    found = {model_type: refusal_of(error_not_in_attention(model_type)) for model_type in extended}
    assert found == known_here(attention_capabilities())
    assert len([reason for reason in attention_capabilities().values() if reason is None]) > 80


def test_a_family_that_turns_in_a_way_of_its_own_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the code says is not all: the norms of HunYuan come after, which only numbers of trained norms show."""
    from hf_posenc.attention import installation

    model = tiny_model("hunyuan_v1_dense")
    for name, parameter in model.named_parameters():
        if "layernorm" in name and "self_attn" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    plain = logits(model, IDS)
    monkeypatch.setattr(installation, "family_of", lambda model_type: Family())
    with pytest.raises(RotaryMismatchError, match="rotate queries"):
        patch_in_attention(model, "dynamic_yarn", 4, **REQUEST)
    assert torch.equal(logits(model, IDS), plain)
    with pytest.raises(ValueError, match="rotates queries"):
        patch_in_attention(tiny_model("nanochat"), "dynamic_yarn", 4, **REQUEST)


def cohere_whose_last_layer_has_no_positions() -> PreTrainedModel:
    """Cohere 2 MoE: the first layer reads everything and rotates, the second is in a window, the third has none."""
    given = tiny_config(config_class_of("cohere2_moe")).to_dict()
    layer_types = ["full_attention", "sliding_attention", "full_attention"]
    layers = {"num_hidden_layers": 3, "layer_types": layer_types, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    return sharpened(AutoModelForCausalLM.from_config(config_class_of("cohere2_moe")(**{**given, **layers})).eval())


@torch.no_grad()
def test_layers_without_positions_stay_so() -> None:
    """A YaRN stage that rotates as one of Transformers' own models: there too, what has no positions keeps none."""
    request: dict[str, Any] = {**REQUEST, "original_max_position_embeddings": 1, "beta_fast": 0.05, "beta_slow": 0.005}
    model, ids = cohere_whose_last_layer_has_no_positions(), IDS[:, :100]
    model.config.sliding_window = 4096
    reference = native(model, "yarn", 100, **request)
    plain = logits(model, ids)
    patch_in_attention(model, "dynamic_yarn", 100, stage=99, **request)
    for layer in (model.model.layers[1], reference.model.layers[1]):  # Transformers scales what is in a window too
        layer.self_attn.register_forward_hook(lambda module, args, output: (0 * output[0], *output[1:]))
    assert (logits(reference, ids) - plain).abs().max() > 1e-3
    torch.testing.assert_close(logits(model, ids), logits(reference, ids), atol=1e-5, rtol=0)


def test_a_later_layer_that_does_not_turn_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_posenc.attention import installation

    model = cohere_whose_last_layer_has_no_positions()
    plain = logits(model, IDS)
    monkeypatch.setattr(installation, "layer_kind", lambda module, config: FULL)
    with pytest.raises(RotaryMismatchError, match="rotate queries"):
        patch_in_attention(model, "dynamic_yarn", 4, **REQUEST)
    assert torch.equal(logits(model, IDS), plain)


def test_layers_that_are_not_given_positions_do_not_recompute_them_wrongly() -> None:
    """Granite's hybrid tells its rotary module alone, so a layer that runs once more in backward cannot know."""
    model = patch_in_attention(sharp_model("granitemoehybrid"), "dynamic_yarn", 4, stage=32, **REQUEST).train()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    loss = model(IDS, labels=IDS, use_cache=False).loss
    with pytest.raises(ValueError, match=r"torch\.compile"):
        loss.backward()
