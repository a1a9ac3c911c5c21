"""One layer's attention where near and far keys are rotated differently: one softmax over all.

Without gradients on a CPU in calls of its flash kernel, one for each tile of a region; else in PyTorch, a few queries
at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import dropout, pad

from hf_posenc.attention.pieces import Output, Pieces, attend_part, merged
from hf_posenc.attention.rotation import Tables
from hf_posenc.methods.base import Region, Regions

# Queries of one block, where the edge of a region moves with the query: each edge costs as many keys in vain.
BLOCK = 256


@dataclass(frozen=True)
class Tile:
    """Keys at positions ``begin <= key < end``, to be attended to in one call.

    Attributes:
        begin: The first.
        end: One past the last.
        seen: Bool ``(num_queries, end - begin)``; None for all.
        is_causal: The keys are the queries themselves, and each sees those up to its own; ``seen`` is None then.
    """

    begin: int
    end: int
    seen: torch.Tensor | None = None
    is_causal: bool = False


def query_blocks(rule: Regions, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield (first, one past the last) of the blocks of the queries from ``first`` until ``last``.

    Up to ``plain_until`` and inside a chunk it is one block, as only the edge at the query itself moves there.
    """
    step = rule.chunk or BLOCK
    while first < last:
        stop = rule.plain_until if first < rule.plain_until else (first // step + 1) * step
        yield first, min(stop, last)
        first = stop


def region_tiles(region: Region, first: int, last: int) -> list[Tile]:
    """Return the tiles of what the queries from ``first`` until ``last`` see of a region, each pair in one of them."""
    here = torch.arange(first, last)
    begins, ends = region.begin(here), region.end(here)

    def banded(low: int, high: int) -> Tile:
        keys = torch.arange(low, high)
        return Tile(low, high, (keys >= begins[:, None]) & (keys < ends[:, None]))

    low, high = int(begins[0]), int(ends[-1])
    all_from, all_until = int(begins[-1]), int(ends[0])  # these all of the queries see
    if all_from <= first and torch.equal(ends, here + 1):
        tiles = [banded(low, all_from), Tile(all_from, first), Tile(first, last, is_causal=True)]
    elif all_from < all_until:
        tiles = [banded(low, all_from), Tile(all_from, all_until), banded(all_until, high)]
    else:
        tiles = [banded(low, high)]
    return [tile for tile in tiles if tile.begin < tile.end]


# Scores of one head that exist at a time.
_SCORES = 2**22


def attend_by_distance(pieces: Pieces, rule: Regions) -> Output:
    """Attend with a rule's regions; no score exists for more than a few queries at a time.

    Args:
        pieces: The layer's queries, keys and values, and their positions.
        rule: The rule.

    Returns:
        The output ``(batch, num_queries, heads, head_dim)``, and None: no weights are kept.
    """
    layout = pieces.forward.layout
    if int(layout.row_positions.max()) < rule.plain_until:
        return pieces.whole((0,) * len(layout.positions))
    if len(layout.positions) == 1:
        return _row(pieces, rule, 0, slice(None)), None
    rows = [_row(pieces, rule, row, slice(row, row + 1)) for row in range(len(pieces.query))]
    return torch.cat(rows), None


@dataclass(frozen=True)
class _Document:
    """One document of a row: its queries, keys and values. All indices are positions, counted from its first token.

    Attributes:
        pieces: The layer's.
        rule: The rule.
        row: The row, of the layout.
        start: The slot of its first token.
        first: The position of the first query; the last one's is that of the last key.
        query: ``(batch, heads, num_queries, head_dim)``, as the model rotated them.
        keys: By the name of a region, rotated, ``(batch, kv_heads, num_keys, head_dim)``.
        value: ``(batch, kv_heads, num_keys, head_dim)``.
        real: Bool ``(num_keys,)``, False for padding; None if there is none.
        dense: A mask ``(batch or 1, 1, num_queries, num_keys)``, bool or added; None for a causal one.
    """

    pieces: Pieces
    rule: Regions
    row: int
    start: int
    first: int
    query: torch.Tensor
    keys: dict[str, torch.Tensor]
    value: torch.Tensor
    real: torch.Tensor | None
    dense: torch.Tensor | None

    def rotated(self, region: Region, low: int, high: int) -> torch.Tensor:
        """Return the queries at positions ``low`` to ``high``, rotated and multiplied for a region."""
        rotated = self.query[:, :, low - self.first : high - self.first]
        if not region.is_plain:
            cos, sin = self._tables(region)
            few = slice(low - self.first, high - self.first)
            rotated = self.pieces.attention.rotation.rotate(rotated, (cos[:, :, few], sin[:, :, few]))
        return self.pieces.tempered(rotated, torch.arange(low, high))

    def _tables(self, region: Region) -> Tables:
        """Return what rotates all queries on, made once a forward."""
        last, tables = self.value.shape[2], self.pieces.forward.tables
        key = (region.query, self.row, self.start, self.first, last, self.query.device)
        if key not in tables:
            slots = slice(self.start + self.first, self.start + last)
            tables[key] = self.pieces.at(self.row, slots, region.query(torch.arange(self.first, last)), self.query)
        return tables[key]

    def attend(self) -> torch.Tensor:
        """Return the output of all its queries, ``(batch, num_queries, heads, head_dim)``."""
        last, done = self.value.shape[2], []
        if self._can_tile():
            done = [_in_tiles(self, *block) for block in query_blocks(self.rule, self.first, last)]
            return torch.cat(done, dim=2).transpose(1, 2)
        step = max(1, _SCORES // last)
        return torch.cat([_few(self, low, min(low + step, last)) for low in range(self.first, last, step)], dim=1)

    def _can_tile(self) -> bool:
        plain = self.dense is None and self.real is None and not self.pieces.dropout
        return plain and self.pieces.can_split(self.query, self.pieces.key, self.value)


def _row(pieces: Pieces, rule: Regions, row: int, index: slice) -> torch.Tensor:
    layout = pieces.forward.layout
    query, value = pieces.query[index], pieces.value[index]
    ways = {region.name: region for region in rule.regions}  # regions of one name rotate keys alike
    keys = {name: _rotated_keys(pieces, region, row, index) for name, region in ways.items()}
    before = max(layout.starts[row] - layout.first_query, 0)
    parts = [query.new_zeros(query.shape[0], before, query.shape[1], value.shape[-1])]
    for start, stop in layout.documents(row):
        begin = max(start, layout.first_query)
        if begin >= stop:
            continue
        few, here = slice(begin - layout.first_query, stop - layout.first_query), slice(start, stop)
        real = None if layout.real is None else layout.real[row, here].to(query.device)
        dense = pieces.dense_rows(index, few)
        document = _Document(
            pieces,
            rule,
            row,
            start,
            begin - start,
            query[:, :, few],
            {name: rotated[:, :, here] for name, rotated in keys.items()},
            value[:, :, here],
            None if real is None or bool(real.all()) else real,
            None if dense is None else dense[..., here],
        )
        parts.append(document.attend())
    output = torch.cat(parts, dim=1)
    return pad(output, (0, 0, 0, 0, 0, query.shape[2] - output.shape[1]))


def _in_tiles(document: _Document, low: int, high: int) -> torch.Tensor:
    """Attend for the queries at positions ``low`` to ``high``; ``(batch, heads, high - low, head_dim)``."""
    parts, value, scaling = [], document.value, document.pieces.scaling
    for region in document.rule.regions:
        tiles, keys = region_tiles(region, low, high), document.keys[region.name]
        rotated = document.rotated(region, low, high) if tiles else document.query
        for tile in tiles:
            here = slice(tile.begin, tile.end)
            parts.append(
                attend_part(rotated, keys[:, :, here], value[:, :, here], scaling, tile.seen, is_causal=tile.is_causal)
            )
    return merged(parts)


def _few(document: _Document, first: int, last: int) -> torch.Tensor:
    """Attend for the queries at positions ``first`` to ``last``; ``(batch, last - first, heads, head_dim)``."""
    pieces, value, real, dense = document.pieces, document.value, document.real, document.dense
    here = torch.arange(first, last)
    batch, heads, _, dim = document.query.shape
    count, groups = last - first, heads // value.shape[1]
    if dense is not None:
        dense = dense[:, :, first - document.first : last - document.first]
    scores, values = [], []
    for region in document.rule.regions:
        low, high = int(region.begin(here[:1])), int(region.end(here[-1:]))
        if low >= high:
            continue
        rotated = document.rotated(region, first, last).reshape(batch, -1, groups * count, dim)
        block = (rotated @ document.keys[region.name][:, :, low:high].transpose(2, 3)).float() * pieces.scaling
        block = block.view(batch, heads, count, high - low)
        slots = torch.arange(low, high)
        seen = (slots >= region.begin(here)[:, None]) & (slots < region.end(here)[:, None])
        seen = seen.to(value.device)[None, None]
        if real is not None:
            seen = seen & real[low:high]
        block = pieces.capped(block)
        if dense is not None and dense.dtype == torch.bool:
            seen = seen & dense[..., low:high]
        elif dense is not None:
            block = block + dense[..., low:high].float()
        # Not minus infinity: a query that sees nothing is padding, and must not make others NaN.
        scores.append(block.masked_fill(~seen, torch.finfo(block.dtype).min))
        values.append(value[:, :, low:high])
    sinks = pieces.kwargs.get("s_aux")
    if sinks is not None:  # gpt-oss: a learned logit beside those of the keys
        scores.append(sinks.float().view(1, -1, 1, 1).expand(batch, heads, count, 1))
        values.append(torch.zeros_like(value[:, :, :1]))
    weights = torch.cat(scores, dim=-1).softmax(-1).to(value.dtype)
    if pieces.dropout:
        weights = dropout(weights, pieces.dropout)
    weights = weights.view(batch, -1, groups * count, weights.shape[-1])
    return (weights @ torch.cat(values, dim=2)).view(batch, heads, count, -1).transpose(1, 2)


def _rotated_keys(pieces: Pieces, region: Region, row: int, index: slice) -> torch.Tensor:
    """Return the keys of a row, rotated as a region wants them."""
    layout = pieces.forward.layout
    if region.is_plain:
        return pieces.key[index, :, : layout.num_keys]
    positions = layout.document_positions[row]

    def rotate(keys: torch.Tensor, start: int, end: int) -> torch.Tensor:
        key = (region.name, row, start, end, keys.device)
        tables = pieces.forward.tables
        if key not in tables:
            tables[key] = pieces.at(row, slice(start, end), region.key(positions[start:end]), keys)
        return pieces.attention.rotation.rotate(keys, tables[key])

    if len(layout.positions) > 1:
        return rotate(pieces.key[index, :, : layout.num_keys], 0, layout.num_keys)
    signature = (region.name, layout.bases)
    return pieces.attention.rotated.at(pieces.cache_layer, pieces.key, signature, layout.num_keys, rotate)
