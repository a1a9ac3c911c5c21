"""One model through patching, saving, loading, the doctor and undoing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_posenc import (
    describe,
    diagnose,
    load_extended,
    patch_model,
    save_extended,
    unpatch_model,
    verify_model,
)
from model_types import IDS
from tiny_models import assert_same_state, logits, native, state

REQUEST: dict[str, Any] = {"original_max_position_embeddings": 64}


def assert_patched_saved_and_undone(model: PreTrainedModel, path: Path, method: str, **options: Any) -> torch.Tensor:
    """Patch, hold against Transformers' own and a reloaded checkpoint, undo; return the logits in between."""
    before, plain = state(model), logits(model, IDS)
    patch_model(model, method, 4, **REQUEST, **options)
    verify_model(model)
    extended, facts = logits(model, IDS), describe(model)
    assert not torch.equal(extended, plain)
    save_extended(model, path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(path).eval(), IDS), extended)
    loaded = load_extended(path).eval()
    assert torch.equal(logits(loaded, IDS), extended)
    assert describe(loaded) == facts
    assert diagnose(path).sound
    unpatch_model(model)
    assert torch.equal(logits(native(model, method, 4, **REQUEST, **options), IDS), extended)
    assert_same_state(state(model), before)
    return extended
