"""The cost of methods that run in attention, beside no method and static YaRN (run by scripts/benchmark.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_posenc import patch_model
from hf_posenc.attention.interface import attention_of

# Four layers of SmolLM2-135M's shape, half its original length: seconds, not minutes.
ORIGINAL = 4096
BEHIND = 16384  # tokens in the cache when decoding
DECODE_STEPS = 24
DISTANCE_RULES = ("self_extend", "dca", "rerope", "leaky_rerope")
Result = dict[str, Any]


def make_models(dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """Return the same random weights unpatched and with each rule, at a factor of 4."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {name: LlamaForCausalLM(config) for name in ("none", "yarn", "dynamic_yarn", *DISTANCE_RULES)}
    for name, model in models.items():
        model.load_state_dict(models["none"].state_dict())
        model.to(device, dtype).train(False)
        if name != "none":
            patch_model(model, name, 4)
    return models


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Read a text; the head sees one token."""
    model(input_ids=ids, use_cache=False, logits_to_keep=1)


@torch.no_grad()
def filled_cache(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    """Return a cache of all but the last ``DECODE_STEPS`` tokens, and the rotated keys warm."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :-DECODE_STEPS], past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def decode(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache) -> None:
    """Feed the last tokens one by one, and take them out of the cache again."""
    for step in range(DECODE_STEPS):
        model(input_ids=ids[:, step : step + 1], past_key_values=cache)


def cache_bytes(model: PreTrainedModel, cache: DynamicCache) -> tuple[int, int]:
    """Return the bytes of a cache, and of the rotated keys beside it."""
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return held, attention_of(model.model.layers[0].self_attn).rotated.nbytes(cache)


def benchmark_staged(
    dtype: torch.dtype,
    rounds: int,
    alternate: Callable[..., Result],
    facts: Callable[[PreTrainedModel], Result],
) -> list[Result]:
    """Return the ratios: at the original length, at four times it with each rule, decoding, and memory."""
    models = make_models(dtype)
    ids = torch.randint(0, 1024, (1, BEHIND + DECODE_STEPS), device=models["none"].device)
    short, long = ids[:, :ORIGINAL], ids[:, : 4 * ORIGINAL]
    results = []
    far = f"static yarn, forward of {4 * ORIGINAL} tokens"
    for rule, other, what, text, goal in (
        ("dynamic_yarn", "none", f"unpatched, forward of {ORIGINAL} tokens", short, 1.03),
        ("dynamic_yarn", "yarn", far, long, 1.10),
        *((rule, "yarn", far, long, 1.20) for rule in DISTANCE_RULES),
    ):
        repeats = rounds if text is short else max(3, rounds // 4)
        ours, theirs = models[rule], models[other]
        timing = alternate(
            lambda ours=ours, text=text: prefill(ours, text),
            lambda theirs=theirs, text=text: prefill(theirs, text),
            repeats,
        )
        results.append({"benchmark": f"{rule} / {what}", **timing, "goal": goal, "better": "lower"})
    caches = {name: filled_cache(models[name], ids) for name in ("dynamic_yarn", "yarn")}
    timing = alternate(*(lambda name=name: decode(models[name], short, caches[name]) for name in caches), rounds)
    what = f"dynamic_yarn / static yarn, {DECODE_STEPS} tokens behind {BEHIND}"
    results.append({"benchmark": what, **timing, "goal": 1.10, "better": "lower"})
    held, rotated = cache_bytes(models["dynamic_yarn"], caches["dynamic_yarn"])
    results.append(
        {
            "benchmark": "rotated keys / the KV cache they belong to, bytes",
            "ratio": rotated / held,
            "goal": 0.6,
            "better": "lower",
        }
    )
    return [{**result, **facts(models["none"])} for result in results]
