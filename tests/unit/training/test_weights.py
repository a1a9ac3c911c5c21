"""What an engine does to a model, undone; weights float32 by name; tried with stand-ins for an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hf_posenc.training.weights import float32_weights, load_shards, remember_modules, unshard
from tiny_runs import logits_of


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one: FSDP2 shards into one part, by the same code as into many."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_sharded_model_becomes_the_plain_one_it_was(tiny_llama: Any):
    model = tiny_llama(tie_word_embeddings=True).bfloat16()
    expected, kind = logits_of(model), type(model)
    with float32_weights(model, frozen=True) as dtypes:
        before = remember_modules(model)
        for layer in model.model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model.model.norm.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
        assert isinstance(model, FSDPModule)
        model(input_ids=torch.arange(9)[None])  # leaves the root's weights gathered
        assert load_shards(model, {"model.norm.weight": torch.full((64,), 2.0)})[0] == "model.embed_tokens.weight"
        unshard(model, before, dtypes)
    assert type(model) is kind
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.norm.weight.float(), torch.full((64,), 2.0))
    torch.testing.assert_close(logits_of(model), 2 * expected, rtol=0.02, atol=0.02)  # the hook is gone


def test_weights_an_engine_keeps_otherwise_are_not_taken_for_whole(tiny_llama: Any):
    model = tiny_llama()
    before = remember_modules(model)
    model.model.norm.weight = nn.Parameter(torch.empty(0))  # as ZeRO-3 leaves what it has taken away
    with pytest.raises(RuntimeError, match=r"LlamaRMSNorm.*\[0\].*\[64\]"):
        unshard(model, before, {})
