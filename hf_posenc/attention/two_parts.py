"""Lower-right causal attention in two calls without a mask: to all keys before the queries, and among themselves."""

from __future__ import annotations

import torch


def can_attend_in_two_parts(query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether ``attend_in_two_parts`` applies: on a CPU, without gradients, whose kernel says its logsumexp."""
    needs_gradient = torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or value.requires_grad)
    return query.device.type == "cpu" and not needs_gradient and value.shape[-1] == query.shape[-1]


def attend_in_two_parts(
    query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attend with queries that are the last of their keys; the two results are weighed by their logsumexp.

    Args:
        query: ``(batch, heads, num_queries, head_dim)``.
        keys: ``(batch, kv_heads, num_keys, head_dim)``, more than there are queries.
        value: The same shape.
        scaling: Multiplies the logits; None for ``head_dim ** -0.5``.

    Returns:
        ``(batch, num_queries, heads, head_dim)``.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    border, groups = keys.shape[2] - query.shape[2], query.shape[1] // keys.shape[1]
    # Without a mask, queries that share a head's keys are just more queries: only the few keys among them are repeated.
    stacked = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
    before, lse_before = attend(stacked, keys[:, :, :border], value[:, :, :border], 0.0, False, scale=scaling)
    near = (states[:, :, border:].repeat_interleave(groups, dim=1) for states in (keys, value))
    among, lse_among = attend(query, *near, 0.0, True, scale=scaling)
    before, lse_before = before.reshape(among.shape), lse_before.reshape(lse_among.shape)
    share = torch.sigmoid(lse_before - lse_among)[..., None]  # of the keys before, in the softmax over all
    output: torch.Tensor = (before * share + among * (1 - share)).to(query.dtype).transpose(1, 2)
    return output.contiguous()
