"""Fine-tuning on a small token budget: the recipe, the packing, the loss that never builds [tokens, vocabulary]."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.training.config import FinetuneConfig
    from hf_posenc.training.recipes import RECIPES, Recipe
    from hf_posenc.training.training_run import FinetuneResult, finetune

# Imported when first asked for: Trainer and PEFT take seconds, which `hf-posenc finetune --help` need not cost.
_MODULES = {
    "RECIPES": "recipes",
    "FinetuneConfig": "config",
    "FinetuneResult": "training_run",
    "Recipe": "recipes",
    "finetune": "training_run",
}

__all__ = ["RECIPES", "FinetuneConfig", "FinetuneResult", "Recipe", "finetune"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
