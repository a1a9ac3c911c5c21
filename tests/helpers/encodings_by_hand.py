"""Encodings computed by hand, in float64, one query and one key at a time, for tests."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from hf_posenc import patch_model

Score = Callable[[int, torch.Tensor, torch.Tensor, int, int], float]


def slope(head: int, num_heads: int) -> float:
    """The slope of a head, where the number of heads is a power of two."""
    return 2 ** (-8 * (head + 1) / num_heads)


def pairs(features: torch.Tensor, interleaved: bool) -> list[complex]:
    """The features of a head as complex numbers."""
    half = len(features) // 2
    values = features.tolist()
    if interleaved:
        return [complex(values[2 * i], values[2 * i + 1]) for i in range(half)]
    return [complex(values[i], values[i + half]) for i in range(half)]


def rotated_score(
    query: torch.Tensor, key: torch.Tensor, distance: int, base: float, interleaved: bool, **xpos: float
) -> float:
    """The product of a query and a key at ``distance`` positions before it: pair by pair, by the angle between them."""
    total = 0.0
    width = len(query)
    for i, (q, k) in enumerate(zip(pairs(query, interleaved), pairs(key, interleaved), strict=True)):
        angle = distance * base ** (-2 * i / width)
        decay = 1.0
        if xpos:
            decay = ((2 * i / width + 0.4) / 1.4) ** (distance / xpos["scale_base"])
        total += decay * (q * k.conjugate() * cmath.exp(1j * angle)).real
    return total


def plain_score(head: int, query: torch.Tensor, key: torch.Tensor, at: int, of: int) -> float:
    return float(query @ key)


def attention_of(score: Score, bias: Callable[[int, int], float]) -> Any:
    """An attention function for Transformers: softmax of ``score * scaling + bias``, over the keys up to the query."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        output = torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1], dtype=torch.float64)
        for row in range(query.shape[0]):
            for head in range(query.shape[1]):
                q, k, v = (t[row].double() for t in (query, key, value))
                for at in range(query.shape[2]):
                    logits = [
                        scaling * score(head, q[head, at], k[head // groups, of], at, of) + bias(head, at - of)
                        for of in range(at + 1)
                    ]
                    weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
                    output[row, at, head] = weights @ v[head // groups, : at + 1]
        return output.to(query.dtype), None

    return attend


def without_positions(
    model: PreTrainedModel, score: Score = plain_score, bias: Any = lambda head, distance: 0.0
) -> Any:
    """The model with its RoPE stilled and its attention computed by hand."""
    patch_model(model, "nope", 1)
    AttentionInterface.register("by_hand", attention_of(score, bias))
    model.config._attn_implementation = "by_hand"
    return model


def sinusoid(position: int, feature: int, width: int, base: float = 10000.0) -> float:
    angle = position / base ** (2 * (feature // 2) / width)
    return math.sin(angle) if feature % 2 == 0 else math.cos(angle)
