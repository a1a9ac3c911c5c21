"""Attention to spans of keys on any device: by FlexAttention on CUDA, else in PyTorch with a few queries at a time."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import dropout, pad
from transformers.integrations.flex_attention import compile_friendly_flex_attention, get_flex_attention_lse_kwargs

from hf_posenc.attention.merging import UNSEEN, Part, merged, stacked_heads

logger = logging.getLogger(__name__)

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

        some, every = self._blocks(num_keys)
        if dense is not None:
            dense, every = dense.expand(batch, -1, -1, -1), torch.zeros_like(every)
        mask = BlockMask.from_kv_blocks(
            *_indices(some & ~every),
            *_indices(every),
            BLOCK_SIZE=_FLEX_BLOCK,
            mask_mod=is_seen,
            seq_lengths=(self.begins.shape[1], num_keys),
        ).to(device)
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
        count, step = queries[0].shape[2], max(1, _SCORES // value.shape[2])
        chunks = [slice(first, min(first + step, count)) for first in range(0, count, step)]
        done = [_few(few, queries, keys, value, spans, scaling, extras) for few in chunks]
        return done[0] if len(done) == 1 else torch.cat(done, dim=1)
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
        block = stacked_heads(query[:, :, few], kv_heads) @ key[:, :, low:high].transpose(2, 3)
        scores.append(block.view(batch, heads, count, high - low))
        ranges.append((low, high))
        visible.append(each)
    logits = extras.capped(_cat(scores).float() * scaling)
    if count > 1 or len(spans[0].begins) > 1 or spans[0].real is not None:  # otherwise the ranges are its own
        seen = [_seen(each, few, *bounds, value.device) for each, bounds in zip(visible, ranges, strict=True)]
        logits = logits.masked_fill(~_cat(seen), UNSEEN)
    if extras.dense is not None:
        dense = _of_ranges(extras.dense[:, :, few], ranges, dim=3)
        logits = logits.masked_fill(~dense, UNSEEN) if dense.dtype == torch.bool else logits + dense.float()
    if extras.sinks is not None:
        logits = _cat([logits, extras.sinks.float().view(1, -1, 1, 1).expand(batch, heads, count, 1)])
    weights = logits.softmax(-1).to(value.dtype)
    if extras.sinks is not None:
        weights = weights[..., :-1]
    if extras.dropout:
        weights = dropout(weights, extras.dropout)
    output = stacked_heads(weights, kv_heads) @ _of_ranges(value, ranges, dim=2)
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
