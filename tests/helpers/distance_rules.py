"""Rules that change the distance to far keys, and a layer with a distance for every pair, in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from attention_models import ORIGINAL, sharp_model
from hf_posenc import patch_model

L = ORIGINAL
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "self_extend": ("self_extend", {"group": 5, "window": 24}),
    "dca": ("dca", {"chunk_size": 48, "local_window": 8}),
    "dca-sharpen": ("dca", {"chunk_size": 48, "local_window": 8, "sharpen": True}),
    "rerope": ("rerope", {"window": 24}),
    "rerope-log_n": ("rerope", {"window": 24, "log_n": True}),
    "leaky_rerope": ("leaky_rerope", {"window": 24, "leak": 4.0}),
}


def patched_model(rule: str, family: str = "Llama", **kwargs: Any) -> PreTrainedModel:
    method, options = RULES[rule]
    return patch_model(sharp_model(family, **kwargs), method, 8, **options)


@cache
def relative_positions(rule: str, n: int) -> torch.Tensor:
    """The distance that each pair (query, key) is rotated by, one pair at a time, from the papers' definitions."""
    method, o = RULES[rule]
    distance = torch.zeros(n, n, dtype=torch.float64)
    for p in range(n):
        for j in range(p + 1):
            if method == "self_extend":
                grouped = p // o["group"] + o["window"] - o["window"] // o["group"] - j // o["group"]
                distance[p, j] = p - j if p - j < o["window"] else grouped
            elif method == "rerope":
                distance[p, j] = min(p - j, o["window"])
            elif method == "leaky_rerope":
                w, k = o["window"], o["leak"]
                distance[p, j] = p - j if p - j < w else (p - j + w * (k - 1)) / k
            else:
                m = o["chunk_size"] - o["local_window"]
                chunks_apart = p // m - j // m
                query = (p % m, min(m + p % m, o["chunk_size"]), o["chunk_size"])[min(chunks_apart, 2)]
                distance[p, j] = query - j % m
    return distance


def by_hand(model: PreTrainedModel, ids: torch.Tensor, rule: str) -> torch.Tensor:
    """One Llama attention layer in float64 with a distance for every pair."""
    layer, config, n = model.model.layers[0].self_attn, model.config, ids.shape[1]
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))[0].double()
    q, k, v = (
        (hidden @ projection.weight.double().T).view(n, -1, layer.head_dim).transpose(0, 1)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    groups = config.num_attention_heads // config.num_key_value_heads
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    inv_freq = 1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angle = relative_positions(rule, n)[..., None] * inv_freq
    rotated = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.complex(*x.chunk(2, -1)) for x in (q, k))
    scores = torch.einsum("hpd,hjd,pjd->hpj", q, k.conj(), rotated).real * layer.scaling
    p = torch.arange(1, n + 1, dtype=torch.float64)
    if RULES[rule][1].get("log_n"):
        scores = scores * (p.log() / torch.tensor(float(L)).log()).clamp(min=1)[:, None]
    if RULES[rule][1].get("sharpen"):
        scores = scores * (0.05 * (p / L).log().clamp(min=0) + 1)[:, None] ** 2
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1) @ layer.o_proj.weight.double().T
