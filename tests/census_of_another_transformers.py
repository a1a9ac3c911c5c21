"""Run by test_census.py in an environment with another Transformers: what becomes of each type there, as JSON lines."""

from __future__ import annotations

import json
import resource
import sys
import warnings

import torch
from census import IDS, rotary_types, tiny_model
from tiny_models import logits, native, state

from hf_posenc import RotaryMismatchError, patch_model, unpatch_model

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


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)  # a type that does not come out small fails at once
    warnings.simplefilter("ignore")
    for model_type in rotary_types():
        for method in sys.argv[1:]:
            print(json.dumps([model_type, method, outcome(model_type, method)]), flush=True)
