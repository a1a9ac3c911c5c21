"""The tiny model with projections that were fitted to a rule, as ``hf-posenc fit --adapt`` saves it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from hf_posenc import FitConfig, FitResult, fit_method, patch_model
from hf_posenc.assets import load_novel, tiny_model_path


def fit_adapted(tokenizer: PreTrainedTokenizerBase, target: int) -> tuple[FitResult, Any]:
    """Return a fit of few steps, and the extended model with its low-rank changes as a PEFT adapter."""
    settings = {"steps": 8, "short_steps": 4}
    config = FitConfig(target, held_out=0, adapt_options=settings, hide_progress=True)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32).eval()
    result = fit_method(base, tokenizer, [load_novel("emma")[:8000]], config)
    assert result.adapter is not None
    return result, result.adapter.wrap(patch_model(base, **config.request(result.method, result.options)))
