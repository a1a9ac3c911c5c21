"""Generation with staged dynamic scaling: whatever cache it uses, a token is what a full forward says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from attention_models import IDS, ORIGINAL, in_chunks, left_padded, sharp_model, staged
from hf_posenc import patch_model
from hf_posenc.attention.interface import attention_of
from older_transformers import skip_on_5_0
from tiny_models import logits, make_model


class TestGeneration:
    PROMPT = IDS[:, :60]

    @staticmethod
    def recomputed(model: PreTrainedModel, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        for _ in range(tokens):
            ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], dim=1)
        return ids

    def generate(self, model: PreTrainedModel, ids: torch.Tensor = PROMPT, **kwargs: Any) -> torch.Tensor:
        mask = kwargs.pop("attention_mask", torch.ones_like(ids))
        return model.generate(ids, attention_mask=mask, max_new_tokens=80, do_sample=False, **kwargs)

    def test_greedy_static_and_lookup_are_what_a_full_forward_says(self) -> None:
        model = staged()
        expected = self.recomputed(model, self.PROMPT, 80)
        assert torch.equal(self.generate(model), expected)
        assert torch.equal(self.generate(model, cache_implementation="static", disable_compile=True), expected)
        assistant = make_model("Llama", num_hidden_layers=1)
        assert torch.equal(self.generate(model, assistant_model=assistant), expected)
        skip_on_5_0("fails in prompt lookup without an end-of-sequence token")
        assert torch.equal(self.generate(model, prompt_lookup_num_tokens=4), expected)

    def test_beams(self) -> None:
        model = staged()
        assert torch.equal(self.generate(model, num_beams=3), self.generate(model, num_beams=3, use_cache=False))

    def test_a_padded_batch(self) -> None:
        model = staged()
        ids, mask = left_padded([self.PROMPT, self.PROMPT[:, :35]])
        both = self.generate(model, ids, attention_mask=mask)
        assert torch.equal(both[:1], self.generate(model))
        assert torch.equal(both[1:, 25:], self.generate(model, self.PROMPT[:, :35]))

    def test_up_to_the_original_length_the_cache_is_the_unpatched_models(self) -> None:
        plain, model = sharp_model("Llama"), staged()
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        for one, cache in zip((plain, model), caches, strict=True):
            in_chunks(one, IDS[:, :ORIGINAL], [50, 1], cache)
        for theirs, ours in zip(*(cache.layers for cache in caches), strict=True):
            assert torch.equal(theirs.keys, ours.keys)
        assert attention_of(model.model.layers[0].self_attn).rotated.nbytes(caches[1]) == 0
        with torch.no_grad():  # and a cache filled before patching is good after it
            rest = model(IDS[:, ORIGINAL:150], past_key_values=caches[0]).logits
        torch.testing.assert_close(rest, logits(model, IDS[:, :150])[:, ORIGINAL:], atol=1e-5, rtol=0)
        assert attention_of(model.model.layers[0].self_attn).rotated.nbytes(caches[0]) > 0

    def test_a_cropped_cache(self) -> None:
        model = staged()
        cache = DynamicCache(config=model.config)
        in_chunks(model, IDS[:, :150], [150], cache)
        for layer in cache.layers:
            layer.crop(-60)
        with torch.no_grad():
            rest = model(IDS[:, 90:130], past_key_values=cache).logits
        torch.testing.assert_close(rest, logits(model, IDS[:, :130])[:, 90:], atol=1e-5, rtol=0)

    def test_a_cache_changed_in_place_is_noticed(self) -> None:
        model = staged()
        cache = DynamicCache(config=model.config)
        in_chunks(model, IDS[:, :100], [99, 1], cache)
        fresh = DynamicCache(config=model.config)
        in_chunks(model, IDS[:, 100:200], [100], fresh)
        for layer, other in zip(cache.layers, fresh.layers, strict=True):
            layer.keys.copy_(other.keys)
            layer.values.copy_(other.values)
        with torch.no_grad():
            found = model(IDS[:, 200:201], past_key_values=cache, position_ids=torch.tensor([[100]])).logits
        torch.testing.assert_close(found, logits(model, IDS[:, 100:201])[:, -1:], atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # Transformers' own call
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's compiler
@pytest.mark.parametrize("inner", ["sdpa", "eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_a_static_cache_and_each_implementation(inner: str) -> None:
    model = sharp_model("Llama")
    model.set_attn_implementation(inner)
    patch_model(model, "dynamic_yarn", 8, stage=32)
    ids = IDS[:, :200]
    with torch.no_grad():
        expected = logits(staged(), ids)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=1e-5, rtol=0)
    if inner != "flex_attention":  # which compiles anew for every length on a CPU
        cache = StaticCache(config=model.config, max_cache_len=256)
        torch.testing.assert_close(in_chunks(model, ids, [40, 50, 1], cache), expected, atol=1e-5, rtol=0)


def test_decoding_compiles_to_one_graph_that_serves_every_token() -> None:
    from torch._dynamo.testing import CompileCounter

    model = staged()
    expected = logits(model, IDS[:, :200])
    counter = CompileCounter()
    cache = StaticCache(config=model.config, max_cache_len=256)
    with torch.no_grad():
        model(IDS[:, :50], past_key_values=cache, use_cache=True)
        step = torch.compile(model.forward, backend=counter, fullgraph=True)
        for i in range(50, 110):
            output = step(IDS[:, i : i + 1], past_key_values=cache, position_ids=torch.tensor([[i]])).logits
            torch.testing.assert_close(output, expected[:, i : i + 1], atol=1e-5, rtol=0)
    assert counter.frame_count == 1
