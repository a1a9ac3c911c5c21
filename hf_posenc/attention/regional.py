"""One layer's attention where near and far keys are turned differently: one softmax over all, a few queries at once."""

from __future__ import annotations

import torch
from torch.nn.functional import dropout, pad

from hf_posenc.attention.distances import DistanceRule, Region
from hf_posenc.attention.pieces import Output, Pieces

# Scores of one head that exist at a time.
_SCORES = 2**22


def attend_by_distance(pieces: Pieces, rule: DistanceRule) -> Output:
    """Attend with a rule's regions; no score exists for more than a few queries at a time.

    Args:
        pieces: The layer's queries, keys and values, and where they stand.
        rule: The rule.

    Returns:
        The output ``(batch, num_queries, heads, head_dim)``, and None: no weights are kept.
    """
    layout = pieces.forward.layout
    if int(layout.places.max()) < rule.plain_until:
        return pieces.whole((0,) * len(layout.positions))
    if len(layout.positions) == 1:
        return _row(pieces, rule, 0, slice(None)), None
    rows = [_row(pieces, rule, row, slice(row, row + 1)) for row in range(len(pieces.query))]
    return torch.cat(rows), None


def _row(pieces: Pieces, rule: DistanceRule, row: int, index: slice) -> torch.Tensor:
    layout = pieces.forward.layout
    first_query, query, value = layout.first_query, pieces.query[index], pieces.value[index]
    ways = {region.name: region for region in rule.regions}  # regions of one name turn keys alike
    keys = {name: _turned_keys(pieces, region, row, index) for name, region in ways.items()}
    parts = [query.new_zeros(query.shape[0], max(layout.starts[row] - first_query, 0), query.shape[1], value.shape[-1])]
    real = None if layout.real is None else layout.real[row].to(query.device)
    for start, stop in layout.documents(row):
        step = max(1, _SCORES // max(stop - start, 1))
        for first in range(max(start, first_query), stop, step):
            last = min(first + step, stop)
            few = slice(first - first_query, last - first_query)
            mask = pieces.dense_rows(index, few)
            parts.append(_few(pieces, rule, row, query[:, :, few], keys, value, (first, last, start), real, mask))
    output = torch.cat(parts, dim=1)
    return pad(output, (0, 0, 0, 0, 0, query.shape[2] - output.shape[1]))


def _few(
    pieces: Pieces,
    rule: DistanceRule,
    row: int,
    query: torch.Tensor,
    keys: dict[str, torch.Tensor],
    value: torch.Tensor,
    span: tuple[int, int, int],
    real: torch.Tensor | None,
    dense: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for a row's queries of slots ``span[0]`` to ``span[1]``, of a document that starts at slot ``span[2]``."""
    first, last, start = span
    here = torch.arange(first, last) - start
    batch, heads, count, dim = query.shape
    groups = heads // value.shape[1]
    scores, values = [], []
    for region in rule.regions:
        low, high = start + int(region.begin(here[:1])), start + int(region.end(here[-1:]))
        if low >= high:
            continue
        turned = pieces.door.rotation.turn(query, pieces.at(row, slice(first, last), region.query(here), query))
        turned = pieces.tempered(turned, here).reshape(batch, -1, groups * count, dim)
        block = (turned @ keys[region.name][:, :, low:high].transpose(2, 3)).float() * pieces.scaling
        block = block.view(batch, heads, count, high - low)
        slots = torch.arange(low, high) - start
        seen = (slots >= region.begin(here)[:, None]) & (slots < region.end(here)[:, None])
        seen = seen.to(query.device)[None, None]
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


def _turned_keys(pieces: Pieces, region: Region, row: int, index: slice) -> torch.Tensor:
    """Return the keys of a row, turned as a region wants them."""
    layout = pieces.forward.layout
    places = layout.places_in_documents[row]

    def turn(keys: torch.Tensor, start: int, end: int) -> torch.Tensor:
        key = (region.name, row, start, end, keys.dtype, keys.device)
        tables = pieces.forward.tables
        if key not in tables:
            tables[key] = pieces.at(row, slice(start, end), region.key(places[start:end]), keys)
        return pieces.door.rotation.turn(keys, tables[key])

    if len(layout.positions) > 1:
        return turn(pieces.key[index, :, : layout.num_keys], 0, layout.num_keys)
    signature = (region.name, layout.bases)
    return pieces.door.rotated.at(pieces.cache_layer, pieces.key, signature, layout.num_keys, turn)
