"""Rules that change distances: how far apart a query and a key are told to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_posenc.gallery.canvas import Draw, Grid, Picture, draw_grid, heat_map, tokens_name
from hf_posenc.methods.base import DistanceMethod, Method
from hf_posenc.report.looks import PLAIN, numbered_look
from hf_posenc.report.plot import Chart, Line, draw_chart
from hf_posenc.spec import RopeSpec

_CELLS = 128
_POINTS = 400  # of a curve


def told_distances(spec: RopeSpec, method: Method, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return by what distance each query and key are turned, float64; nan for keys after the query.

    Args:
        spec: What the model was trained with.
        method: Any method; those that change no distances leave them as they are.
        queries, keys: Places in a row, int64, of shapes that broadcast.
    """
    queries, keys = torch.broadcast_tensors(queries, keys)  # type: ignore[no-untyped-call]  # torch has no types for it
    told = torch.full(queries.shape, torch.nan, dtype=torch.float64)
    if not isinstance(method, DistanceMethod):
        return torch.where(keys <= queries, (queries - keys).double(), told)
    for region in method.regions(spec).regions:
        inside = (keys >= region.begin(queries)) & (keys < region.end(queries))
        told = torch.where(inside, (region.query(queries) - region.key(keys)).double(), told)
    return told


def spread_places(length: int, count: int) -> torch.Tensor:
    """Return at most ``count`` whole places from 0 to ``length - 1``, evenly spread, each once."""
    return torch.tensor(sorted({round(at * (length - 1) / (count - 1)) for at in range(count)}))


def last_row(spec: RopeSpec, method: Method, length: int) -> torch.Tensor:
    """Return the distances the last token of a text is told, float64 ``(length,)``, by the true distance 0, 1, ..."""
    return told_distances(spec, method, torch.tensor(length - 1), torch.arange(length - 1, -1, -1))


def draw_told(spec: RopeSpec, rules: Sequence[tuple[str, Method]], length: int) -> Picture:
    """Draw the distances that the last token of a text is told, by the true ones."""
    original = spec.original_max_position_embeddings
    places = spread_places(length, _POINTS)
    lines = [Line("as they are", places.tolist(), places.tolist(), PLAIN)]
    for at, (name, method) in enumerate(rules):
        lines.append(Line(name, places.tolist(), last_row(spec, method, length)[places].tolist(), numbered_look(at)))
    chart = Chart(
        f"Distances as the last of {tokens_name(length)} tokens is told",
        "true distance in tokens",
        "distance told, in tokens",
        lines,
        [(at * length / 4, tokens_name(at * length / 4)) for at in range(5)],
        [(original, f"trained on {tokens_name(original)}")] if original < length else [],
        log_x=False,
    )
    caption = (
        f"By what distance the query of the last token is turned against each key. The model was trained on distances "
        f"below {original:,}; the rules leave near ones as they are and keep far ones below that."
    )
    return Picture("told_distances", "Distances told", caption, draw_chart(chart))


def draw_told_maps(spec: RopeSpec, rules: Sequence[tuple[str, Method]], length: int) -> Picture:
    """Draw the distances told as matrices, query by key."""
    size = -(-length // _CELLS)
    places = torch.arange(min(_CELLS, length)) * size
    edge = float(len(places) * size)
    highest = float(spec.original_max_position_embeddings)
    plots: list[Draw] = []
    for number, (name, method) in enumerate(rules):
        values = told_distances(spec, method, places[:, None], places[None, :])
        plots.append(_map(values, edge, highest, name, number))
    caption = (
        f"The distance each query is told of each key, in a text of {length:,} tokens; one pair of positions a cell. "
        f"The last colour is {highest:,.0f} tokens, the length the model was trained on: distances as they are would "
        "pass it."
    )
    columns = 2 if len(rules) > 1 else 1
    grid = Grid(columns, aspect=0.85 if columns > 1 else 0.6, bar="distance told, in tokens")
    return Picture("told_maps", "Distances told, by query and key", caption, draw_grid(plots, grid))


def _map(values: torch.Tensor, edge: float, highest: float, name: str, number: int) -> Draw:
    def draw(axes: Any) -> Any:
        return heat_map(axes, values, (0, edge, edge, 0), (0, highest), title=name, name=f"told-{number}")

    return draw
