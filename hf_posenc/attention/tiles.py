"""A distance rule's regions as stretches of keys, for one block of queries: seen by all of them, or with an edge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_posenc.methods.base import Region, Regions

# Queries of one block, where the edge of a region moves with the query: each edge costs as many keys in vain.
BLOCK = 256


@dataclass(frozen=True)
class Tile:
    """Keys of places ``begin <= key < end``, to be attended to in one call.

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
