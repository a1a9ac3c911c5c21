"""The encodings on every model type that our attention runs: the model's own RoPE again, a bias as a mask, caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, MllamaForCausalLM, PreTrainedModel

from attention_models import in_chunks
from encodings_by_hand import sinusoid, slope
from hf_posenc import RotaryMismatchError, load_extended, patch_model, save_extended, unpatch_model, verify_model
from hf_posenc.families.family_data import attention_capabilities
from hf_posenc.families.rotary_model import RotaryModel
from model_types import (
    NEIGHBOURS,
    REQUEST,
    config_class_of,
    patch_in_attention,
    rotary_types,
    sharp_model,
    sharpened,
    tiny_config,
    tiny_model,
)
from older_transformers import skip_if_left_out
from tiny_models import assert_same_state, logits, state, token_ids

IDS = token_ids(50)
EXTENDED_IN_ATTENTION = [t for t in rotary_types() if attention_capabilities().get(t, "") is None]
# Their layers are not given the positions of tokens, or the first one runs several times.
NOTHING_ADDED = {"cohere_compass_text", "granitemoehybrid", "hrm_text", "zaya"}
# Pairs of neighbours, a RoPE for each layer type, few layers of attention, two halves of values.
TELLING = NEIGHBOURS | NOTHING_ADDED | {"gemma3", "llama", "mimo_v2_flash", "qwen3_5", "diffllama", "minimax"}
MOST_SLOW = [pytest.param(t, marks=() if t in TELLING else pytest.mark.slow) for t in EXTENDED_IN_ATTENTION]


def with_one_base(model_type: str) -> PreTrainedModel:
    """A sharp model whose layer types, where each has a RoPE, rotate alike."""
    model = sharp_model(model_type)
    parameters = model.config.get_text_config(decoder=True).rope_parameters
    kinds = [settings for settings in parameters.values() if isinstance(settings, dict)]
    if not kinds:
        return model
    for settings in kinds:
        settings["rope_theta"] = 1e4
    return sharpened(tiny_model(model_type, model.config))


@pytest.mark.parametrize("model_type", MOST_SLOW)
def test_rope_is_the_models_own(model_type: str) -> None:
    model = with_one_base(model_type)
    before, plain = state(model), logits(model, IDS)
    patch_in_attention(model, "rope", 1, interleaved=model_type in NEIGHBOURS, **REQUEST)
    verify_model(model)
    torch.testing.assert_close(logits(model, IDS), plain, atol=2e-6, rtol=0)
    unpatch_model(model)
    assert_same_state(state(model), before)
    assert torch.equal(logits(model, IDS), plain)


@pytest.mark.parametrize("model_type", EXTENDED_IN_ATTENTION)
def test_alibi_is_a_mask_of_numbers_on_a_model_that_does_not_turn(model_type: str) -> None:
    model = sharp_model(model_type)
    expected = as_a_mask(sharp_model(model_type))
    assert (expected - logits(model, IDS)).abs().max() > 1e-3
    patch_in_attention(model, "alibi", 1, **REQUEST)
    full = logits(model, IDS)
    torch.testing.assert_close(full, expected, atol=2e-6, rtol=0)
    if model_type != "minimax":  # not exact with its cache without us either
        torch.testing.assert_close(in_chunks(model, IDS, [27, 1, 6]), full, atol=2e-6, rtol=0)


def test_a_window_cuts_off_the_bias_too() -> None:
    config = tiny_config(config_class_of("gemma2"))
    config.layer_types, config.sliding_window = ["sliding_attention"] * 2, 32
    model, reference = (sharpened(tiny_model("gemma2", config)) for _ in range(2))
    expected = as_a_mask(reference, window=32)
    assert (expected - as_a_mask(reference)).abs().max() > 1e-3
    with pytest.warns(UserWarning, match="each layer looks back 32 tokens"):
        patch_model(model, "alibi", **REQUEST)
    full = logits(model, IDS)
    torch.testing.assert_close(full, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(in_chunks(model, IDS, [27, 1, 6]), full, atol=2e-6, rtol=0)


def test_layers_without_positions_stay_so() -> None:
    """SmolLM3's last layer of two, as a mask that is causal and no more."""
    config = tiny_config(config_class_of("smollm3"))
    config.no_rope_layers = [1, 0]
    model, reference = (sharpened(tiny_model("smollm3", config)) for _ in range(2))
    with_bias = as_a_mask(reference)
    causal = torch.full((50, 50), torch.finfo(torch.float32).min).triu(1)[None, None]
    reference.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": causal}), with_kwargs=True
    )
    expected = as_a_mask(reference)
    assert (expected - with_bias).abs().max() > 1e-3
    patch_model(model, "alibi", **REQUEST)
    torch.testing.assert_close(logits(model, IDS), expected, atol=2e-6, rtol=0)


def test_layer_types_with_a_rope_each_are_all_stilled(tmp_path: Path) -> None:
    """Gemma 3: its windows must not keep their RoPE beside the bias, and get it back."""
    skip_if_left_out("gemma3_text")
    types = ["sliding_attention", "full_attention"]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma3TextConfig(vocab_size=128, head_dim=16, num_hidden_layers=2, layer_types=types, **sizes)
    config.rope_parameters["sliding_attention"] |= {"rope_type": "yarn", "factor": 4.0}  # with a temperature
    model = Gemma3ForCausalLM(config)
    before, plain, attributes = state(model), logits(model, IDS), dict(model.model.rotary_emb.rope_type)
    scaling = model.model.rotary_emb.sliding_attention_attention_scaling
    assert scaling != 1.0
    patch_model(model, "alibi", on_scaled="replace")
    frequencies = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    assert len(frequencies) == 4
    assert not any(buffer.any() for buffer in frequencies.values())
    assert model.model.rotary_emb.sliding_attention_attention_scaling == 1.0
    save_extended(model, tmp_path / "saved")
    assert torch.equal(logits(load_extended(tmp_path / "saved"), IDS), logits(model, IDS))
    with pytest.raises(KeyError, match=r"alibi .*hf_posenc\.load_extended"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    frequencies["model.rotary_emb.sliding_attention_inv_freq"][0] = 1e-3
    with pytest.raises(RotaryMismatchError, match=r"\(sliding_attention_inv_freq\)"):
        verify_model(model)
    unpatch_model(model)
    assert_same_state(before, state(model))
    assert torch.equal(logits(model, IDS), plain)
    rotary = model.model.rotary_emb
    assert (rotary.rope_type, rotary.sliding_attention_attention_scaling) == (attributes, scaling)


def test_layer_types_that_turn_otherwise_want_one_value() -> None:
    """Laguna: another base and another share of the head in its windows."""
    config = tiny_config(config_class_of("laguna"))
    config.layer_types = ["sliding_attention", "full_attention"]
    model = tiny_model("laguna", config)
    with pytest.raises(ValueError, match=r"rope_theta 10000\.0, 500000\.0,.*rope_theta"):
        patch_model(model, "rope")
    with pytest.raises(ValueError, match=r"partial_rotary_factor 0\.5, 1\.0,"):
        patch_model(model, "xpos", rope_theta=1e4)
    patch_model(model, "rope", rope_theta=1e4, partial_rotary_factor=0.5)
    ours = logits(model, IDS)
    unpatch_model(model)
    for settings in config.rope_parameters.values():
        settings |= {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    expected = tiny_model("laguna", config)
    expected.load_state_dict(model.state_dict())
    torch.testing.assert_close(ours, logits(expected, IDS), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("method", "options"), [("alibi", {}), ("rope", {}), ("dynamic_yarn", {"stage": 8})])
def test_images_that_a_text_attends_to_stand_nowhere_in_it(method: str, options: dict[str, Any]) -> None:
    """Mllama's cross-attention: neither rotated nor biased, so the order of an image's parts says nothing."""
    config = tiny_config(config_class_of("mllama")).get_text_config()
    config.cross_attention_layers = [1]
    torch.manual_seed(0)
    model = MllamaForCausalLM(config).eval()
    torch.nn.init.ones_(model.model.layers[1].cross_attn_attn_gate)
    image = torch.randn(1, 60, config.hidden_size)

    def read(seen: torch.Tensor) -> torch.Tensor:
        shown = {"cross_attention_mask": torch.zeros(1, 1, 50, 60), "cross_attention_states": seen}
        rows = torch.ones(1, 1, 50, 1)
        with torch.no_grad():
            return model(IDS[:1], **shown, full_text_row_masked_out_mask=rows, use_cache=False).logits

    plain = read(image)
    assert (plain - read(image * 2)).abs().max() > 1e-3
    patch_model(model, method, 1 if not options else 4, original_max_position_embeddings=16, **options)
    ours = read(image)
    torch.testing.assert_close(read(image.flip(1)), ours, atol=1e-6, rtol=0)
    if method == "rope":
        torch.testing.assert_close(ours, plain, atol=2e-6, rtol=0)
    else:
        assert (ours - plain).abs().max() > 1e-4


@pytest.mark.parametrize("model_type", MOST_SLOW)
def test_sinusoids_are_what_enters_the_first_layer(model_type: str) -> None:
    """By hand: the same embeddings and the table, into the model that does not rotate."""
    model = sharp_model(model_type)
    before, plain = state(model), logits(model, IDS)
    if model_type in NOTHING_ADDED:
        with pytest.raises((RotaryMismatchError, ValueError), match="'alibi'"):
            patch_in_attention(model, "sinusoidal", 1, **REQUEST)
        assert_same_state(state(model), before)
        assert torch.equal(logits(model, IDS), plain)
        return
    expected = with_sinusoids(sharp_model(model_type))
    patch_in_attention(model, "sinusoidal", 1, embedding_scale=0.05, **REQUEST)
    torch.testing.assert_close(logits(model, IDS), expected, atol=2e-6, rtol=0)


@torch.no_grad()
def with_sinusoids(model: PreTrainedModel) -> torch.Tensor:
    """Logits of a model that does not rotate, the table added where its first layer begins."""
    stilled(model)
    width = model.config.get_text_config(decoder=True).hidden_size
    table = torch.tensor([[0.05 * sinusoid(at, feature, width) for feature in range(width)] for at in range(50)])

    def add(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (args[0] + table, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + table}

    [rotary] = RotaryModel(model).rotary_modules
    decoder: Any = model.get_submodule(rotary.rpartition(".")[0])
    (decoder.blocks if hasattr(decoder, "blocks") else decoder.layers)[0].register_forward_pre_hook(
        add, with_kwargs=True
    )
    return logits(model, IDS)


def stilled(model: PreTrainedModel) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.zero_()


@torch.no_grad()
def as_a_mask(model: PreTrainedModel, window: int = 50) -> torch.Tensor:
    """Logits of Transformers' own attention, frequencies zero, with ALiBi in a mask of four dimensions."""
    stilled(model)
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    distance = torch.arange(50)[:, None] - torch.arange(50)
    slopes = torch.tensor([slope(head, heads) for head in range(heads)])[:, None, None]
    mask = torch.where((distance >= 0) & (distance < window), -slopes * distance, torch.finfo(torch.float32).min)[None]
    return model(IDS, attention_mask=mask, position_ids=torch.arange(50)[None], use_cache=False).logits
