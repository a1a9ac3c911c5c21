"""One layer's attention in pieces: queries of one stage against the keys before them, rotated by that stage.

A piece is one call of the inner attention, or of a kernel for queries that are the last of their keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad

from hf_posenc.attention.inner import AttentionCall, Output, inner_attention, piece_mask
from hf_posenc.attention.layout import StagedForward
from hf_posenc.attention.rotation import Tables
from hf_posenc.attention.spans import Extras
from hf_posenc.attention.tiles import attend_to_all_before, can_tile
from hf_posenc.errors import InvalidRequestError, argument

if TYPE_CHECKING:
    from hf_posenc.attention.rotating_attention import RotatingAttention

# Queries of one inner call that needs a mask, so that none is [length, length].
QUERY_CHUNK = 512
# Passed to attention functions as the layer where keys have as many heads as queries already.
_UNGROUPED = nn.Module()
_ALL = slice(None)


class Pieces:
    """The calls of the inner attention that make one layer's attention."""

    def __init__(self, attention: RotatingAttention, forward: StagedForward, call: AttentionCall) -> None:
        """Hold what they share.

        Args:
            attention: What the model attends by.
            forward: The positions of queries and keys.
            call: Of the layer; its mask is ``(batch or 1, 1, num_queries, num_keys)``, for other patterns than causal
                ones, or None.
        """
        self.attention, self.forward, self.call = attention, forward, call
        self.query, self.key = call.query, call.key
        self.dense: torch.Tensor | None = call.mask
        self.value = call.value[:, :, : forward.layout.num_keys]

    @property
    def scaling(self) -> float:
        """The factor of the logits."""
        return float(self.call.kwargs.get("scaling") or self.query.shape[-1] ** -0.5)

    @property
    def extras(self) -> Extras:
        """The further influences on the weights; sdpa has no cap, and Transformers 5.0 leaves it out there."""
        return Extras(
            self.call.kwargs.get("softcap") if self.attention.inner != "sdpa" else None,
            self.dense,
            self.call.kwargs.get("s_aux"),
            float(self.call.kwargs.get("dropout") or 0.0),
        )

    @property
    def cache_layer(self) -> Any:
        """The layer of the KV cache; None without one, and of a cache that moves its layers off the device."""
        moves = getattr(self.attention.cache, "offloading", False)
        return None if moves else self.attention.cache_layer(self.call.module)

    def tempered(
        self, query: torch.Tensor, positions: torch.Tensor, slots: slice, row: int | None = None
    ) -> torch.Tensor:
        """Multiply queries by the rule's factors at their positions in the row or document.

        Args:
            query: ``(batch, heads, num_queries, head_dim)``.
            positions: int64 ``(num_queries,)`` or ``(rows, num_queries)``, on the CPU.
            slots: Those of the queries; with ``row`` they name what is made once for all layers.
            row: The row of the layout, None for all.
        """
        made, key = self.forward.factors, (row, slots.start, slots.stop, query.device)
        if key not in made:
            factors = self.attention.method.query_factors(self.attention.spec, positions)
            if factors is not None:
                shape = (1, 1, -1, 1) if factors.dim() == 1 else (len(factors), 1, -1, 1)
                factors = factors.view(shape).float().to(query.device, non_blocking=True)
            made[key] = factors
        return query if (factors := made[key]) is None else (query * factors).to(query.dtype)

    def to_positions(self, slots: slice, positions: torch.Tensor, device: torch.device) -> Tables:
        """Return the cos and sin that rotate the states of some slots further, from where the model rotated them.

        Args:
            slots: Which.
            positions: To which positions, ``(rows, length)``, which may be fractions.
            device: Where the states are.
        """
        given = self.forward.layout.positions[:, slots].to(device, non_blocking=True)
        inv_freq, factor = self.attention.frequencies(0, device)
        factors = torch.full((len(given),), factor, device=device)
        return self.attention.rotation_tables(given, positions.to(device, non_blocking=True), inv_freq[None], factors)

    def dense_rows(self, index: slice, few: slice) -> torch.Tensor | None:
        """Return a mask's rows for some queries, bool or added to the logits; None if the mask is plainly causal."""
        if self.dense is None:
            return None
        return (self.dense if len(self.dense) == 1 else self.dense[index])[:, :, few]

    def untouched(self) -> Output:
        """Attend with the queries and keys that the model computed, without rotating them again."""
        return self._call(self.query, self.key[:, :, : self.forward.layout.num_keys], self.value, self._whole_mask())

    def whole(self, stages: tuple[int, ...]) -> Output:
        """Attend in one piece: all queries of a row are in one stage."""
        layout = self.forward.layout
        first, stop = layout.first_query, layout.num_keys
        query = self._rotated(self.query, stages, first, stop, of_queries=True)
        query = self.tempered(query, layout.row_positions[:, first:stop], slice(first, stop))
        keys = self._rotated_keys(stages, stop)
        if self.dense is None and any(stages) and first and query.shape[2] > 1:
            return self._in_chunks(query, keys, self.value, self.forward.real_on(query.device), None)
        return self._call(query, keys, self.value, self._whole_mask())

    def by_stage(self) -> Output:
        """Attend stage by stage; rows at other positions than the others, each alone."""
        layout, batch = self.forward.layout, len(self.query)
        if "flash" in self.attention.inner and self.dense is None and layout.has_documents():
            raise InvalidRequestError(
                "FlashAttention tells packed documents apart by position_ids, which a part of the queries cannot "
                f"carry. Load the model with {argument('attn_implementation', 'sdpa')} to train on packed documents "
                "with this rule."
            )
        if len(layout.positions) == 1:
            return self._row(0, slice(None))
        rows = [self._row(row, slice(row, row + 1)) for row in range(batch)]
        weights = [w for _, w in rows if w is not None]
        return torch.cat([output for output, _ in rows]), torch.cat(weights) if weights else None

    def _row(self, row: int, index: slice) -> Output:
        layout = self.forward.layout
        first, start, stop = layout.first_query, layout.starts[row], layout.stops[row]
        query, value = self.query[index], self.value[index]
        dense = self.dense_rows(index, slice(None))
        alone = len(layout.positions) == 1
        done: list[Output] = []
        for begin, end, stage in self.forward.runs[row]:
            stages = (stage,) * len(layout.positions)
            few = query[:, :, begin - first : end - first]
            rotated = self._rotated(few, stages, begin, end, index, of_queries=True)
            rotated = self.tempered(rotated, layout.row_positions[row, begin:end], slice(begin, end), row)
            keys = self._rotated_keys(stages, end) if alone else self._rotated(self.key[index], stages, 0, end, index)
            real = self.forward.real_on(query.device) if layout.has_gaps else None
            real = None if real is None else real[row : row + 1, start:end]
            mask = None if dense is None else dense[:, :, begin - first : end - first, start:end]
            done.append(self._in_chunks(rotated, keys[:, :, start:], value[:, :, start:end], real, mask))
        if not done:  # nothing but padding
            shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
            return query.new_zeros(shape), None
        begin = max(start, first)
        return _joined(done, begin - first, layout.num_keys - stop, start, layout.num_keys)

    def _in_chunks(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        value: torch.Tensor,
        real: torch.Tensor | None,
        dense: torch.Tensor | None,
    ) -> Output:
        """Attend a stretch of queries that are the last of their keys, without a mask of all of them at once."""
        num_queries, offset = query.shape[2], keys.shape[2] - query.shape[2]
        is_plain, inner = dense is None and real is None, self.attention.inner
        if is_plain and offset > 0 and num_queries > 1 and self._is_plain_sdpa():
            output = attend_to_all_before(query, keys, value, self.scaling)
            if output is not None:
                return output, None
        step = QUERY_CHUNK if inner == "sdpa" and (offset or not is_plain) else num_queries
        module = self.call.module
        if step < num_queries and keys.shape[1] < query.shape[1]:
            # sdpa repeats grouped keys itself where there is a mask, but for each chunk.
            groups = query.shape[1] // keys.shape[1]
            keys, value = keys.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
            module = _UNGROUPED
        done = []
        for begin in range(0, num_queries, step):
            part = query[:, :, begin : begin + step]
            stop = offset + min(begin + step, num_queries)
            if dense is not None:
                mask = dense[:, :, begin : begin + step, :stop]
            else:
                mask = piece_mask(inner, part.shape[2], stop, None if real is None else real[:, :stop], part)
            done.append(self._call(part, keys[:, :, :stop], value[:, :, :stop], mask, module))
        return done[0] if len(done) == 1 else _joined(done, 0, 0, 0, keys.shape[2])

    def _is_plain_sdpa(self) -> bool:
        """Return whether the inner attention is sdpa with nothing but scaled logits and a softmax."""
        return self.attention.inner == "sdpa" and self.extras.sinks is None and not self.extras.dropout

    def can_tile(self) -> bool:
        """Return whether attention can be computed tile by tile."""
        plain = self.dense is None and not self.forward.layout.has_gaps and self._is_plain_sdpa()
        return plain and self.query.shape[2] > 1 and can_tile(self.query, self.key, self.value)

    def _whole_mask(self) -> Any:
        if self.dense is not None:
            return self.dense
        layout = self.forward.layout
        key = (self.attention.inner, self.query.dtype, self.query.device)
        if key not in self.forward.masks:
            self.forward.masks[key] = piece_mask(
                self.attention.inner,
                self.query.shape[2],
                layout.num_keys,
                self.forward.real_on(self.query.device),
                self.query,
            )
        return self.forward.masks[key]

    def _rotated(
        self,
        states: torch.Tensor,
        stages: tuple[int, ...],
        start: int,
        stop: int,
        index: slice = _ALL,
        of_queries: bool = False,
    ) -> torch.Tensor:
        """Rotate the states of a range of slots on, of some rows; in stage 0 they are rotated as they should be."""
        if not any(stages):
            return states[:, :, : stop - start]
        cos, sin = self.attention.tables(self.forward, stages, start, stop, states.device, of_queries)
        return self.attention.rotation.rotate(states[:, :, : stop - start], (cos[index], sin[index]))

    def _rotated_keys(self, stages: tuple[int, ...], stop: int) -> torch.Tensor:
        if not any(stages):
            return self.key[:, :, :stop]

        def rotate(keys: torch.Tensor, start: int, end: int) -> torch.Tensor:
            return self._rotated(keys, stages, start, end)

        signature = (stages, self.forward.layout.bases)
        return self.attention.rotated.at(self.cache_layer, self.key, signature, stop, rotate)

    def _call(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, module: nn.Module | None = None
    ) -> Output:
        """Call the inner attention; ``module`` is given for a part of the queries."""
        # Positions of all queries say nothing of some: flash attention would take them for packed documents.
        kwargs = self.call.kwargs if module is None else {**self.call.kwargs, "position_ids": None}
        return inner_attention(self.attention.inner, self.call.module)(
            module or self.call.module, query, key, value, mask, **kwargs
        )


def _joined(done: list[Output], before: int, after: int, start: int, num_keys: int) -> Output:
    """Put the pieces together again: outputs ``(batch, queries, heads, dim)``, zeros for queries that are padding."""
    output = done[0][0] if len(done) == 1 else torch.cat([output for output, _ in done], dim=1)
    output = pad(output, (0, 0, 0, 0, before, after)) if before or after else output
    if done[0][1] is None:
        return output, None
    widened = [pad(w, (start, num_keys - start - w.shape[-1])) for _, w in done if w is not None]
    return output, pad(torch.cat(widened, dim=2), (0, 0, before, after))
