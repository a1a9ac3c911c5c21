"""The training benchmark compares two ways to do the same: equal weights after equal steps, and what it reports."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM

from hf_posenc.training import FinetuneConfig
from measured_training import Clock, MeasuredTraining, prepare, train_as_finetune


class OneBlock(Dataset[dict[str, torch.Tensor]]):
    """The same block for every step, as plain Trainer shuffles."""

    kinds = None

    def __init__(self, block: dict[str, torch.Tensor]) -> None:
        self.block = block

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.block


@pytest.fixture
def benchmark() -> Iterator[ModuleType]:
    import benchmark_training

    yield benchmark_training
    del sys.modules["benchmark_training"]


@pytest.fixture
def small(tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM]) -> str:
    tiny_llama(vocab_size=2048, max_position_embeddings=4096, num_key_value_heads=4).save_pretrained(tmp_path / "small")
    return str(tmp_path / "small")


def test_both_train_the_same(
    benchmark: ModuleType, tiny_llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    weights = []
    for way in (train_as_finetune, benchmark.train_plainly):
        model: Any = tiny_llama()
        before = model.model.embed_tokens.weight.detach().clone()
        run = FinetuneConfig(str(tmp_path), gradient_checkpointing=True, token_budget=3 * 64, learning_rate=1e-3)
        plan, args, blocks = prepare(model, run, 64, 3, str(tmp_path))
        clock = Clock(model)
        way(model, args, cast(Any, OneBlock(blocks[0])), plan, clock)
        assert len(clock.seconds) == 3
        assert not torch.equal(before, model.model.embed_tokens.weight)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for ours, plain in zip(*weights, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_plain_trainer_is_predicted_with_all_logits(benchmark: ModuleType, small: str) -> None:
    ours, plain = (benchmark.predicted(way, small, False, 4096) for way in ("ours", "plain"))
    assert plain - ours > 2 * 3000 * 2048 * 4  # the rows of logits, and of their gradients, beyond a chunk's


def test_the_longest_block_is_the_last_that_fits(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        benchmark, "predicted", lambda way, model, bf16, tokens: tokens * (1 if way == "ours" else 3) + 7
    )
    assert benchmark.longest("plain", "x", False, 3 * 5 * 512 + 7) == 5 * 512
    assert benchmark.longest("plain", "x", False, 3 * 5 * 512 + 6) == 4 * 512
    monkeypatch.setattr(benchmark, "in_a_fresh_process", lambda way, *rest: {"peak": 2**20})
    result = benchmark.longest_ratio("x", False, 6 * 512 + 7, train=True)
    assert (result["longest_ours"], result["longest_plain"], result["ratio"]) == (3072, 1024, 3)
    assert result["peak_mib_ours"] == 1
    assert "peak_mib_ours" not in benchmark.longest_ratio("x", False, 6 * 512 + 7, train=False)
    with pytest.raises(SystemExit, match="512"):
        benchmark.longest("plain", "x", False, 1000)


def test_the_ratios(benchmark: ModuleType, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "in_a_fresh_process", lambda way, *rest: {"peak": 40 if way == "ours" else 100})
    monkeypatch.setattr(benchmark, "predicted", lambda *rest: 2**20)
    assert benchmark.memory_ratio(small, False, 512)["ratio"] == 0.4
    order: list[str] = []

    def measure(way: str, *rest: Any) -> MeasuredTraining:
        order.append(way)
        return MeasuredTraining(64, 64, len(order), 0)

    monkeypatch.setattr(benchmark, "measure", measure)
    result = benchmark.speed_ratio(small, False, 64, rounds=2)
    assert order == ["ours", "plain", "plain", "ours"]
    assert result["ratio_range"] == [3 / 4, 2]
