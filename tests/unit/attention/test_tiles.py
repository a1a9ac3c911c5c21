"""The distance rules in calls of the flash kernel: what each call sees, its sizes, and when it is not taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_models import IDS, sharp_model
from distance_rules import RULES, by_hand, patched_model
from hf_posenc import patch_model
from hf_posenc.attention import installation, spans, tiles
from hf_posenc.attention.interface import attention_of
from hf_posenc.attention.pieces import Pieces
from hf_posenc.attention.regional import query_blocks, region_tiles
from tiny_models import logits, token_ids

N = 331  # a multiple of no chunk, window, group or block below
BLOCKS = [7, 24, 60, 256]  # shorter than the window of 24, as long, longer, and the default


@pytest.fixture
def calls(monkeypatch: Any) -> list[dict[str, Any]]:
    """What the calls of the kernel are about, but for those of patch_model's own check."""
    found: list[dict[str, Any]] = []

    def attend(query: Any, keys: Any, value: Any, scaling: Any, tile: Any) -> Any:
        found.append({"queries": query.shape[2], "keys": keys.shape[2], "tile": tile})
        return kernel(query, keys, value, scaling, tile)

    kernel = tiles._cpu_kernel
    monkeypatch.setattr(tiles, "_cpu_kernel", attend)
    monkeypatch.setattr(installation, "check_installed", lambda *args: None)
    return found


def by_the_reference(monkeypatch: Any) -> None:
    monkeypatch.setattr(Pieces, "can_tile", lambda self: False)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rule", ["self_extend", "dca"])
def test_each_pair_is_in_one_tile_of_its_region(rule: str, block: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("hf_posenc.attention.regional.BLOCK", block)
    distances = attention_of(patched_model(rule).model.layers[0].self_attn).distances
    for first, last in ((0, N), (11, 200), (163, 164), (95, 330)):
        blocks = list(query_blocks(distances, first, last))
        assert [q for low, high in blocks for q in range(low, high)] == list(range(first, last))
        for region in distances.regions:
            count = torch.zeros(last, last, dtype=torch.int64)
            for low, high in blocks:
                for keys in region_tiles(region, low, high):
                    seen = torch.ones(high - low, keys.end - keys.begin) if keys.seen is None else keys.seen
                    assert not keys.is_causal or (keys.begin, keys.end, keys.seen) == (low, high, None)
                    count[low:high, keys.begin : keys.end] += (seen.tril() if keys.is_causal else seen).long()
            for q in range(first, last):
                begin, end = int(region.begin(torch.tensor(q))), int(region.end(torch.tensor(q)))
                assert count[q].tolist() == [int(begin <= key < end) for key in range(last)]


@torch.no_grad()
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rule", RULES)
def test_tiles_give_the_definition(rule: str, block: int, monkeypatch: Any, calls: list[dict[str, Any]]) -> None:
    monkeypatch.setattr("hf_posenc.attention.regional.BLOCK", block)
    monkeypatch.delattr(spans, "_few")
    model, found = patched_model(rule), []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: found.append(output[0]))
    ids = IDS[:, :N]
    logits(model, ids)
    torch.testing.assert_close(found[0][0].double(), by_hand(model, ids, rule), atol=2e-6, rtol=1e-5)
    assert len(calls) > 2 * (N // 256)


def test_dca_needs_three_calls_a_chunk_and_no_mask(calls: list[dict[str, Any]]) -> None:
    logits(patched_model("dca"), IDS[:, :N])
    assert all(call["tile"].seen is None for call in calls)
    chunks = [40] * 8 + [11]
    expected = [(40, 40, True), (40, 40, False), (40, 40, True)]
    for number, size in enumerate(chunks[2:], start=2):  # the farthest keys first
        expected += [(size, 40 * (number - 1), False), (size, 40, False), (size, size, True)]
    assert [(call["queries"], call["keys"], call["tile"].is_causal) for call in calls] == 2 * expected  # two layers


class _Largest(TorchDispatchMode):
    """Keeps the elements of the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return output


@pytest.mark.parametrize("rule", ["self_extend", "dca", "rerope", "leaky_rerope"])
def test_nothing_is_length_by_length(rule: str, monkeypatch: Any) -> None:
    method, options = RULES[rule]
    options = {name: 16 * value if name != "leak" else value for name, value in options.items()}  # a window of 384
    model = patch_model(sharp_model("Llama", max_position_embeddings=1024), method, 8, **options).model
    length = 3001
    ids = token_ids(length)

    def largest() -> tuple[int, torch.Tensor]:
        with torch.no_grad(), _Largest() as seen:
            hidden = model(ids, use_cache=False).last_hidden_state
        return seen.numel, hidden

    def largest_of_training() -> int:
        with _Largest() as seen:
            model(ids, use_cache=False).last_hidden_state.sum().backward()
        return seen.numel

    tiled, found = largest()
    assert tiled < length**2 // 8
    assert largest_of_training() < length**2 // 8
    by_the_reference(monkeypatch)
    in_pytorch, expected = largest()
    assert in_pytorch > length**2 // 4  # what is looked for can be found
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", ["self_extend", "dca-sharpen"])
def test_rows_of_one_length(rule: str, calls: list[dict[str, Any]]) -> None:
    model, ids = patched_model(rule), token_ids(N, rows=2)
    alone = [logits(model, row[None])[0] for row in ids]
    calls_of_a_row = len(calls) // 2
    calls.clear()
    torch.testing.assert_close(logits(model, ids), torch.stack(alone), atol=1e-5, rtol=0)
    assert len(calls) == calls_of_a_row


@pytest.mark.parametrize("rule", ["self_extend", "dca"])
@pytest.mark.parametrize("tiled", [True, False])
def test_tables_are_made_once_a_forward(rule: str, tiled: bool, monkeypatch: Any) -> None:
    made: list[int] = []
    make, model = Pieces.to_positions, patched_model(rule)
    monkeypatch.setattr(Pieces, "to_positions", lambda self, *args: made.append(args[1].numel()) or make(self, *args))
    monkeypatch.setattr(spans, "_SCORES", N * 7)
    if not tiled:
        by_the_reference(monkeypatch)
    logits(model, IDS[:, :N])
    # Of queries for each far region, and of keys for each way they are rotated further; not for each layer or block.
    assert made == [N] * {"self_extend": 2, "dca": 3}[rule]


class TestNotTaken:
    """Calls that keep to PyTorch, and read as the tiles do."""

    def expected(self, rule: str = "dca") -> torch.Tensor:
        return logits(patched_model(rule), IDS[:, :N])

    @pytest.mark.parametrize("rule", RULES)
    def test_with_eager_attention(self, rule: str, calls: list[dict[str, Any]]) -> None:
        expected = self.expected(rule)
        calls.clear()
        model = patched_model(rule, attn_implementation="eager")
        torch.testing.assert_close(logits(model, IDS[:, :N]), expected, atol=1e-5, rtol=0)
        assert not calls

    def test_with_padding_between_tokens(self, calls: list[dict[str, Any]], monkeypatch: Any) -> None:
        model, mask = patched_model("self_extend"), torch.ones_like(IDS[:, :N])
        mask[:, 50:60] = 0
        with torch.no_grad():
            model(IDS[:, :N], attention_mask=mask, use_cache=False)
        assert not calls

    def test_with_a_mask_of_ones_own(self, calls: list[dict[str, Any]]) -> None:
        expected = self.expected()
        calls.clear()
        with torch.no_grad():
            mask = torch.ones(N, N).tril().bool()[None, None]
            found = patched_model("dca")(IDS[:, :N], attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert not calls

    def test_where_queries_are_of_another_dtype_than_values(self, calls: list[dict[str, Any]]) -> None:
        model = patch_model(sharp_model("Qwen3"), "dca", 8, **RULES["dca"][1])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = model(IDS[:, :N], use_cache=False).logits
        assert not calls  # its norms give float32 queries and keys
        error = (found.float() - logits(model, IDS[:, :N])).abs()
        assert 0 < error.mean() < 0.05


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["self_extend", "dca"])
def test_rounding_is_no_worse_than_in_pytorch(rule: str, dtype: torch.dtype, monkeypatch: Any, calls: Any) -> None:
    model, exact = patched_model(rule, dtype=dtype), patched_model(rule, dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    ids = IDS[:, :N]
    tiled, expected = logits(model, ids), logits(exact, ids)
    assert calls
    by_the_reference(monkeypatch)
    torch.testing.assert_close(logits(exact, ids), expected, atol=1e-6, rtol=0)  # its angles are float32 both times
    error = (tiled - expected).abs().mean()
    assert 0 < error < 1.1 * (logits(model, ids) - expected).abs().mean()
