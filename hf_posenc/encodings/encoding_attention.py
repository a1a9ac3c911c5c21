"""Attention that rotates pairs or adds a bias, where the model's own RoPE rotates nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import StaticLayer

from hf_posenc.attention.inner import AttentionCall, Output, piece_mask
from hf_posenc.attention.interface import PASS, PositionalAttention, split_mask
from hf_posenc.attention.layout import Forward, Layout, written_slots
from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.encodings.modules import AddedToLogits, RotatesPairs

# Queries of one inner call with a bias, so that none is [length, length].
QUERY_CHUNK = 512
# Elements of the biases that the layers of one forward share; what goes beyond is made anew in each.
_KEPT_BIASES = 2**25


@dataclass
class BiasedForward(Forward):
    """The data that the layers of one forward share; ``biases`` are those made so far."""

    biases: dict[Any, torch.Tensor] = field(default_factory=dict)


class EncodingAttention(PositionalAttention[BiasedForward]):
    """An encoding that every attention layer applies, and the positions of a forward's tokens."""

    def __init__(self, encoding: AddedToLogits | RotatesPairs, inner: str) -> None:
        """Make one; ``inner`` is the attention implementation that was in use."""
        super().__init__(inner)
        self.encoding = encoding
        self.callers: set[nn.Module] | None = None  # the layers that called it, while a probe collects them

    def look_at(self, position_ids: torch.Tensor, num_slots: int, states: torch.Tensor | None) -> BiasedForward:
        return BiasedForward(position_ids, num_slots, states)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # reads positions: one graph break a layer
    def attend(self, call: AttentionCall) -> Output:
        """Attend as the encoding says; the result is that of Transformers' attention functions."""
        query, key, value = call.query, call.key, call.value
        states, dense = split_mask(call.mask)
        if dense is not None and isinstance(self.cache_layer(call.module), StaticLayer):
            key, value, dense = written_slots(key, value, dense)
        elif dense is not None and self.cache is None and key.shape[2] > query.shape[2] and not _seen(dense[..., -1]):
            raise InvalidRequestError(
                "a compiled forward does not hand on its static cache, so the positions of its keys are not known "
                "beside sliding windows or packed documents. Take a DynamicCache, or do not compile."
            )
        forward = self.read(call.kwargs["position_ids"], key.shape[2], states)
        layout = forward.layout
        key, value = key[:, :, : layout.num_keys], value[:, :, : layout.num_keys]
        if call.kind != PASS:
            if self.callers is not None:
                self.callers.add(call.module)
            if not isinstance(self.encoding, RotatesPairs):
                return self._biased(call._replace(key=key, value=value, mask=dense), forward)
            queries = layout.positions[:, layout.first_query :]
            query, key = self.encoding(query, key, queries.to(query.device), layout.positions.to(query.device))
        mask = self._mask(query, layout, dense)
        return call._replace(query=query, key=key, value=value, mask=mask).by(self.inner)

    def _mask(self, query: torch.Tensor, layout: Layout, dense: torch.Tensor | None) -> Any:
        """Return the inner implementation's mask of all queries."""
        if dense is not None:
            return dense
        real = None if layout.real is None else layout.real.to(query.device)
        return piece_mask(self.inner, query.shape[2], layout.num_keys, real, query)

    def _biased(self, call: AttentionCall, forward: BiasedForward) -> Output:
        query, dense = call.query, call.mask
        if dense is not None and forward.looks_ahead(dense):
            raise InvalidRequestError(
                "the attention mask lets tokens see later ones, as those of an image or of a prefix do, and the "
                "encoding has no bias for later tokens. Feed text without such a mask, or call unpatch_model."
            )
        done: list[Output] = []
        layout = forward.layout
        first, total = layout.first_query, query.shape[2]
        step = total if self.inner == "eager" else QUERY_CHUNK  # eager hands out the weights of all keys
        for begin in range(0, total, step):
            end = min(begin + step, total)
            stop = layout.num_keys if step == total else first + end
            bias = self._bias(forward, first + begin, first + end, stop, query)
            seen = None if dense is None else dense[:, :, begin:end, :stop]
            logits = _masked(bias, seen if seen is not None else _causal(layout, first + begin, first + end, stop))
            key, value = call.key[:, :, :stop], call.value[:, :, :stop]
            part = call._replace(query=query[:, :, begin:end], key=key, value=value, mask=logits)
            done.append(part.by(self.inner))
        return (torch.cat([output for output, _ in done], dim=1), done[0][1] if len(done) == 1 else None)

    def _bias(self, forward: BiasedForward, begin: int, end: int, stop: int, like: torch.Tensor) -> torch.Tensor:
        """Return the bias of the queries in slots ``begin`` to ``end`` on keys before ``stop``, ``like``'s dtype."""
        named = (begin, end, stop, like.dtype, like.device, torch.is_grad_enabled())
        if named in forward.biases:
            return forward.biases[named]
        positions = forward.layout.positions.to(like.device)
        bias: torch.Tensor = self.encoding(positions[:, begin:end], positions[:, :stop]).to(like.device, like.dtype)
        # One with a gradient belongs to the layer that called: under checkpointing each is run again by itself.
        kept = sum(each.numel() for forward_seen in self.forwards for each in forward_seen.biases.values())
        if not bias.requires_grad and kept + bias.numel() <= _KEPT_BIASES:
            forward.biases[named] = bias
        return bias


def _seen(mask: torch.Tensor) -> bool:
    """Return whether a mask, bool or added, lets anything through."""
    return bool((mask if mask.dtype == torch.bool else mask == 0).any())


def _causal(layout: Layout, begin: int, end: int, stop: int) -> torch.Tensor:
    """Return a mask of the keys before ``stop`` for the queries ``begin`` to ``end``, bool, (rows, 1, ., .)."""
    slots = torch.arange(stop)
    seen = (slots <= torch.arange(begin, end)[:, None])[None, None]
    return seen if layout.real is None else seen & layout.real[:, None, None, :stop]


def _masked(bias: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return a bias with a mask, bool or added, in it."""
    seen = seen.to(bias.device)
    if seen.dtype == torch.bool:
        return torch.where(seen, bias, torch.finfo(bias.dtype).min)
    return (bias + seen.to(bias.dtype)).clamp(min=torch.finfo(bias.dtype).min)
