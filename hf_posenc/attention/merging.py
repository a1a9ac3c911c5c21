"""Attention to all keys from attention to parts of them.

A call of a kernel gives the output for some of the keys and the logsumexp of their logits. By their logsumexp, outputs
for different keys are weighted to the output for all of them (Dao 2023, FlashAttention-2, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Output ``(batch, heads, num_queries, head_dim)`` and float32 logsumexp ``(batch, heads, num_queries)`` of a call.
Part = tuple[torch.Tensor, torch.Tensor]
# The logit of a key that is not seen. Not minus infinity: a query that sees no key must not make others NaN, and of
# minus infinity the CPU's kernel gives the logsumexp 0.
UNSEEN = -1e30


def merged(parts: Sequence[Part]) -> Part:
    """Return the attention to the keys of all parts, which are of the same queries and of different keys."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts]).clamp(min=UNSEEN)
    total = lses.logsumexp(0)
    shares = (lses - total).exp()[..., None]
    output = parts[0][0] * shares[0]
    for (part, _), share in zip(parts[1:], shares[1:], strict=True):
        output = output + part * share
    return output.to(parts[0][0].dtype), total


def stacked_heads(states: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return ``(batch, heads, num_queries, ...)`` as ``(batch, kv_heads, heads / kv_heads * num_queries, ...)``."""
    return states.reshape(states.shape[0], kv_heads, -1, *states.shape[3:])
