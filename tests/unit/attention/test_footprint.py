"""What a rule is said to keep, against what a forward and a cache really hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from attention_models import IDS, ORIGINAL, in_chunks, sharp_model, staged
from attention_models import RULES as STAGED
from distance_rules import RULES as DISTANCES
from distance_rules import patched_model
from hf_posenc.attention.footprint import Footprint, footprint
from hf_posenc.attention.interface import attention_of
from hf_posenc.evaluation.memory import predict_memory, shape_of
from hf_posenc.patching.api import extension_of

RULES = [*STAGED, *DISTANCES]


def patched(rule: str) -> PreTrainedModel:
    return staged(rule=rule) if rule in STAGED else patched_model(rule)


def kept_cosines(model: PreTrainedModel, ids: torch.Tensor) -> int:
    """Count the cosines that the last layer of a forward finds."""
    found = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        found.append(sum(cos.numel() for cos, _ in attention_of(module).forwards[-1].tables.values()))

    handle = model.model.layers[-1].self_attn.register_forward_hook(look)
    with torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    return found[0]


@pytest.mark.parametrize("length", [ORIGINAL // 4, ORIGINAL + 1, 300, 400])
@pytest.mark.parametrize("rule", RULES)
def test_cosines_of_one_pass(rule: str, length: int) -> None:
    model = patched(rule)
    said = footprint(extension_of(model), length, length)
    assert said == Footprint(kept_cosines(model, IDS[:, :length]), 0)
    assert (said.cosines > 0) == (length > ORIGINAL)


@pytest.mark.parametrize("rule", RULES)
def test_copies_of_the_cached_keys(rule: str) -> None:
    model, cache = patched(rule), DynamicCache()
    in_chunks(model, IDS[:, :300], [300], cache)
    copies = footprint(extension_of(model), 310, 10).key_copies
    held = sum(layer.keys.nbytes for layer in cache.layers)
    assert attention_of(model.model.layers[0].self_attn).rotated.nbytes(cache) == copies * held > 0


def test_the_prediction_of_a_pass_has_it() -> None:
    model, plain = patched("dca"), sharp_model("Llama")
    extension, shape = extension_of(model), shape_of(model)
    rule = predict_memory(shape, 400, extension=extension)
    without = predict_memory(shape, 400, extension=extension_of(plain))
    assert without.rule == 0
    assert rule.beyond_model - without.beyond_model == rule.rule == 2 * 4 * kept_cosines(model, IDS[:, :400])
    chunked = predict_memory(shape, 400, prefill_chunk=100, extension=extension)
    assert chunked.rule == 2 * 4 * footprint(extension, 400, 100).cosines + chunked.kv_cache // 2
