"""Shifted sparse attention: what each head sees, against masks made by hand; nothing ahead; nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, masking_utils
from transformers.models.llama import modeling_llama

from attention_models import IDS, sharp_model
from groups_by_hand import as_mask, ids_of, positions_of, seen_by_hand
from hf_posenc import patch_model
from hf_posenc.attention import shifted
from hf_posenc.attention.shifted import shifted_sparse_attention
from model_types import tiny_model
from tiny_models import assert_same_state, logits, recompute_activations, state

FAMILIES = ("Llama", "Qwen2", "Phi3", "GPTNeoX", "Mixtral")
DOCUMENTS = [[17, 24], [30, 11], [1, 2, 38]]  # of three rows of 41 tokens


def attention_by_hand(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor) -> Any:
    """The first attention layer of a Llama in float64, with a mask for every head."""
    layer, (batch, length) = model.model.layers[0].self_attn, ids.shape
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)).double()
    q, k, v = (
        (hidden @ projection.weight.double().T).view(batch, length, -1, layer.head_dim).transpose(1, 2)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], 1) for states in (k, v))
    inv_freq = 1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angle = (positions[..., None] * inv_freq)[:, None]
    q, k = (torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle) for x in (q, k))
    scores = (q @ k.conj().transpose(2, 3)).real * layer.scaling
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(batch, length, -1) @ layer.o_proj.weight.double().T


def first_attention(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: found.append(output[0]))
    model(**inputs, use_cache=False)
    hook.remove()
    return found[0].double()


@torch.no_grad()
@pytest.mark.parametrize(
    ("heads", "attention"),
    [((4, 2), "sdpa"), ((4, 4), "eager"), ((9, 3), "sdpa"), ((9, 3), "eager"), ((6, 1), "eager"), ((5, 5), "sdpa")],
    ids=str,
)
def test_what_each_head_sees_in_float64(heads: tuple[int, int], attention: str) -> None:
    model = sharp_model(
        "Llama",
        num_hidden_layers=1,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        hidden_size=heads[0] * 16,
        attn_implementation=attention,
    )
    for rows in ([[1]], [[2], [2]], [[13]], [[32]], [[64]], DOCUMENTS, [[5] * 12 + [4]]):
        ids, positions = ids_of(rows), positions_of(rows)
        for group in (2, 5, 16, 40):
            with shifted_sparse_attention(model, group):
                found = first_attention(model.train(), input_ids=ids, position_ids=positions)
            expected = attention_by_hand(model, ids, positions, seen_by_hand(rows, group, heads[0]))
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5, msg=f"{rows} {group}")


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_is_not_seen(attention: str) -> None:
    """At the left, at the right, and between tokens; groups are counted in slots of the batch."""
    model = sharp_model("Llama", num_hidden_layers=1, attn_implementation=attention)
    real = torch.ones(3, 41, dtype=torch.long)
    real[0, :9], real[1, 30:], real[2, 11:20] = 0, 0, 0
    ids, positions = ids_of([[41]] * 3), torch.arange(41).expand(3, -1)
    with shifted_sparse_attention(model, 7):
        found = first_attention(model.train(), input_ids=ids, attention_mask=real, position_ids=positions)
    seen = seen_by_hand([[41]] * 3, 7, 4) & real[:, None, None].bool()
    expected = attention_by_hand(model, ids, positions, seen | torch.eye(41).bool())
    torch.testing.assert_close(found[real == 1], expected[real == 1], atol=2e-6, rtol=1e-5)
    assert found.isfinite().all()


def gradients(model: PreTrainedModel, ids: torch.Tensor, **inputs: Any) -> dict[str, torch.Tensor]:
    """Logits, and the gradient of a loss with respect to every weight."""
    model.zero_grad()
    output = model(ids, use_cache=False, **inputs).logits
    torch.nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.detach(), **grads}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_group_is_full_attention(family: str, attention: str) -> None:
    model = sharp_model(family, attn_implementation=attention).train()
    for rows, group in (([[41], [41]], 41), ([[41]], 1000), (DOCUMENTS, 64)):
        inputs = {"ids": ids_of(rows), "position_ids": positions_of(rows)}
        expected = gradients(model, **inputs)
        with shifted_sparse_attention(model, group):
            found = gradients(model, **inputs)
        assert found.keys() == expected.keys()
        assert len(found) > 10
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_several_groups_is_one_with_masks_by_hand(family: str, attention: str) -> None:
    """Extended by a static rule, two layers, packed documents: logits and gradients."""
    model = patch_model(sharp_model(family, attn_implementation=attention), "yarn", 4).train()
    inputs = {"ids": ids_of(DOCUMENTS), "position_ids": positions_of(DOCUMENTS)}
    expected = gradients(model, **inputs, attention_mask=as_mask(seen_by_hand(DOCUMENTS, 10, 4), attention))
    with shifted_sparse_attention(model, 10):
        found = gradients(model, **inputs)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert (found["logits"] - gradients(model, **inputs)["logits"]).abs().max() > 0.1


def assert_nothing_ahead_is_felt(model: PreTrainedModel, length: int) -> None:
    """The gradient of each token's logits with respect to the embeddings of later tokens is exactly zero."""
    embeddings = model.get_input_embeddings()(IDS[:, :length]).detach().requires_grad_()
    output = model(inputs_embeds=embeddings, use_cache=False).logits[0]
    for i in range(length):
        (gradient,) = torch.autograd.grad(output[i].square().sum(), embeddings, retain_graph=True)
        assert gradient[0, i].abs().max() > 0
        assert gradient[0, i + 1 :].abs().sum() == 0, f"token {i} feels what comes after it"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_ahead_is_felt(attention: str) -> None:
    model = sharp_model("Llama", attn_implementation=attention).train()
    for length, group in ((24, 8), (17, 7), (7, 2)):
        with shifted_sparse_attention(model, group):
            assert_nothing_ahead_is_felt(model, length)


def with_wrap(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Groups of 8 as LongLoRA's code has them: the last half-group of the shifted heads is rolled to the first."""
    heads, half, group = query.shape[1], query.shape[1] // 2, 8
    key, value = (states.repeat_interleave(heads // key.shape[1], 1) for states in (key, value))

    def rolled(states: torch.Tensor, by: int) -> torch.Tensor:
        return torch.cat([states[:, :half], states[:, half:].roll(by, 2)], 1)

    rows = [rolled(s, -group // 2).unflatten(2, (-1, group)).transpose(1, 2) for s in (query, key, value)]
    output = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True)
    return rolled(output.transpose(1, 2).flatten(2, 3), group // 2).transpose(1, 2), None


def test_the_authors_wrap_would_be_found() -> None:
    AttentionInterface.register("with_wrap", with_wrap)
    model = sharp_model("Llama", attn_implementation="with_wrap").train()
    with pytest.raises(AssertionError, match="token 0 feels what comes after it"):
        assert_nothing_ahead_is_felt(model, 32)
    ids = IDS[:, :32]
    with shifted_sparse_attention(plain := sharp_model("Llama").train(), 8):
        ours = plain(ids, use_cache=False).logits
    wrapped = model(ids, use_cache=False).logits
    assert (ours - wrapped)[:, :4].abs().max() > 1e-3  # of the first half-group, and of those that see it


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_gradient_checkpointing(family: str) -> None:
    model = sharp_model(family).train()
    inputs = {"ids": ids_of(DOCUMENTS), "position_ids": positions_of(DOCUMENTS)}
    with shifted_sparse_attention(model, 10):
        expected = gradients(model, **inputs)
        recompute_activations(model, use_reentrant=False)
        found = gradients(model, **inputs)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bfloat16(attention: str, autocast: bool) -> None:
    model = sharp_model("Llama", torch.float32 if autocast else torch.bfloat16, attn_implementation=attention).train()
    inputs = {"input_ids": ids_of(DOCUMENTS), "position_ids": positions_of(DOCUMENTS), "use_cache": False}
    mask = as_mask(seen_by_hand(DOCUMENTS, 10, 4), attention, model.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(**inputs, attention_mask=mask).logits.float()
        full = model(**inputs).logits.float()
        with shifted_sparse_attention(model, 10):
            found = model(**inputs).logits.float()
    assert (found - expected).abs().max() < 0.05
    assert (found - full).abs().max() > 0.3


def test_adapters() -> None:
    adapted = get_peft_model(
        sharp_model("Llama"), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    base = adapted.get_base_model()
    adapted.train()
    inputs = {"ids": ids_of(DOCUMENTS), "position_ids": positions_of(DOCUMENTS)}
    expected = gradients(adapted, **inputs, attention_mask=seen_by_hand(DOCUMENTS, 10, 4))
    with shifted_sparse_attention(adapted, 10):
        found = gradients(adapted, **inputs)
        assert base.config._attn_implementation != "sdpa"
    assert base.config._attn_implementation == "sdpa"
    assert any("lora_A" in name for name in found)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_no_call_is_longer_than_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the text, and whatever documents it holds; and few calls, however many documents."""
    calls: list[tuple[int, Any]] = []

    def spied(name: str, module: Any) -> Callable[..., Any]:
        def attend(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append((query.shape[0] * query.shape[2] ** 2, args[2]))
            assert query.shape[2] <= 16
            return inner(module, query, *args, **kwargs)

        inner = inner_attention(name, module)
        return attend

    inner_attention = shifted.inner_attention
    monkeypatch.setattr(shifted, "inner_attention", spied)
    model = sharp_model("Llama", num_hidden_layers=1).train()
    for rows in ([[128]], [[64, 64], [100, 28]], [[*range(1, 15), 23]]):
        with shifted_sparse_attention(model, 16):
            calls.clear()
            model(ids_of(rows), position_ids=positions_of(rows), use_cache=False)
        assert all(mask is None for _, mask in calls)
        assert len(calls) <= 2 * 5  # widths 16, 8, 4, 2, 1, for either half of the heads
        pairs = sum(size for size, _ in calls)
        assert pairs <= 2 * 1.25 * len(rows) * 128 * 16


def test_layers_with_a_window_are_left_alone() -> None:
    model = sharp_model("Gemma2", attn_implementation="eager").train()
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    ids = IDS[:, :60]
    found: dict[str, list[torch.Tensor]] = {"0": [], "1": []}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda m, args, output, key=str(index): found[key].append(output[0]))
    with torch.no_grad():
        model(ids, use_cache=False)
        with shifted_sparse_attention(model, 8) as shift:
            assert shift.grouped == {1}
            for outputs in found.values():
                del outputs[1:]  # of trying it out
            model(ids, use_cache=False)
    assert torch.equal(*found["0"])
    assert (found["1"][0] - found["1"][1])[:, 8:].abs().max() > 1e-2


@torch.no_grad()
def test_evaluation_is_full_attention() -> None:
    model = patch_model(sharp_model("Llama"), "yarn", 4)
    ids, real = IDS[:, :50], torch.ones(1, 50, dtype=torch.long)
    real[:, :7] = 0
    expected, padded = logits(model, ids), model(ids, attention_mask=real, use_cache=False).logits
    written = model.generate(ids, max_new_tokens=4, do_sample=False)
    with shifted_sparse_attention(model.train(), 8):
        assert (logits(model, ids) - expected).abs().max() > 0.1
        model.eval()
        assert torch.equal(logits(model, ids), expected)
        assert torch.equal(model(ids, attention_mask=real, use_cache=False).logits, padded)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), written)


def traces(model: PreTrainedModel) -> list[str]:
    names = [name for module in model.modules() for name in vars(module) if "hf_posenc_shift" in name]
    return [*names, *(c._attn_implementation for c in (model.config, model.model.config))]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_remains(fails: bool, tmp_path: Path) -> None:
    model = sharp_model("Llama").train()
    model.save_pretrained(tmp_path)  # says what class it is
    before, said = state(model), json.dumps(model.config.to_dict(), default=str)
    try:
        with shifted_sparse_attention(model, 8):
            assert len(traces(model)) > 2
            model.save_pretrained(tmp_path)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert traces(model) == ["sdpa", "sdpa"]
    assert model.training
    assert_same_state(state(model), before)
    assert json.dumps(model.config.to_dict(), default=str) == said
    assert "shifted" not in (tmp_path / "config.json").read_text()
    with shifted_sparse_attention(model, 4):  # and again
        model(IDS[:, :20], use_cache=False).logits.sum().backward()


def refused(model: Any, message: str, group: Any = 8) -> None:
    said = [str(each) for each in traces(model)] if hasattr(model, "model") else []
    with pytest.raises((TypeError, ValueError), match=message), shifted_sparse_attention(model, group):
        pass
    assert said == ([str(each) for each in traces(model)] if hasattr(model, "model") else [])


@pytest.mark.parametrize(
    ("group", "message"),
    [(1, "at least 2 tokens, got 1"), (-4, "at least 2 tokens"), (2.5, "whole number"), (True, "whole number")],
)
def test_groups_that_are_none(group: Any, message: str) -> None:
    refused(sharp_model("Llama"), message, group)


@pytest.mark.parametrize("method", ["dynamic_yarn", "self_extend", "dca", "rerope"])
def test_rules_of_the_attention_are_refused(method: str) -> None:
    refused(patch_model(sharp_model("Llama"), method, 4), "rules of its own .* a static rule such as 'yarn'")


def test_models_that_are_refused() -> None:
    refused(sharp_model("Mistral", sliding_window=32), "every layer has a sliding window")
    refused(sharp_model("Llama", num_attention_heads=1, num_key_value_heads=1), "one attention head")
    refused(sharp_model("Llama", attn_implementation="flex_attention"), "'flex_attention'; load it with .*'sdpa'")
    model = sharp_model("Llama")
    with shifted_sparse_attention(model, 8):
        refused(model, "it is on already")


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("falcon", "its attention does not go through Transformers' AttentionInterface"),
        ("gpt_oss", "its attention has sinks"),
        ("deepseek_v32", "its layers do something of their own"),
    ],
)
def test_families_that_are_refused(model_type: str, message: str) -> None:
    refused(tiny_model(model_type), f"'{model_type}': {message}")


def test_what_cannot_be_grouped_is_refused_while_training() -> None:
    model = sharp_model("Llama").train()
    ids = IDS[:, :12]
    with shifted_sparse_attention(model, 4):
        with pytest.raises(ValueError, match="model's own"):
            model(ids, attention_mask=torch.ones(12, 12).tril().bool()[None, None], use_cache=False)
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"12.*24.*use_cache=False"):
            model(ids, past_key_values=cache)


def test_a_window_that_no_config_tells_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp_model("Llama").train()

    def windowed(config: Any, **kwargs: Any) -> Any:
        config.sliding_window = 3
        return masking_utils.create_sliding_window_causal_mask(config, **kwargs)

    with shifted_sparse_attention(model, 4):
        monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed)
        with pytest.raises(ValueError, match="looks ahead"):
            model(IDS[:, :12], use_cache=False)
