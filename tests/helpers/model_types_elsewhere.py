"""Run by test_model_type_coverage.py with another Transformers: what becomes of each type there, as JSON lines."""

from __future__ import annotations

import json
import resource
import sys
import warnings
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache

from attention_models import in_chunks
from hf_posenc import RotaryMismatchError, patch_model, unpatch_model
from model_types import IDS, patch_in_attention, rotary_types, sharp_model, tiny_model
from older_transformers import OTHERWISE_IN_5_0, why_left_out
from tiny_models import logits, native, state

REQUEST = {"original_max_position_embeddings": 64, "on_scaled": "replace"}


def outcome(model_type: str, method: str) -> str:
    """Return what happens: equal to the bit, refused with nothing changed, or what went wrong."""
    try:
        model = tiny_model(model_type)
        before, plain = state(model), logits(model, IDS)
    except Exception as error:  # not with these sizes, or not at all
        return f"cannot be built: {type(error).__name__}"
    try:
        patch_model(model, method, 4, **REQUEST)
    except (ValueError, RotaryMismatchError):
        after = state(model)
        untouched = all(torch.equal(after[name], value) for name, value in before.items())
        return "refused" if untouched and torch.equal(logits(model, IDS), plain) else "refused, but changed"
    extended = logits(model, IDS)
    unpatch_model(model)
    if not torch.equal(logits(model, IDS), plain):
        return "not undone"
    reference = native(model, method, 4, **REQUEST)
    return "equal" if torch.equal(extended, logits(reference, IDS)) else "differs"


def is_exact_in_chunks(model: PreTrainedModel, cache: Any = None) -> bool:
    """Return whether a model gives the same logits with a cache; some cannot take one like this."""
    try:
        return torch.allclose(in_chunks(model, IDS, [40, 7, 1], cache), logits(model, IDS), atol=1e-5, rtol=0)
    except (AttributeError, RuntimeError, ValueError):
        return False


def outcome_in_attention(model_type: str, method: str) -> str:
    """Return the same for a method that runs in attention: equal with a cache, plain in short texts, undone."""
    try:
        model = sharp_model(model_type)
        before, plain, short = state(model), logits(model, IDS), logits(model, IDS[:, :64])
    except Exception as error:
        return f"cannot be built: {type(error).__name__}"
    is_exact = is_exact_in_chunks(model)
    try:
        patch_in_attention(model, method, 4, **IN_ATTENTION[method], **REQUEST)
    except (ValueError, RotaryMismatchError):
        after = state(model)
        untouched = all(torch.equal(after[name], value) for name, value in before.items())
        return "refused" if untouched and torch.equal(logits(model, IDS), plain) else "refused, but changed"
    if is_exact and not is_exact_in_chunks(model):
        return "differs in chunks"
    if model_type in STATIC and not is_exact_in_chunks(model, StaticCache(config=model.config, max_cache_len=128)):
        return "differs in chunks with a static cache"
    differs = (logits(model, IDS) - plain)[:, 64:].abs().max() > 1e-3
    if not differs or not torch.equal(logits(model, IDS[:, :64]), short):
        return "not the rule"
    unpatch_model(model)
    if not torch.equal(logits(model, IDS), plain):
        return "not undone"
    return "equal" if is_exact else "equal without a cache: it is not exact with one unpatched either"


IN_ATTENTION: dict[str, dict[str, int]] = {"dynamic_yarn": {"stage": 16}, "self_extend": {"group": 3, "window": 64}}
# Also with a cache of fixed size.
STATIC = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_neox", "phi3", "smollm3")

if __name__ == "__main__":
    OTHERWISE_IN_5_0.clear()  # here they are looked at too
    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)  # a type that does not come out small fails at once
    warnings.simplefilter("ignore")
    for model_type in [one for one in rotary_types() if why_left_out(one) is None]:
        for method in sys.argv[1:]:
            found = (outcome_in_attention if method in IN_ATTENTION else outcome)(model_type, method)
            print(json.dumps([model_type, method, found]), flush=True)
