"""One layer's attention where near and far keys are rotated differently: one softmax over all.

On a CPU the keys that a stretch of queries sees are cut into tiles, each one call of its flash kernel; elsewhere the
bounds of each query's keys are given to the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from hf_posenc.attention.inner import Output
from hf_posenc.attention.pieces import Pieces
from hf_posenc.attention.spans import Spans, attend_to_spans
from hf_posenc.attention.tiles import Tile, attend_in_tiles
from hf_posenc.methods.base import Region, Regions

# Queries of one block, where the edge of a region moves with the query: each edge costs as many keys in vain.
BLOCK = 256


def query_blocks(rule: Regions, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield (first, one past the last) of the blocks of the queries from ``first`` until ``last``.

    Up to ``plain_until`` and inside a chunk it is one block, as only the edge at the query itself moves there.
    """
    step = rule.chunk or BLOCK
    while first < last:
        stop = rule.plain_until if first < rule.plain_until else (first // step + 1) * step
        yield first, min(stop, last)
        first = stop


def region_tiles(region: Region, first: int, last: int, way: int = 0) -> list[Tile]:
    """Return the tiles of what the queries from ``first`` until ``last`` see of a region, each pair in one of them."""
    here = torch.arange(first, last)
    begins, ends = region.begin(here), region.end(here)

    def tile(low: int, high: int, seen: torch.Tensor | None = None, is_causal: bool = False) -> Tile:
        return Tile(way, first, last, low, high, seen, is_causal)

    def banded(low: int, high: int) -> Tile:
        keys = torch.arange(low, high)
        return tile(low, high, (keys >= begins[:, None]) & (keys < ends[:, None]))

    low, high = int(begins[0]), int(ends[-1])
    all_from, all_until = int(begins[-1]), int(ends[0])  # these all of the queries see
    if all_from <= first and torch.equal(ends, here + 1):
        tiles = [banded(low, all_from), tile(all_from, first), tile(first, last, is_causal=True)]
    elif all_from < all_until:
        tiles = [banded(low, all_from), tile(all_from, all_until), banded(all_until, high)]
    else:
        tiles = [banded(low, high)]
    return [each for each in tiles if each.begin < each.end]


def attend_by_distance(pieces: Pieces, rule: Regions) -> Output:
    """Attend with a rule's regions.

    Args:
        pieces: The layer's queries, keys and values, and their positions.
        rule: The rule.

    Returns:
        The output ``(batch, num_queries, heads, head_dim)``, and None: no weights are kept.
    """
    layout = pieces.forward.layout
    if layout.longest <= rule.plain_until:
        return pieces.whole((0,) * len(layout.positions))
    if not pieces.forward.spans:
        pieces.forward.spans = _spans(pieces, rule)
    regions, spans = zip(*pieces.forward.spans, strict=True)
    queries = [_rotated_queries(pieces, region) for region in regions]
    rotated = {region.name: _rotated_keys(pieces, region) for region in regions}
    keys = [rotated[region.name] for region in regions]  # regions of one name rotate keys alike
    if pieces.can_tile():
        return _by_tiles(pieces, rule, queries, keys), None
    inner = pieces.attention.inner
    return attend_to_spans(queries, keys, pieces.value, spans, pieces.scaling, pieces.extras, inner), None


def _spans(pieces: Pieces, rule: Regions) -> list[tuple[Region, Spans]]:
    """Return the slots that the queries see of each region in which they see any."""
    layout = pieces.forward.layout
    positions = layout.document_positions
    start_slots = (torch.arange(layout.num_keys) - positions)[:, layout.first_query :]
    positions = positions[:, layout.first_query :]
    real = layout.real if layout.has_gaps else None
    spans = [
        (region, Spans(region.begin(positions) + start_slots, region.end(positions) + start_slots, real))
        for region in rule.regions
    ]
    every = slice(0, positions.shape[1])
    seen = [(bounds, region, each) for region, each in spans if (bounds := each.bounds(every)) is not None]
    return [(region, each) for _, region, each in sorted(seen, key=lambda entry: entry[0])]  # the farthest keys first


def _by_tiles(pieces: Pieces, rule: Regions, queries: list[torch.Tensor], keys: list[torch.Tensor]) -> torch.Tensor:
    """Attend document by document, each in tiles."""
    layout, value = pieces.forward.layout, pieces.value
    rows = []
    for row in range(len(layout.positions)):
        index = slice(None) if len(layout.positions) == 1 else slice(row, row + 1)
        done = []
        for start, stop in layout.documents(row):
            begin = max(start, layout.first_query)
            if begin >= stop:
                continue
            few = slice(begin - layout.first_query, stop - layout.first_query)
            output = attend_in_tiles(
                _tiles(pieces, rule, begin - start, stop - start),
                [query[index, :, few] for query in queries],
                [key[index, :, start:stop] for key in keys],
                value[index, :, start:stop],
                pieces.scaling,
            )
            done.append(output.transpose(1, 2))
        before = max(layout.starts[row] - layout.first_query, 0)
        if not done:  # nothing but padding
            rows.append(value.new_zeros(len(value[index]), before, queries[0].shape[1], value.shape[-1]))
        else:
            rows.append(pad(torch.cat(done, dim=1), (0, 0, 0, 0, before, 0)))
    count = queries[0].shape[2]
    return torch.cat([pad(output, (0, 0, 0, 0, 0, count - output.shape[1])) for output in rows])


def _tiles(pieces: Pieces, rule: Regions, first: int, last: int) -> list[list[Tile]]:
    """Return the tiles of each block of the queries at these positions, for all layers of the forward."""
    made = pieces.forward.tiles
    if (first, last) not in made:
        regions = [region for region, _ in pieces.forward.spans]
        made[first, last] = [
            [tile for way, region in enumerate(regions) for tile in region_tiles(region, low, high, way)]
            for low, high in query_blocks(rule, first, last)
        ]
    return made[first, last]


def _rotated_queries(pieces: Pieces, region: Region) -> torch.Tensor:
    """Return all queries, rotated and multiplied for a region."""
    layout, query = pieces.forward.layout, pieces.query
    slots = slice(layout.first_query, layout.num_keys)
    positions = layout.document_positions[:, slots]
    if not region.is_plain:
        key = ("queries", region.query, query.device)
        tables = pieces.forward.tables
        if key not in tables:
            tables[key] = pieces.to_positions(slots, region.query(positions), query.device)
        query = pieces.attention.rotation.rotate(query, tables[key])
    return pieces.tempered(query, positions, slots)


def _rotated_keys(pieces: Pieces, region: Region) -> torch.Tensor:
    """Return the keys, rotated as a region wants them."""
    layout = pieces.forward.layout
    if region.is_plain:
        return pieces.key[:, :, : layout.num_keys]
    positions = layout.document_positions

    def rotate(keys: torch.Tensor, start: int, end: int) -> torch.Tensor:
        key = (region.name, start, end, keys.device)
        tables = pieces.forward.tables
        if key not in tables:
            slots = slice(start, end)
            tables[key] = pieces.to_positions(slots, region.key(positions[:, slots]), keys.device)
        return pieces.attention.rotation.rotate(keys, tables[key])

    signature = (region.name, layout.bases)
    return pieces.attention.rotated.at(pieces.cache_layer, pieces.key, signature, layout.num_keys, rotate)
