"""Call patterns around hf_posenc's attention where keys could be rotated wrongly without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

from attention_models import IDS, in_chunks, sharp_model
from hf_posenc import RotaryMismatchError, patch_model, verify_model
from hf_posenc.attention import rotating_attention
from hf_posenc.attention.interface import attention_of
from hf_posenc.attention.rotation import RotatedKeys
from tiny_models import logits, make_model

RULES: dict[str, dict[str, Any]] = {
    "dynamic_yarn": {"stage": 32},
    "self_extend": {"group": 5, "window": 24},
    "dca": {"chunk_size": 48, "local_window": 8},
    "rerope": {"window": 24},
    "leaky_rerope": {"window": 24},
}
SHORT = IDS[:, :150]


def patched_model(rule: str = "dynamic_yarn", **options: Any) -> PreTrainedModel:
    return patch_model(sharp_model("Llama"), rule, 8, **RULES[rule], **options)


@pytest.mark.parametrize("rule", RULES)
def test_inference_mode(rule: str) -> None:
    model = patched_model(rule)
    expected = logits(model, SHORT)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        first = model(SHORT[:, :100], past_key_values=cache).logits
    with torch.inference_mode():
        rest = [model(SHORT[:, i : i + 1], past_key_values=cache).logits for i in range(100, 150)]
        whole = in_chunks(model, SHORT, [60, 1])
    torch.testing.assert_close(torch.cat([first, *rest], 1).clone(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(whole.clone(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_log_n_in_a_compiled_step(rule: str) -> None:
    model = patched_model(rule, log_n=True)
    expected = logits(model, SHORT[:, :130])
    cache = StaticCache(config=model.config, max_cache_len=192)
    in_chunks(model, SHORT[:, :120], [120], cache)
    step = torch.compile(model.forward, backend="eager")
    with torch.no_grad():
        for i in range(120, 130):
            output = step(SHORT[:, i : i + 1], past_key_values=cache, position_ids=torch.tensor([[i]])).logits
            torch.testing.assert_close(output, expected[:, i : i + 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_padding_between_tokens_is_not_seen(rule: str) -> None:
    model = patched_model(rule)
    mask = torch.ones_like(SHORT)
    mask[:, 50:60] = 0
    other = SHORT.clone()
    other[:, 50:60] = 7
    with torch.no_grad():
        one, two = (model(ids, attention_mask=mask, use_cache=False).logits for ids in (SHORT, other))
    assert torch.equal(one[:, 60:], two[:, 60:])
    assert not torch.equal(one[:, 50:60], two[:, 50:60])


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("rule", RULES)
def test_a_mask_of_ones_own(rule: str, kind: str) -> None:
    model = patched_model(rule)
    expected = logits(model, SHORT)
    allowed = torch.ones(150, 150).tril().bool()[None, None]
    mask = allowed if kind == "bool" else torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        torch.testing.assert_close(
            model(SHORT, attention_mask=mask, use_cache=False).logits, expected, atol=1e-5, rtol=0
        )
        blind = allowed.clone()
        blind[..., :10] = False  # the first rows see nothing
        assert model(SHORT, attention_mask=blind, use_cache=False).logits[:, 10:].isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_a_mask_of_ones_own_with_a_static_cache(rule: str) -> None:
    model = patched_model(rule)
    cache = StaticCache(config=model.config, max_cache_len=256)
    allowed = torch.ones(150, 256).tril().bool()[None, None]
    with torch.no_grad():
        parts = [
            model(
                SHORT[:, a:b],
                attention_mask=allowed[:, :, a:b],
                past_key_values=cache,
                position_ids=torch.arange(a, b)[None],
            )
            for a, b in ((0, 100), (100, 150))
        ]
    found = torch.cat([part.logits for part in parts], dim=1)
    torch.testing.assert_close(found, logits(model, SHORT), atol=1e-5, rtol=0)


def test_positions_changed_in_place_are_read_again() -> None:
    model = patched_model()
    positions = torch.arange(150)[None]
    forward = torch.compile(model.forward, backend="eager")
    with torch.no_grad():
        forward(SHORT, position_ids=positions, use_cache=False)
        positions.copy_(torch.cat([torch.arange(90), torch.arange(60)])[None])
        again = forward(SHORT, position_ids=positions, use_cache=False).logits
        expected = model(SHORT, position_ids=positions.clone(), use_cache=False).logits
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=0)


class TestRefusals:
    def test_prefix_tuning(self) -> None:
        tuned = get_peft_model(make_model("Llama"), PrefixTuningConfig(num_virtual_tokens=8, task_type="CAUSAL_LM"))
        with pytest.raises(ValueError, match="prefix tuning"):
            patch_model(tuned, "dynamic_yarn", 4)

    def test_attention_that_looks_ahead(self) -> None:
        model = make_model("Llama")
        model.config.is_causal = False
        with pytest.raises(ValueError, match="attention looks"):
            patch_model(model, "dynamic_yarn", 4)

    def test_packed_documents_with_flash_attention(self) -> None:
        model = patched_model()
        attention_of(model.model.layers[0].self_attn).inner = "flash_attention_2"
        model.config._attn_implementation = "hf_posenc_flash_attention_2"
        positions = torch.cat([torch.arange(90), torch.arange(60)])[None]
        with pytest.raises(ValueError, match=r"FlashAttention.*position_ids"):
            model(SHORT, position_ids=positions, use_cache=False)

    def test_frequencies_or_hooks_that_are_gone(self) -> None:
        model = patched_model()
        attention = attention_of(model.model.layers[0].self_attn)
        attention.plain.mul_(2)
        with pytest.raises(RotaryMismatchError, match="the frequencies"):
            verify_model(model)
        attention.plain.div_(2)
        verify_model(model)
        model.model._forward_pre_hooks.clear()
        with pytest.raises(RotaryMismatchError, match="the decoder"):
            verify_model(model)


def test_tables_of_a_long_text_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage has tables of all keys before its end, together quadratic in the length: a few are kept for layers."""
    model, ids, kept = patched_model(), IDS[:, :400], []

    def look(module: Any, args: Any, output: Any) -> None:
        tables = attention_of(module).forwards[-1].tables
        kept.append(sum(cos.numel() for cos, _ in tables.values()))

    model.model.layers[-1].self_attn.register_forward_hook(look)
    expected, size = logits(model, ids), 400 * model.config.head_dim  # of a table of all keys
    monkeypatch.setattr(rotating_attention, "KEPT_COSINES", 2 * size)
    assert torch.equal(logits(model, ids), expected)
    unbounded, bounded = kept
    assert unbounded > 5 * size
    assert size < bounded <= 2 * size


@torch.no_grad()
@pytest.mark.parametrize("rule", ["dynamic_yarn", "dca"])
def test_autocast_where_queries_are_of_another_dtype_than_values(rule: str) -> None:
    """Qwen3's norms give float32 queries and keys beside bfloat16 values, as in training; sdpa itself casts them."""
    model = patch_model(sharp_model("Qwen3"), rule, 8, **RULES[rule])
    exact = logits(model, SHORT)
    with torch.autocast("cpu", torch.bfloat16):
        whole = logits(model, SHORT)
        pieces = in_chunks(model, SHORT, [90, 30, 1, 29])
    for found in (whole, pieces):
        error = (found.float() - exact).abs()
        assert 0 < error.mean() < 0.01


def test_rotated_keys_are_made_anew_for_other_positions() -> None:
    """Of one stage and of the very same keys; the positions of slot 0 differ after padding was cut, say."""
    layer = DynamicLayer()
    keys, _ = layer.update(torch.randn(1, 1, 4, 2), torch.randn(1, 1, 4, 2))
    beside = RotatedKeys()
    for begin in (0, 0, 3, 0):
        made = beside.at(layer, keys, ((1,), (begin,)), 4, lambda part, at, end, by=begin: part + at + by)
        assert torch.equal(made, keys + begin)
    other = beside.at(layer, keys, ((2,), (0,)), 4, lambda part, at, end: part * 2)
    assert torch.equal(other, keys * 2)
