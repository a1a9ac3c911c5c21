"""Each kernel of attention to spans of keys, against float64 by hand: outputs, gradients, masks, sinks, documents."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from gpu.exact import in_float64
from torch.nn.attention.flex_attention import flex_attention

from attention_models import IDS, left_padded, sharp_model
from distance_rules import RULES, by_hand, patched_model
from hf_posenc import patch_model, verify_model
from hf_posenc.attention import spans as attention_spans
from hf_posenc.attention import tiles
from hf_posenc.attention.merging import merged
from hf_posenc.attention.spans import Extras, Spans, attend_to_spans, why_not_flex
from hf_posenc.attention.tiles import attend_to_all_before
from tiny_models import logits, token_ids

N = 331  # a multiple of no chunk, window, group or block
UNCOMPILED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def use_kernel(name: str, monkeypatch: Any) -> None:
    """Attend by one kernel: tiles, PyTorch without its flash kernel for CPUs, FlexAttention's own reference."""
    if name != "tiles":
        monkeypatch.setattr(tiles, "_FLASH", None)
    if name == "flex":

        def uncompiled(query: Any, keys: Any, value: Any, training: bool, **kwargs: Any) -> Any:
            return flex_attention(query, keys, value, **kwargs)

        monkeypatch.setattr(attention_spans, "why_not_flex", lambda *args: None)
        monkeypatch.setattr(attention_spans, "compile_friendly_flex_attention", uncompiled)


def output_of_first_layer(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: found.append(output[0]))
    model(ids, use_cache=False)
    hook.remove()
    return found[0][0].double()


@UNCOMPILED
@torch.no_grad()
@pytest.mark.parametrize("name", ["tiles", "PyTorch", "flex"])
@pytest.mark.parametrize("rule", RULES)
def test_outputs_are_those_of_the_definition(rule: str, name: str, monkeypatch: Any) -> None:
    use_kernel(name, monkeypatch)
    model, ids = patched_model(rule), IDS[:, :N]
    torch.testing.assert_close(output_of_first_layer(model, ids), by_hand(model, ids, rule), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["tiles", "PyTorch"])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_the_definition(rule: str, name: str, monkeypatch: Any) -> None:
    """FlexAttention has none on a CPU; tests/gpu compares them there."""
    use_kernel(name, monkeypatch)
    model, ids = patched_model(rule).train(), IDS[:, :N]
    layer = model.model.layers[0].self_attn
    weights = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
    expected = by_hand(model, ids, rule)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).double()
    exact = torch.autograd.grad((expected * direction).sum(), weights)
    found = torch.autograd.grad((output_of_first_layer(model, ids) * direction).sum(), weights)
    for each, of_definition in zip(found, exact, strict=True):
        torch.testing.assert_close(each, of_definition, atol=1e-5 * float(of_definition.abs().max()), rtol=1e-5)


def states(rows: int = 1, heads: int = 4, kv_heads: int = 2, queries: int = N, keys: int = N) -> Any:
    torch.manual_seed(0)
    shapes = ((rows, heads, queries, 16), (rows, kv_heads, keys, 16), (rows, kv_heads, keys, 16))
    return tuple(torch.randn(shape, dtype=torch.float64).float() for shape in shapes)


def exact(query: Any, keys: Any, value: Any, seen: torch.Tensor, softcap: float | None, sinks: Any) -> torch.Tensor:
    """Attention in float64 with all scores, ``(batch, heads, num_queries, head_dim)``."""
    groups = query.shape[1] // keys.shape[1]
    keys, value = (each.double().repeat_interleave(groups, 1) for each in (keys, value))
    scores = query.double() @ keys.transpose(2, 3) * 0.25
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return scores.softmax(-1)[..., : keys.shape[2]] @ value


@UNCOMPILED
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("extra", "name"),
    [
        *((extra, name) for extra in ("none", "softcap", "sinks", "dense", "gaps") for name in ("PyTorch", "flex")),
        ("added mask", "PyTorch"),  # FlexAttention is not used there
    ],
)
def test_extras(extra: str, rows: int, name: str, monkeypatch: Any) -> None:
    use_kernel(name, monkeypatch)
    query, keys, value = states(rows)
    position = torch.arange(N)[None].expand(rows, -1)
    border = (position - torch.tensor([[40], [90]])[:rows]).clamp(min=0)
    real = torch.ones(rows, N, dtype=torch.bool)
    seen = torch.ones(N, N).tril().bool().expand(rows, 1, N, N).clone()
    softcap, sinks, dense = None, None, None
    if extra == "softcap":
        softcap = 0.7
    elif extra == "sinks":
        sinks = torch.tensor([2.0, -1.0, 0.5, 3.0])
    elif extra == "gaps":
        real[:, 100:120], real[-1, 250:300] = False, False
        seen &= real[:, None, None]
    elif extra in ("dense", "added mask"):
        dense = torch.rand(rows, 1, N, N) < 0.5
        dense |= torch.eye(N).bool()
        seen &= dense
    given = torch.zeros(dense.shape).masked_fill(~dense, -1e9) if extra == "added mask" and dense is not None else dense
    gaps = real if extra == "gaps" else None
    spans = [Spans(border, position + 1, gaps), Spans(torch.zeros_like(border), border, gaps)]
    extras = Extras(softcap, given, sinks)
    found = attend_to_spans([query] * 2, [keys] * 2, value, spans, 0.25, extras, "sdpa").transpose(1, 2)
    expected = exact(query, keys, value, seen, softcap, sinks)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_gaps", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(N, N), (300, 900), (128, 512), (1, 700)])
def test_the_block_mask_is_the_dense_mask(queries: int, keys: int, with_gaps: bool) -> None:
    position = torch.arange(keys)[None, -queries:].repeat(2, 1)
    begins, ends = (position - 150).clamp(min=0) // 7 * 7, position + 1 - position % 3
    begins[1], ends[1] = 0, (position[1] - 149).clamp(min=0)  # some queries of it see no key
    real = torch.rand(2, keys, generator=torch.Generator().manual_seed(1)) < 0.99 if with_gaps else None
    if real is not None:
        real[:, :260] = True  # blocks that are wholly real, too
    mask = Spans(begins, ends, real).block_mask(2, keys, torch.device("cpu"), None)
    slots = torch.arange(keys)
    seen = (slots >= begins[..., None]) & (slots < ends[..., None])
    seen = seen if real is None else seen & real[:, None]
    rows, indices = torch.arange(2)[:, None, None], torch.arange(queries)[None, :, None]
    by_function = mask.mask_mod(rows, 0, indices, slots[None, None])
    found = torch.zeros_like(seen)
    partly = 0
    for row in range(2):
        for block in range(-(-queries // 128)):
            few = slice(128 * block, 128 * block + 128)
            for column in mask.kv_indices[row, 0, block, : mask.kv_num_blocks[row, 0, block]].tolist():
                here = slice(128 * column, 128 * column + 128)
                found[row, few, here] |= by_function[row, few, here]
                partly += 1
            for column in mask.full_kv_indices[row, 0, block, : mask.full_kv_num_blocks[row, 0, block]].tolist():
                found[row, few, 128 * column : 128 * column + 128] = True
    assert torch.equal(found, seen)
    every_block = 2 * -(-queries // 128) * -(-keys // 128)
    assert partly < every_block or queries == 1  # blocks that no query sees, and those that all see whole, are left out
    assert bool(mask.full_kv_num_blocks.any()) == (keys > N)


@UNCOMPILED
@torch.no_grad()
@pytest.mark.parametrize("name", ["tiles", "PyTorch", "flex"])
@pytest.mark.parametrize("rule", ["self_extend", "dca-sharpen"])
def test_padded_rows_and_packed_documents_are_each_alone(rule: str, name: str, monkeypatch: Any) -> None:
    model, rows = patched_model(rule), [token_ids(N), token_ids(200)]
    alone = [logits(model, row)[0] for row in rows]
    use_kernel(name, monkeypatch)
    ids, mask = left_padded(rows)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    positions = torch.cat([torch.arange(N), torch.arange(200)])[None]
    packed = model(torch.cat(rows, dim=1), position_ids=positions, use_cache=False).logits[0]
    for found, expected in zip((*padded, packed[:N], packed[N:]), (*alone, *alone), strict=True):
        torch.testing.assert_close(found[-len(expected) :], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("grouped", [True, False])
def test_queries_that_are_the_last_of_their_keys(grouped: bool) -> None:
    query, keys, value = states(2, kv_heads=2 if grouped else 4, queries=70)
    for each in (query, keys, value):
        each.requires_grad_()
    found = attend_to_all_before(query, keys, value, 0.25)
    assert found is not None
    expected = exact(query, keys, value, torch.ones(70, N).tril(N - 70).bool(), None, None).transpose(1, 2)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(expected.shape)
    gradients = torch.autograd.grad((found * direction).sum(), (query, keys, value))
    for each, of_exact in zip(
        gradients, torch.autograd.grad((expected * direction).sum(), (query, keys, value)), strict=True
    ):
        torch.testing.assert_close(each, of_exact, atol=1e-5, rtol=1e-5)


def test_a_query_that_sees_nothing_in_a_part_or_in_any() -> None:
    output = torch.tensor([[[[1.0], [0.0], [5.0]]], [[[3.0], [0.0], [0.0]]]])
    never = float("-inf")
    lse = torch.tensor([[[0.0, never, 1.0]], [[0.0, never, never]]])
    found, total = merged([(output[:1], lse[:1]), (output[1:], lse[1:])])
    assert found.flatten().tolist() == [2.0, 0.0, 5.0]
    torch.testing.assert_close(total.flatten()[::2], torch.tensor([2.0, torch.e]).log())


class _OnCuda:
    """What ``why_not_flex`` reads of queries on a GPU."""

    device, dtype, shape = torch.device("cuda"), torch.bfloat16, (1, 4, 200, 16)


def test_why_flex_attention_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    query: Any = _OnCuda()
    assert why_not_flex(query, Extras()) is None
    assert (
        why_not_flex(query, Extras(softcap=3.0, sinks=torch.zeros(4), dense=torch.ones(1, 1, 200, 200).bool())) is None
    )
    assert why_not_flex(torch.zeros(1, 4, 200, 16), Extras()) == "the device is cpu"
    assert not caplog.records
    attention_spans._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert why_not_flex(query, Extras(dropout=0.1)) == "it has no attention dropout"
    assert len(caplog.records) == 1
    assert why_not_flex(query, Extras(dense=torch.zeros(1, 1, 200, 200))) == "the attention mask is added to the logits"


@torch.no_grad()
def test_a_call_of_one_query_needs_no_mask(monkeypatch: Any) -> None:
    query, keys, value = states(queries=1)
    made: list[Any] = []
    monkeypatch.setattr(Spans, "on", lambda self, device: made.append(device))
    spans = [Spans(torch.tensor([[100]]), torch.tensor([[N]])), Spans(torch.tensor([[0]]), torch.tensor([[100]]))]
    found = attend_to_spans([query] * 2, [keys] * 2, value, spans, 0.25, Extras(), "sdpa").transpose(1, 2)
    expected = exact(query, keys, value, torch.ones(1, N).bool(), None, None)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert not made


@pytest.mark.parametrize("method", ["dynamic_yarn", "dynamic", "dca", "rerope"])
def test_a_model_in_float64_is_taken(method: str) -> None:
    """Its angles are float32, so its layers equal those of before by that dtype's rounding, not by float64's."""
    model = patch_model(in_float64(sharp_model("Llama")), method, 4)
    verify_model(model)
    assert logits(model, IDS[:, :200]).dtype == torch.float64
