"""Numbers read back from drawings: lines of charts by their axes' ticks, heat maps by their pixels."""

from __future__ import annotations

import base64
import io
import math
import re

import matplotlib
import numpy
from PIL import Image


def _axes_of(svg: str, at: int) -> str:
    """The part of a drawing that holds one set of axes, from 1."""
    begin = svg.index(f'<g id="axes_{at}">')
    end = svg.find(f'<g id="axes_{at + 1}">')
    return svg[begin : end if end > 0 else len(svg)]


def _scale(part: str, axis: str, logarithmic: bool) -> tuple[float, float]:
    """Slope and offset that make a value (or its logarithm) of a coordinate, from the first and last tick."""
    other = r'[^>]*?x="([\d.-]+)"' if axis == "x" else r'[^>]*?y="([\d.-]+)"'
    found = re.findall(rf'<g id="{axis}tick_\d+">.*?<use xlink:href="#\w+"{other}.*?<!-- (.*?) -->', part, re.DOTALL)
    ticks = [(float(at), _number(words)) for at, words in found]
    (first, low), (last, high) = ticks[0], ticks[-1]
    if logarithmic:
        low, high = math.log(low), math.log(high)
    slope = (high - low) / (last - first)
    return slope, low - slope * first


def _number(words: str) -> float:
    words = words.replace("\N{MINUS SIGN}", "-").replace(",", "")
    return float(words[:-1]) * 1024 if words.endswith("k") else float(words)


def line_values(
    svg: str, name: str, axes: int = 1, log_x: bool = False, log_y: bool = False
) -> list[tuple[float, float]]:
    """The corners of the line whose group has this id."""
    part = _axes_of(svg, axes)
    path = re.search(rf'<g id="{re.escape(name)}">\s*<path d="(.*?)"', part, re.DOTALL)
    assert path is not None, f"no line {name!r}"
    corners = [tuple(map(float, pair)) for pair in re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path[1])]
    (a, b), (c, d) = _scale(part, "x", log_x), _scale(part, "y", log_y)
    values = [(a * x + b, c * y + d) for x, y in corners]
    return [(math.exp(x) if log_x else x, math.exp(y) if log_y else y) for x, y in values]


def heat_maps(svg: str) -> list[numpy.ndarray]:
    """The pixels of each map, RGBA, ``(rows, columns, 4)``; the colour bar's are not among them."""
    found = re.findall(r'base64,([^"]*)" id="(?:map|bias|buckets|table)-', svg)
    images = [Image.open(io.BytesIO(base64.b64decode(data.strip()))).convert("RGBA") for data in found]
    return [numpy.asarray(image) for image in images]


def colours(values: list[list[float]], low: float, high: float) -> numpy.ndarray:
    """What cividis makes of values, RGBA; nan is clear."""
    found = (numpy.array(values, dtype=numpy.float64) - low) / (high - low)
    pixels = matplotlib.colormaps["cividis"](found, bytes=True)
    return numpy.where(numpy.isnan(found)[..., None], 0, pixels)
