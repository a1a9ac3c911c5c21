"""Attention in several calls of a CPU's flash kernel, whose results are weighed by their logsumexp: no scores kept."""

from __future__ import annotations

import torch

# Output ``(batch, heads, num_queries, head_dim)`` and logsumexp ``(batch, heads, num_queries)`` of a call.
Part = tuple[torch.Tensor, torch.Tensor]
# What is added to the logit of a key that is not seen. Not minus infinity, of which the kernel says logsumexp 0.
_UNSEEN = -1e30


def can_attend_in_parts(query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether ``attend_part`` applies: on a CPU, without gradients, whose kernel says its logsumexp."""
    needs_gradient = torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or value.requires_grad)
    alike = query.dtype == keys.dtype == value.dtype and value.shape[-1] == query.shape[-1]
    return query.device.type == "cpu" and not needs_gradient and alike


def attend_part(
    query: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    seen: torch.Tensor | None = None,
    is_causal: bool = False,
) -> Part:
    """Attend to some of the keys.

    Args:
        query: ``(batch, heads, num_queries, head_dim)``.
        keys: ``(batch, kv_heads, num_keys, head_dim)``.
        value: The same shape.
        scaling: Multiplies the logits; None for ``head_dim ** -0.5``.
        seen: Bool ``(num_queries, num_keys)``; None for all. A query may see none here.
        is_causal: Of as many keys as queries, each query sees those up to its own.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    batch, heads, count, _ = query.shape
    groups = heads // keys.shape[1]
    if is_causal:
        keys, value = (states.repeat_interleave(groups, dim=1) for states in (keys, value))
        output, lse = attend(query, keys, value, 0.0, True, scale=scaling)
        return output, lse
    # Queries that share a head's keys are just more queries, so that no key is repeated.
    stacked = query.reshape(batch, keys.shape[1], groups * count, -1)
    mask = None
    if seen is not None:
        zeros = torch.zeros(seen.shape, dtype=torch.promote_types(query.dtype, torch.float32))
        mask = zeros.masked_fill(~seen, _UNSEEN).repeat(groups, 1)
    output, lse = attend(stacked, keys, value, 0.0, False, attn_mask=mask, scale=scaling)
    return output.reshape(query.shape), lse.reshape(batch, heads, count)


def merged(parts: list[Part]) -> torch.Tensor:
    """Return the attention to all keys of some parts, of the same queries; each sees a key in one part at least."""
    if len(parts) == 1:
        return parts[0][0]
    shares = torch.stack([lse for _, lse in parts]).softmax(0)[..., None]  # of each part, in the softmax over all
    output = parts[0][0] * shares[0]
    for (part, _), share in zip(parts[1:], shares[1:], strict=True):
        output += part * share
    return output.to(parts[0][0].dtype)


def attend_in_two_parts(
    query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attend with queries that are the last of their keys: to all keys before them, and among themselves.

    Args:
        query: ``(batch, heads, num_queries, head_dim)``.
        keys: ``(batch, kv_heads, num_keys, head_dim)``, more than there are queries.
        value: The same shape.
        scaling: Multiplies the logits; None for ``head_dim ** -0.5``.

    Returns:
        ``(batch, num_queries, heads, head_dim)``.
    """
    border = keys.shape[2] - query.shape[2]
    before = attend_part(query, keys[:, :, :border], value[:, :, :border], scaling)
    among = attend_part(query, keys[:, :, border:], value[:, :, border:], scaling, is_causal=True)
    return merged([before, among]).transpose(1, 2).contiguous()
