"""``generate`` and decoding on the GPU with every kind of cache, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.utils import is_optimum_quanto_available

from attention_models import IDS, left_padded, sharp_model
from every_method import METHODS
from gpu.exact import ALLOWED, error, exact_model, model_of, patched
from tiny_models import logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),  # torch's compiler
]
PROMPT = IDS[:, :60]
NEW = 50  # past the original 64, through stages and regions
# Transformers' longrope takes the one list or the other by the length of a forward: cached keys have to be past it.
PAST = IDS[:, :70]
KINDS = ("yarn", "llama3", "longrope", "dynamic_yarn", "dca", "self_extend", "alibi", "t5_bias", "rope", "learned")
KEYS = tuple(key for key in METHODS if key != "dynamic-sequence")  # whose scale is that of the whole forward
# On CUDA it compiles its kernels when first used, for minutes and with a CUDA toolkit. The fp8 cache needs no package.
QUANTO = pytest.mark.skipif(not is_optimum_quanto_available(), reason="optimum-quanto is an optional package")
QUANTISED: dict[str, dict[str, Any]] = {"fp8": {}, "quanto": {"nbits": 4, "q_group_size": 16, "residual_length": 32}}


def prompt_of(key: str) -> torch.Tensor:
    return PAST if key == "longrope" else PROMPT


def recomputed(model: PreTrainedModel, ids: torch.Tensor, new: int) -> torch.Tensor:
    """Greedy tokens without any cache, on the GPU."""
    ids = ids.to(model.device)
    for _ in range(new):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], dim=1)
    return ids


def generated(model: PreTrainedModel, ids: torch.Tensor, new: int = NEW, **kwargs: Any) -> torch.Tensor:
    ids = ids.to(model.device)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, **kwargs}
    return model.generate(ids, **given)


@pytest.mark.parametrize("key", KEYS)
def test_a_dynamic_cache(key: str, device: torch.device) -> None:
    model, prompt = model_of(key, torch.float32, device), prompt_of(key)
    assert torch.equal(generated(model, prompt), recomputed(model, prompt, NEW))


@pytest.mark.parametrize("key", KINDS)
def test_a_static_cache(key: str, device: torch.device) -> None:
    model, prompt = model_of(key, torch.float32, device), prompt_of(key)
    found = generated(model, prompt, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, recomputed(model, prompt, NEW))


@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca", "rope"])
def test_a_static_cache_as_generate_compiles_it(key: str, cuda_only: torch.device) -> None:
    model = model_of(key, torch.float32, cuda_only)
    found = generated(model, PROMPT, 20, cache_implementation="static")
    assert torch.equal(found, recomputed(model, PROMPT, 20))


@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("key", KINDS)
def test_an_offloaded_cache(key: str, cache: str, cuda_only: torch.device) -> None:
    model, prompt = model_of(key, torch.float32, cuda_only), prompt_of(key)
    found = generated(model, prompt, cache_implementation=cache, disable_compile=True)
    assert torch.equal(found, recomputed(model, prompt, NEW))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca", "rope"])
def test_layers_with_a_sliding_window(key: str, static: bool, device: torch.device) -> None:
    """Gemma 2: every second layer forgets what is 32 tokens away, and its cache too."""
    model = patched(sharp_model("Gemma2").to(device), key)
    kwargs = {"cache_implementation": "static", "disable_compile": True} if static else {}
    assert torch.equal(generated(model, PROMPT, **kwargs), recomputed(model, PROMPT, NEW))


@pytest.mark.parametrize("backend", ["fp8", pytest.param("quanto", marks=QUANTO)])
@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca", "rope"])
def test_a_quantised_cache(key: str, backend: str, device: torch.device) -> None:
    """Its few bits cost what they cost the unpatched model; a rule does not make it worse."""
    errors = []
    for each in (None, key):
        model = sharp_model("Llama").to(device)
        model = model if each is None else patched(model, each)
        ids = IDS[:, :110].to(device)
        cache = QuantizedCache(backend, config=model.config, **QUANTISED[backend])
        with torch.no_grad():
            parts = [
                model(ids[:, begin:end], past_key_values=cache).logits
                for begin, end in ((0, 90), *((index, index + 1) for index in range(90, 110)))
            ]
        errors.append(error(torch.cat(parts, dim=1), logits(model, ids).cpu()))
    assert 1e-4 < errors[1] < 2 * errors[0]


@pytest.mark.parametrize("key", ["yarn", "dynamic_yarn", "dca", "t5_bias"])
def test_a_padded_batch_and_beams(key: str, device: torch.device) -> None:
    model = model_of(key, torch.float32, device)
    ids, mask = left_padded([PROMPT, PROMPT[:, :35]])
    both = generated(model, ids, 40, attention_mask=mask.to(device))
    assert torch.equal(both[:1], generated(model, PROMPT, 40))
    assert torch.equal(both[1:, 25:], generated(model, PROMPT[:, :35], 40))
    beams = generated(model, PROMPT, 20, num_beams=3)
    assert torch.equal(beams, generated(model, PROMPT, 20, num_beams=3, use_cache=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("key", KINDS)
def test_decoding_in_half_precision(key: str, dtype: torch.dtype, device: torch.device) -> None:
    """Not by its tokens, which rounding may change, but by its logits."""
    model, exact = model_of(key, dtype, device), logits(exact_model(key, dtype), IDS[:, :110])
    ids, parts, cache = IDS[:, :110].to(device), [], DynamicCache(config=model.config)
    with torch.no_grad():
        first = prompt_of(key).shape[1]
        for begin, end in ((0, first), *((index, index + 1) for index in range(first, 110))):
            parts.append(model(ids[:, begin:end], past_key_values=cache).logits)
    assert error(torch.cat(parts, dim=1), exact) < ALLOWED[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compiled_step_of_a_staged_rule_is_one_graph(dtype: torch.dtype, device: torch.device) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    key = "dynamic_yarn"
    model, exact = model_of(key, dtype, device), logits(exact_model(key, dtype), IDS[:, :90])
    counter = CompileCounterWithBackend("inductor" if device.type == "cuda" else "aot_eager")
    cache, ids = StaticCache(config=model.config, max_cache_len=128), IDS[:, :90].to(device)
    with torch.no_grad():
        parts = [model(ids[:, :50], past_key_values=cache, use_cache=True).logits]
        step = torch.compile(model.forward, backend=counter, fullgraph=True)
        for index in range(50, 90):
            position = torch.tensor([[index]], device=device)
            parts.append(step(ids[:, index : index + 1], past_key_values=cache, position_ids=position).logits)
    assert counter.frame_count == 1
    assert error(torch.cat(parts, dim=1), exact) < ALLOWED[dtype]
