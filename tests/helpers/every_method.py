"""One request for each method, and for each variant of one that runs other code: what device tests go through."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from attention_models import RULES as STAGED_RULES
from distance_rules import RULES as DISTANCE_RULES
from encoded_models import ENCODINGS, encoding_of
from hf_posenc import available_methods, patch_model
from tiny_models import STATIC_METHODS

STATIC = {
    **{key: request for key, request in STATIC_METHODS.items() if key not in ("yarn-harmonic", "yarn-options")},
    "dynamic-sequence": ("dynamic", {"scope": "sequence"}),
    "fitted": ("fitted", {}),
}
STAGED = {key: (key.partition("-")[0], options) for key, options in STAGED_RULES.items() if "geometric" not in key}
DISTANCE = {key: request for key, request in DISTANCE_RULES.items() if key != "rerope-log_n"}
ENCODED = {key: request for key, request in ENCODINGS.items() if key != "rope-partial"}
ENCODED["xpos"] = ("xpos", {"scale_base": 64})  # which float16 has numbers for
METHODS: dict[str, tuple[str, dict[str, Any]]] = {**STATIC, **STAGED, **DISTANCE, **ENCODED}
FACTOR = 4


def patch(model: PreTrainedModel, key: str) -> PreTrainedModel:
    """Patch a model by one of ``METHODS``; parameters of an encoding are drawn anew, alike on every device."""
    name, options = METHODS[key]
    if name == "longrope":
        num_pairs = model.model.rotary_emb.inv_freq.numel()
        options = {"short_factor": [1.0] * num_pairs, "long_factor": [1.0 + i for i in range(num_pairs)]}
    if name == "fitted":
        divisors = [1.0 + i / 4 for i in range(model.model.rotary_emb.inv_freq.numel())]
        options = {"short_factor": divisors, "long_factor": divisors, "attention_factor": 1.05}
    if key == "learned":
        patch_model(model, name, context_length=8 * model.config.max_position_embeddings)
    else:
        patch_model(model, name, 1 if key in ENCODED else FACTOR, **options)
    if key in ENCODED:
        drawn = torch.Generator().manual_seed(3)
        for parameter in encoding_of(model).parameters():
            value = torch.randn(parameter.shape, generator=drawn) * (0.05 if key == "learned" else 0.5)
            parameter.data.copy_(value)
    return model


def missing_methods() -> set[str]:
    """Return the methods that ``METHODS`` leaves out."""
    return {row["name"] for row in available_methods()} - {name for name, _ in METHODS.values()}
