"""The tiny model with projections that were fitted to a rule, as by ``hf-posenc fit --adapt``."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_posenc import FitConfig, FitResult, fit_method, patch_model
from hf_posenc.assets import load_novel
from tiny_models import load_tiny

FEW_STEPS = {"rule": "ntk", "steps": 40, "short_steps": 6}


def adapt_config(**changes: Any) -> FitConfig:
    """Settings of a fit of the tiny model, some of them changed."""
    settings: dict[str, Any] = {
        "context_length": 1024,
        "max_texts": 2,
        "compare": ["none", "ntk"],
        "held_out_numbers": 0,
        "hide_progress": True,
        "adapt_options": FEW_STEPS,
    }
    return FitConfig(**{**settings, **changes})


def fit_adapted(tokenizer: PreTrainedTokenizerBase, target: int) -> tuple[FitResult, Any]:
    """Return a fit of few steps, and the extended model with its low-rank changes as a PEFT adapter."""
    settings = {"steps": 8, "short_steps": 4}
    config = FitConfig(target, held_out=0, adapt_options=settings, hide_progress=True)
    base = load_tiny()
    result = fit_method(base, tokenizer, [load_novel("emma")[:8000]], config)
    assert result.adapter is not None
    return result, result.adapter.wrap(patch_model(base, **config.request(result.method, result.options)))
