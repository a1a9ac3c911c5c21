"""Attention on a CPU by PyTorch's flash kernel, one call for each tile of queries and keys, with its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from hf_posenc.attention.merging import UNSEEN, Part, merged, stacked_heads

# What scaled_dot_product_attention calls on a CPU; it does not return the logsumexp. None where PyTorch lacks it.
_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_FLASH: Any = getattr(torch.ops.aten, _NAME, None)
_FLASH_BACKWARD: Any = getattr(torch.ops.aten, f"{_NAME}_backward", None)


@dataclass(frozen=True)
class Tile:
    """Queries and keys of one call of the CPU's kernel. All numbers are positions in a document.

    Attributes:
        way: Index of the way in which queries and keys are rotated.
        first: The first query.
        last: One past the last query.
        begin: The first key.
        end: One past the last key.
        seen: Bool ``(last - first, end - begin)``; None for all. A query may see no key here.
        is_causal: The keys are the queries themselves, and each sees those up to its own; ``seen`` is None then.
    """

    way: int
    first: int
    last: int
    begin: int
    end: int
    seen: torch.Tensor | None = None
    is_causal: bool = False


def can_tile(query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether ``attend_in_tiles`` takes these states: on a CPU, of one dtype and one head_dim."""
    if _FLASH is None:
        return False
    alike = query.dtype == keys.dtype == value.dtype and value.shape[-1] == query.shape[-1]
    return query.device.type == "cpu" and alike


def attend_in_tiles(
    blocks: Sequence[Sequence[Tile]],
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    value: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attend tile by tile on a CPU; no score is kept, for the gradients neither.

    Args:
        blocks: The tiles of each block of queries, in order; each query sees at least one key in one of them.
        queries: For each way, ``(batch, heads, num_queries, head_dim)``; the first is at the first tile's ``first``.
        keys: For each way, ``(batch, kv_heads, num_keys, head_dim)``; the first is at position 0.
        value: ``(batch, kv_heads, num_keys, head_dim)``.
        scaling: Multiplies the logits.

    Returns:
        ``(batch, heads, num_queries, head_dim)``.
    """
    return _Tiles.apply(blocks, scaling, value, *queries, *keys)  # type: ignore[no-any-return, no-untyped-call]  # PyTorch leaves it untyped


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: Sequence[Sequence[Tile]], scaling: float, value: torch.Tensor, *states: torch.Tensor
    ) -> torch.Tensor:
        start = blocks[0][0].first
        output = torch.empty_like(states[0])
        lse = output.new_empty(output.shape[:3], dtype=torch.promote_types(output.dtype, torch.float32))
        for tiles in blocks:
            rows = slice(tiles[0].first - start, tiles[0].last - start)
            parts = []
            for tile in tiles:
                query, key, here = _states_of(tile, start, value, states)
                parts.append(_cpu_kernel(query, key, here, scaling, tile))
            output[:, :, rows], lse[:, :, rows] = merged(parts)
        ctx.blocks, ctx.scaling = blocks, scaling
        ctx.save_for_backward(output, lse, value, *states)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        output, lse, value, *states = ctx.saved_tensors
        start, ways = ctx.blocks[0][0].first, len(states) // 2
        # Sums over many tiles, which half precision would round each time.
        exact = torch.promote_types(value.dtype, torch.float32)
        of_value, *of_states = (torch.zeros_like(each, dtype=exact) for each in (value, *states))
        for tile in (tile for tiles in ctx.blocks for tile in tiles):
            rows, columns = slice(tile.first - start, tile.last - start), slice(tile.begin, tile.end)
            query, key, here = _states_of(tile, start, value, states)
            # With output and logsumexp of all keys, the kernel's probabilities are those of the softmax over all.
            known = (gradient[:, :, rows], output[:, :, rows], lse[:, :, rows])
            of_query, of_key, of_here = _cpu_gradients(query, key, here, ctx.scaling, tile, *known)
            of_states[tile.way][:, :, rows] += of_query
            of_states[ways + tile.way][:, :, columns] += of_key
            of_value[:, :, columns] += of_here
        return None, None, of_value.to(value.dtype), *(each.to(value.dtype) for each in of_states)


def _states_of(
    tile: Tile, start: int, value: torch.Tensor, states: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the queries, keys and values of a tile; ``states`` are the queries of all ways, then the keys."""
    query, keys = states[tile.way], states[len(states) // 2 + tile.way]
    rows, columns = slice(tile.first - start, tile.last - start), slice(tile.begin, tile.end)
    return query[:, :, rows], keys[:, :, columns], value[:, :, columns]


def _arranged(
    query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, tile: Tile
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return queries, keys and values with as many heads each, and the mask that is added to the logits.

    Queries that share a key head are stacked to more queries of it, so that no key is repeated; for causal attention,
    where the kernel knows the order of the queries, keys are repeated.
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    if tile.is_causal:
        keys, value = (states.repeat_interleave(heads // kv_heads, dim=1) for states in (keys, value))
        return query, keys, value, None
    mask = None
    if tile.seen is not None:
        zeros = torch.zeros(tile.seen.shape, dtype=torch.promote_types(query.dtype, torch.float32))
        mask = zeros.masked_fill(~tile.seen, UNSEEN).repeat(heads // kv_heads, 1)
    return stacked_heads(query, kv_heads), keys, value, mask


def _cpu_kernel(query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, scaling: float, tile: Tile) -> Part:
    """Attend to the keys of a tile."""
    shape = query.shape
    query, keys, value, mask = _arranged(query, keys, value, tile)
    output, lse = _FLASH(query, keys, value, 0.0, tile.is_causal, attn_mask=mask, scale=scaling)
    return output.reshape(shape), lse.reshape(shape[:3])


def _cpu_gradients(
    query: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    tile: Tile,
    gradient: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of a tile's queries, keys and values; the last three arguments are of all keys."""
    shape, kv_heads = query.shape, keys.shape[1]
    query, keys, value, mask = _arranged(query, keys, value, tile)
    gradient, output, lse = (stacked_heads(states, query.shape[1]).contiguous() for states in (gradient, output, lse))
    of_query, *of_keys = _FLASH_BACKWARD(
        gradient, query, keys, value, output, lse, 0.0, tile.is_causal, attn_mask=mask, scale=scaling
    )
    # Keys that were repeated for the heads that share them get the sum.
    summed = [each.unflatten(1, (kv_heads, -1)).sum(2) if each.shape[1] > kv_heads else each for each in of_keys]
    return of_query.reshape(shape), summed[0], summed[1]


def attend_to_all_before(
    query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor | None:
    """Attend causally with queries that are the last of their keys, without a mask ``(num_queries, num_keys)``.

    Args:
        query: ``(batch, heads, num_queries, head_dim)``.
        keys: ``(batch, kv_heads, num_keys, head_dim)``, more than there are queries.
        value: The same shape.
        scaling: Multiplies the logits.

    Returns:
        ``(batch, num_queries, heads, head_dim)``; None where no kernel takes these states.
    """
    first, stop = keys.shape[2] - query.shape[2], keys.shape[2]
    if can_tile(query, keys, value):
        tiles = [Tile(0, first, stop, 0, first), Tile(0, first, stop, first, stop, is_causal=True)]
        return attend_in_tiles([tiles], [query], [keys], value, scaling).transpose(1, 2).contiguous()
    if query.device.type != "cuda":
        return None
    groups, is_half = query.shape[1] // keys.shape[1], query.dtype in (torch.float16, torch.bfloat16)
    if groups > 1 and not is_half:  # the kernel for float32 takes no grouped keys
        keys, value = (states.repeat_interleave(groups, dim=1) for states in (keys, value))
    bias = causal_lower_right(query.shape[2], stop)
    output = scaled_dot_product_attention(query, keys, value, bias, scale=scaling, enable_gqa=groups > 1 and is_half)
    return output.transpose(1, 2).contiguous()
