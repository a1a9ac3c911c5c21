"""Attention to spans of keys, with one softmax over all of them, by the fastest kernel that each device has.

A call of a kernel gives the output for some of the keys and the logsumexp of their logits; by their logsumexp, outputs
for different keys are weighted to the output for all of them (Dao 2023, FlashAttention-2, section 3.1).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import dropout, pad, scaled_dot_product_attention
from transformers.integrations.flex_attention import compile_friendly_flex_attention, get_flex_attention_lse_kwargs

logger = logging.getLogger(__name__)

# Output ``(batch, heads, num_queries, head_dim)`` and float32 logsumexp ``(batch, heads, num_queries)`` of a call.
Part = tuple[torch.Tensor, torch.Tensor]
# The logit of a key that is not seen. Not minus infinity: a query that sees no key must not make others NaN, and of
# minus infinity the CPU's kernel gives the logsumexp 0.
_UNSEEN = -1e30


def merged(parts: Sequence[Part]) -> Part:
    """Return the attention to the keys of all parts, which are of the same queries and of different keys."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts]).clamp(min=_UNSEEN)
    total = lses.logsumexp(0)
    shares = (lses - total).exp()[..., None]
    output = parts[0][0] * shares[0]
    for (part, _), share in zip(parts[1:], shares[1:], strict=True):
        output = output + part * share
    return output.to(parts[0][0].dtype), total


# ---- the CPU: one call of its flash kernel for each tile ----


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


def _flash_on_cpu() -> tuple[Any, Any] | None:
    """Return PyTorch's flash kernel for CPUs and the kernel of its gradients; None where PyTorch lacks them.

    ``scaled_dot_product_attention`` calls the same kernel, but does not return the logsumexp.
    """
    name = "_scaled_dot_product_flash_attention_for_cpu"
    kernels = tuple(getattr(torch.ops.aten, each, None) for each in (name, f"{name}_backward"))
    return None if None in kernels else kernels  # type: ignore[return-value]  # two, neither None


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
        mask = zeros.masked_fill(~tile.seen, _UNSEEN).repeat(heads // kv_heads, 1)
    return _stacked(query, kv_heads), keys, value, mask


def _stacked(states: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return ``(batch, heads, num_queries, ...)`` as ``(batch, kv_heads, heads / kv_heads * num_queries, ...)``."""
    return states.reshape(states.shape[0], kv_heads, -1, *states.shape[3:])


def _cpu_kernel(query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, scaling: float, tile: Tile) -> Part:
    """Attend to the keys of a tile."""
    shape, flash = query.shape, _flash_on_cpu()
    query, keys, value, mask = _arranged(query, keys, value, tile)
    if flash is not None:
        output, lse = flash[0](query, keys, value, 0.0, tile.is_causal, attn_mask=mask, scale=scaling)
    else:
        output, lse = _in_pytorch(query, keys, value, mask, scaling, tile.is_causal)
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
    shape, kv_heads, flash = query.shape, keys.shape[1], _flash_on_cpu()
    query, keys, value, mask = _arranged(query, keys, value, tile)
    gradient, output, lse = (_stacked(states, query.shape[1]).contiguous() for states in (gradient, output, lse))
    if flash is not None:
        found = flash[1](gradient, query, keys, value, output, lse, 0.0, tile.is_causal, attn_mask=mask, scale=scaling)
    else:
        found = _gradients_in_pytorch(gradient, query, keys, value, output, lse, mask, scaling, tile.is_causal)
    of_query, *of_keys = found
    # Keys that were repeated for the heads that share them get the sum.
    summed = [each.unflatten(1, (kv_heads, -1)).sum(2) if each.shape[1] > kv_heads else each for each in of_keys]
    return of_query.reshape(shape), summed[0], summed[1]


def _scores_of_tile(
    query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, scaling: float, is_causal: bool
) -> torch.Tensor:
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(exact) @ keys.to(exact).transpose(2, 3) * scaling
    if is_causal:
        return scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), _UNSEEN)
    return scores if mask is None else scores + mask


def _in_pytorch(
    query: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    is_causal: bool,
) -> Part:
    """Do what the flash kernel does, with all scores of the tile."""
    scores = _scores_of_tile(query, keys, mask, scaling, is_causal)
    return (scores.softmax(-1) @ value.to(scores.dtype)).to(value.dtype), scores.logsumexp(-1)


def _gradients_in_pytorch(
    gradient: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what the kernel of the gradients does (FlashAttention-2, algorithm 2), with all scores of the tile."""
    weights = (_scores_of_tile(query, keys, mask, scaling, is_causal) - lse[..., None]).exp()
    query, keys, value, gradient, output = (
        states.to(weights.dtype) for states in (query, keys, value, gradient, output)
    )
    of_weights = gradient @ value.transpose(2, 3) - (gradient * output).sum(-1, keepdim=True)
    of_scores = weights * of_weights * scaling
    return of_scores @ keys, of_scores.transpose(2, 3) @ query, weights.transpose(2, 3) @ gradient


# ---- queries that are the last of their keys ----


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


# ---- any device: spans of keys ----

# FlexAttention decides for blocks of so many queries and keys whether they are seen.
_FLEX_BLOCK = 128
# Scores of one head that exist at a time, where attention is computed in PyTorch.
_SCORES = 2**22


@dataclass(frozen=True)
class Spans:
    """The keys that each query sees in one way: the real ones at slots ``begins <= key < ends``.

    Attributes:
        begins: int64 ``(rows, num_queries)`` on the CPU; one row if all rows of the batch are alike.
        ends: The same shape.
        real: Bool ``(rows, num_keys)`` on the CPU, False for padding that lies inside of a span; None if there is none.
    """

    begins: torch.Tensor
    ends: torch.Tensor
    real: torch.Tensor | None = None
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return begins, ends and real on a device; copied once, without waiting for the device."""
        if device not in self._made:
            self._made[device] = tuple(
                None if each is None else each.to(device, non_blocking=True)
                for each in (self.begins, self.ends, self.real)
            )
        return self._made[device]  # type: ignore[no-any-return]

    def bounds(self, few: slice) -> tuple[int, int] | None:
        """Return the first key that some queries see and one past the last; None if they see none."""
        key = (few.start, few.stop)
        if key not in self._made:
            begins, ends = self.begins[:, few], self.ends[:, few]
            sees = begins < ends
            self._made[key] = (int(begins[sees].min()), int(ends[sees].max())) if bool(sees.any()) else None
        return self._made[key]  # type: ignore[no-any-return]

    def block_mask(self, batch: int, num_keys: int, device: torch.device, dense: torch.Tensor | None) -> BlockMask:
        """Return FlexAttention's mask, made of the spans' bounds and never of all pairs.

        Args:
            batch: Rows of the batch.
            num_keys: Key slots.
            device: Where the mask is used.
            dense: A further bool mask ``(batch or 1, 1, num_queries, num_keys)``; None if there is none.
        """
        if dense is None and (made := self._made.get((batch, num_keys, device))) is not None:
            return made  # type: ignore[no-any-return]
        begins, ends, real = self.on(device)
        begins, ends = begins.expand(batch, -1), ends.expand(batch, -1)
        real = None if real is None else real.expand(batch, -1)

        def is_seen(row: Any, head: Any, query: Any, key: Any) -> Any:
            seen = (key >= begins[row, query]) & (key < ends[row, query])
            if real is not None:
                seen = seen & real[row, key]
            return seen if dense is None else seen & dense[row, 0, query, key]

        if dense is not None:
            dense = dense.expand(batch, -1, -1, -1)
        some, every = self._blocks(num_keys)
        if dense is not None:
            every = torch.zeros_like(every)
        mask = BlockMask.from_kv_blocks(
            *_indices(some & ~every),
            *_indices(every),
            BLOCK_SIZE=_FLEX_BLOCK,
            mask_mod=is_seen,
            seq_lengths=(self.begins.shape[1], num_keys),
        )
        mask = mask.to(device)
        if dense is None:
            self._made[batch, num_keys, device] = mask
        return mask

    def _blocks(self, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return of which blocks some pair may be seen, and every one is: bool ``(rows, query blocks, key blocks)``."""
        count = self.begins.shape[1]
        query = torch.arange(count + -count % _FLEX_BLOCK).clamp(max=count - 1)  # the last one fills its block up
        shape = (len(self.begins), -1, _FLEX_BLOCK)
        begins, ends = self.begins[:, query].view(shape), self.ends[:, query].view(shape)
        sees = begins < ends
        low = begins.masked_fill(~sees, num_keys).amin(-1, keepdim=True)
        high = ends.masked_fill(~sees, 0).amax(-1, keepdim=True)
        key = torch.arange(0, num_keys, _FLEX_BLOCK)
        some = (key < high) & (key + _FLEX_BLOCK > low)
        every = (key >= begins.amax(-1, keepdim=True)) & (key + _FLEX_BLOCK <= ends.amin(-1, keepdim=True))
        if self.real is not None:
            real = pad(self.real, (0, -num_keys % _FLEX_BLOCK))
            every = every & real.view(len(real), 1, -1, _FLEX_BLOCK).all(-1)
        return some, every


def _indices(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of key blocks of each query block, and their indices: int32, with a dimension for heads."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


@dataclass(frozen=True)
class Extras:
    """Further influences on the weights.

    Attributes:
        softcap: Logits are capped softly at it, as in Gemma 2.
        dense: A mask ``(batch or 1, 1, num_queries, num_keys)``, bool or added to the logits.
        sinks: A learned logit of each head beside those of the keys, ``(heads,)``, as in gpt-oss.
        dropout: Share of the weights to drop.
    """

    softcap: float | None = None
    dense: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Return logits, capped."""
        return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap


def attend_to_spans(
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    value: torch.Tensor,
    spans: Sequence[Spans],
    scaling: float,
    extras: Extras,
    inner: str,
) -> torch.Tensor:
    """Attend to the keys of some spans: by FlexAttention on CUDA, else in PyTorch with a few queries at a time.

    Args:
        queries: For each of the spans, ``(batch, heads, num_queries, head_dim)``.
        keys: The same, ``(batch, kv_heads, num_keys, head_dim)``.
        value: ``(batch, kv_heads, num_keys, head_dim)``.
        spans: Which keys the queries see; no key is seen in two of them.
        scaling: Multiplies the logits.
        extras: What else changes the weights.
        inner: The attention implementation that the user asked for; ``eager`` is computed in PyTorch.

    Returns:
        ``(batch, num_queries, heads, head_dim)``.
    """
    if inner == "eager" or why_not_flex(queries[0], extras) is not None:
        return _few_at_a_time(queries, keys, value, spans, scaling, extras)
    parts = [
        _flex(query, key, value, each, scaling, extras) for query, key, each in zip(queries, keys, spans, strict=True)
    ]
    if extras.sinks is not None:
        parts.append(_sink_part(extras.sinks, parts[0]))
    return merged(parts)[0].transpose(1, 2).contiguous()


def why_not_flex(query: torch.Tensor, extras: Extras) -> str | None:
    """Return why FlexAttention cannot be used; None if it can. What a user may want to change is logged once."""
    if query.device.type != "cuda":
        return f"the device is {query.device.type}"
    if query.shape[2] < _FLEX_BLOCK:
        return "there are few queries"
    reason = None
    if extras.dropout:
        reason = "it has no attention dropout"
    elif extras.dense is not None and extras.dense.dtype != torch.bool:
        reason = "the attention mask is added to the logits"
    elif query.dtype == torch.float64:
        reason = "it has no float64"
    if reason is not None:
        _log_once(f"FlexAttention is not used, because {reason}; attention is computed in PyTorch, which is slower.")
    return reason


@functools.cache
def _log_once(message: str) -> None:
    logger.warning(message)


def _flex(
    query: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, spans: Spans, scaling: float, extras: Extras
) -> Part:
    mask = spans.block_mask(len(query), keys.shape[2], query.device, extras.dense)

    def capped(score: torch.Tensor, *_: Any) -> torch.Tensor:
        return extras.capped(score)

    found = compile_friendly_flex_attention(
        query.to(value.dtype),  # under autocast, norms leave queries and keys in float32
        keys.to(value.dtype),
        value,
        training=torch.is_grad_enabled(),
        score_mod=None if extras.softcap is None else capped,
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
        **get_flex_attention_lse_kwargs(True),
    )
    output, lse = found
    return output, lse if isinstance(lse, torch.Tensor) else lse.lse


def _sink_part(sinks: torch.Tensor, like: Part) -> Part:
    """Return the part of keys whose values are zero and whose logits are learned."""
    output, lse = like
    return torch.zeros_like(output), sinks.to(lse.dtype).view(1, -1, 1).expand(lse.shape)


def _few_at_a_time(
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    value: torch.Tensor,
    spans: Sequence[Spans],
    scaling: float,
    extras: Extras,
) -> torch.Tensor:
    count = queries[0].shape[2]
    step = max(1, _SCORES // value.shape[2])
    done = []
    for first in range(0, count, step):
        few = slice(first, min(first + step, count))
        done.append(_few(few, queries, keys, value, spans, scaling, extras))
    return done[0] if len(done) == 1 else torch.cat(done, dim=1)


def _few(
    few: slice,
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    value: torch.Tensor,
    spans: Sequence[Spans],
    scaling: float,
    extras: Extras,
) -> torch.Tensor:
    """Attend with the queries of a range of indices; ``(batch, num_queries, heads, head_dim)``."""
    batch, heads = queries[0].shape[:2]
    kv_heads, count = value.shape[1], few.stop - few.start
    scores, visible, ranges = [], [], []
    for query, key, each in zip(queries, keys, spans, strict=True):
        if (bounds := each.bounds(few)) is None:
            continue
        low, high = bounds
        block = _stacked(query[:, :, few], kv_heads) @ key[:, :, low:high].transpose(2, 3)
        scores.append(block.view(batch, heads, count, high - low))
        ranges.append((low, high))
        visible.append(each)
    logits = extras.capped(_cat(scores).float() * scaling)
    if count > 1 or len(spans[0].begins) > 1 or spans[0].real is not None:  # otherwise the ranges are its own
        seen = [_seen(each, few, *bounds, value.device) for each, bounds in zip(visible, ranges, strict=True)]
        logits = logits.masked_fill(~_cat(seen), _UNSEEN)
    if extras.dense is not None:
        dense = _of_ranges(extras.dense[:, :, few], ranges, dim=3)
        logits = logits.masked_fill(~dense, _UNSEEN) if dense.dtype == torch.bool else logits + dense.float()
    if extras.sinks is not None:
        logits = _cat([logits, extras.sinks.float().view(1, -1, 1, 1).expand(batch, heads, count, 1)])
    weights = logits.softmax(-1).to(value.dtype)
    if extras.sinks is not None:
        weights = weights[..., :-1]
    if extras.dropout:
        weights = dropout(weights, extras.dropout)
    output = _stacked(weights, kv_heads) @ _of_ranges(value, ranges, dim=2)
    return output.view(batch, heads, count, -1).transpose(1, 2)


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=-1)


def _of_ranges(states: torch.Tensor, ranges: Sequence[tuple[int, int]], dim: int) -> torch.Tensor:
    """Return the states of some ranges of keys, one after another; without a copy if each begins where one ends."""
    if all(end == begin for (_, end), (begin, _) in pairwise(ranges)):
        return states.narrow(dim, ranges[0][0], ranges[-1][1] - ranges[0][0])
    return torch.cat([states.narrow(dim, low, high - low) for low, high in ranges], dim=dim)


def _seen(spans: Spans, few: slice, low: int, high: int, device: torch.device) -> torch.Tensor:
    """Return a mask of the keys ``low`` to ``high`` of some queries, bool ``(rows, 1, num_queries, high - low)``."""
    begins, ends, real = spans.on(device)
    key = torch.arange(low, high, device=device)
    seen = (key >= begins[:, few, None]) & (key < ends[:, few, None])
    if real is not None:
        seen = seen & real[:, None, low:high]
    return seen[:, None]
