"""Small models whose attention really depends on distance, and ways to feed them, for tests of our attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_posenc import patch_model
from tiny_models import make_model, token_ids

ORIGINAL = 64  # tokens
IDS = token_ids(8 * ORIGINAL)
RULES: dict[str, dict[str, Any]] = {
    "dynamic": {"stage": 32},
    "dynamic_yarn": {"stage": 32},
    "dynamic_yarn-geometric": {"stage": 48, "growth": "geometric"},
    "dynamic_yarn-log_n": {"stage": 32, "log_n": True},
}


def families_and_rules(families: Iterable[str], rules: Iterable[str]) -> list[Any]:
    """Return all pairs for ``parametrize``; those but of the first family or the first rule are slow ones.

    A rule knows no family and a family no rule, so what one pair breaks another does too; all pairs take a minute.
    """
    families, rules = list(families), list(rules)
    return [
        pytest.param(family, rule, marks=() if family == families[0] or rule == rules[0] else pytest.mark.slow)
        for family in families
        for rule in rules
    ]


def sharp_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A random model with larger queries and keys: at random's own size its attention is nearly uniform."""
    model = make_model(family, **overrides)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("q_proj.weight", "k_proj.weight", "qkv", "query_key_value")):
            torch.nn.init.normal_(parameter, std=0.2)
    model.generation_config.eos_token_id = None
    return model.to(dtype)


def staged(family: str = "Llama", rule: str = "dynamic_yarn", **kwargs: Any) -> PreTrainedModel:
    """A sharp model with one of ``RULES``, asked for eight times its length."""
    return patch_model(sharp_model(family, **kwargs), rule.partition("-")[0], 8, **RULES[rule])


@torch.no_grad()
def in_chunks(model: PreTrainedModel, ids: torch.Tensor, sizes: Sequence[int], cache: Any = None) -> torch.Tensor:
    """Logits from a KV cache, fed in chunks of these sizes over and over."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    parts: list[torch.Tensor] = []
    begin = 0
    while begin < ids.shape[1]:
        end = min(begin + sizes[len(parts) % len(sizes)], ids.shape[1])
        positions = torch.arange(begin, end)[None]  # a static cache does not count for Transformers 5.0
        parts.append(model(ids[:, begin:end], past_key_values=cache, use_cache=True, position_ids=positions).logits)
        begin = end
    return torch.cat(parts, dim=1)


def left_padded(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of rows ``(1, length)``, padded at the left, and its attention mask."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, longest - row.shape[1] :] = row[0]
        mask[number, longest - row.shape[1] :] = 1
    return ids, mask
