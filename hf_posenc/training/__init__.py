"""Fine-tuning on a small token budget: the recipe, the packing, the loss that never builds [tokens, vocabulary]."""

from __future__ import annotations

from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.finetune import FinetuneResult, finetune
from hf_posenc.training.perplexity_callback import PerplexityCallback
from hf_posenc.training.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "FinetuneConfig", "FinetuneResult", "PerplexityCallback", "Recipe", "finetune"]
