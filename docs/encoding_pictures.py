"""Pictures of an encoding: heat maps by query and key, how scores fall with the distance, tables and biases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from canvas import Draw, HeatMap, Picture, draw_grid, draw_heat_maps, quarters
from hf_posenc.methods.base import Method
from hf_posenc.methods.encodings.alibi import Alibi, alibi_slopes
from hf_posenc.methods.encodings.rope import Rope, rope_decay_bound, rope_score
from hf_posenc.methods.encodings.sinusoidal import Sinusoidal, sinusoidal_table
from hf_posenc.methods.encodings.t5_bias import T5Bias, t5_buckets
from hf_posenc.methods.encodings.xpos import Xpos, xpos_decay, xpos_score
from hf_posenc.methods.explained import InPlaceOfRope, ModelShape, OfDistance, PositionMap
from hf_posenc.reporting.looks import COLOURS, DASHES, numbered_look
from hf_posenc.reporting.plot import Chart, Line, draw_chart, draw_lines_across
from hf_posenc.spec import RopeSpec
from method_pictures import draw_dials, draw_spirals, drawn

LENGTHS = (100, 1000, 10000)  # tokens of the texts that maps are drawn for, by default
_CELLS = 100  # of a row and a column: a map of 10,000 tokens has the means of 100 by 100
_LABELS = ("key position", "query position")
_MAX_DISTANCE = 8192
_PAPERS = 250  # tokens, the x axis of the RoPE paper's figure
_BASES = (1e4, 5e5)  # Llama's and Llama 3's
_TOKENS = 256  # of a bias matrix
_LOWEST = -8.0  # nats: an attention weight is divided by 3000
_HEADS = frozenset({8, 12, 32})  # numbers of heads whose reach is compared


def encoding_pictures(method: Method, model: ModelShape, lengths: Sequence[int] = LENGTHS) -> list[Picture]:
    """Return the pictures of an encoding on a model: its map, which it makes itself, and what else is drawn of a kind.

    Args:
        method: Replaces RoPE.
        model: Its shape.
        lengths: Of the texts that maps are drawn for, in tokens.
    """
    shown = method.position_map(model) if isinstance(method, InPlaceOfRope) else None
    found: list[Picture | None] = [] if shown is None else [draw_maps(method.name, shown, lengths)]
    if isinstance(method, Rope):
        spec = method.rotary_spec(model.rope, model.head_dim)
        found += [draw_decay(spec), draw_spirals(spec), draw_dials(spec, model.target)]
    elif isinstance(method, Xpos):
        found += [draw_xpos(method.rotary_spec(model.rope, model.head_dim), method.scale_base)]
    elif isinstance(method, Sinusoidal):
        found += [draw_sinusoidal_table(method.base)]
    elif isinstance(method, Alibi):
        found += [draw_alibi_bias(model), draw_alibi_slopes(sorted({*_HEADS, model.num_heads}))]
    elif isinstance(method, T5Bias):
        found += [draw_t5_buckets(method)]
    return drawn(*found)


def draw_maps(name: str, shown: PositionMap, lengths: Sequence[int] = LENGTHS) -> Picture:
    """Draw the maps of the encoding of a name: a column for each length of text."""
    several, last = len(shown.rows) > 1, len(shown.rows) - 1
    maps: list[HeatMap] = []
    for row, (words, of_distance) in enumerate(shown.rows):
        for column, length in enumerate(lengths):
            values, edge = map_values(of_distance, length)
            title, (x, y) = f"{length:,} tokens" if row == 0 else "", _LABELS
            if several:
                x, y = x if row == last else "", f"{words}\n{y}" if column == 0 else ""
            maps.append(HeatMap(values, (edge, edge), title, f"map-{len(maps)}", (x, y)))
    caption = f"{shown.caption} Each cell is the mean of its pairs; keys after the query are left out."
    if shown.of_positions is not None:
        maps, caption = [_of_positions(shown, length, number) for number, length in enumerate(lengths)], shown.caption
    narrow, columns = len(lengths) if several else 1, len(lengths)
    drawing = draw_heat_maps(maps, shown.limits, columns, narrow_columns=narrow, aspect=0.95, bar=shown.bar)
    return Picture(f"map_{name}", f"{shown.title}: by query and key", caption, drawing)


def _of_positions(shown: PositionMap, length: int, number: int) -> HeatMap:
    """Return the map of what depends on the positions themselves: one query and one key a cell."""
    assert shown.of_positions is not None
    cells = min(_CELLS, length)
    positions = torch.arange(cells) * -(-length // cells)
    values = torch.where(positions[:, None] >= positions, shown.of_positions(positions), torch.nan)
    end = shown.num_positions
    note = f"no row for\nposition {end:,}\nand later" if end is not None and end < length else ""
    return HeatMap(values, (length, length), f"{length:,} tokens", f"map-{number}", note=note)


def map_values(of_distance: OfDistance, length: int) -> tuple[torch.Tensor, int]:
    """Return the matrix of a text, and the tokens on its edge: whole blocks, so perhaps more than ``length``."""
    cells = min(_CELLS, length)
    size = -(-length // cells)
    return block_means(of_distance(torch.arange(cells * size)), cells), cells * size


def block_means(values: torch.Tensor, cells: int) -> torch.Tensor:
    """Return the mean over blocks of queries and keys of what depends on their distance alone.

    Args:
        values: At the distances 0, 1, ..., float64 ``(cells * size,)``; a block has ``size`` queries and ``size`` keys.
        cells: Blocks in a row.

    Returns:
        Float64 ``(cells, cells)``, query by key, nan where all keys come after the queries; a block on the diagonal has
        the mean of its pairs of which the key does not.
    """
    size = len(values) // cells
    inside = torch.arange(1 - size, size)
    count = (size - inside.abs()).double()  # pairs of a block that are this much farther apart than its corner
    means = torch.empty(cells, dtype=torch.float64)
    for apart in range(cells):
        distance = apart * size + inside
        seen = count * (distance >= 0)
        means[apart] = (values[distance.clamp(min=0)] * seen).sum() / seen.sum()
    blocks = torch.arange(cells)
    distance = blocks[:, None] - blocks
    return torch.where(distance >= 0, means[distance.clamp(min=0)], torch.nan)


def draw_decay(spec: RopeSpec) -> Picture:
    """Draw the bound of RoPE's scores, as the paper does, and scores below it."""
    num_pairs, base = spec.rotated_pairs, spec.rope_theta
    near, distances = torch.arange(0, _PAPERS + 1), torch.arange(1, _MAX_DISTANCE + 1)
    others = [other for other in _BASES if other != base]
    bounds = {f"base {one:g}": rope_decay_bound(near, num_pairs, one) for one in (base, *others)}
    scores = {f"base {one:g}": rope_score(distances, num_pairs, one) for one in (base, *others)}
    named = " and ".join(f"{other:g}" for other in others)
    plots = [
        _lines("bound of the score", "mean |S_i|", near, bounds, ylim=(0, None)),
        _bands("score of equal vectors", "score, 1 at distance 0", scores),
    ]
    caption = (
        f"Left, as in the paper's figure 2: the mean over i of |S_i|, S_i the sum of the first i of {num_pairs} "
        f"unit vectors rotated by the distance, at base {base:g} and, for comparison, at {named}. A score is at "
        f"most this times {num_pairs} times the largest step between the products of neighbouring pairs, so far "
        "keys are bounded lower than near ones; with a larger base the bound falls later. Right: the score of a query "
        "and a key with the same features, which does fall; of unlike vectors the score may be anything below the "
        "bound."
    )
    return Picture("rope_decay", "RoPE: long-term decay and its bound", caption, draw_grid(plots, 2, aspect=0.85))


def draw_xpos(spec: RopeSpec, scale_base: float) -> Picture:
    """Draw what xPos makes of RoPE's scores, and how single pairs fade."""
    num_pairs, base = spec.rotated_pairs, spec.rope_theta
    distances, far = torch.arange(1, _MAX_DISTANCE + 1), torch.arange(0, _MAX_DISTANCE + 1, 32)
    scores = {
        "RoPE": rope_score(distances, num_pairs, base),
        "xPos": xpos_score(distances, num_pairs, base, scale_base),
    }
    pairs = (0, num_pairs // 3, 2 * num_pairs // 3, num_pairs - 1)
    fading = {f"pair {pair}": xpos_decay(num_pairs)[pair] ** (far / scale_base) for pair in pairs}

    ticks = quarters(_MAX_DISTANCE)
    plots = [
        _bands("score of equal vectors", "score, 1 at distance 0", scores),
        _lines(
            "factor of single pairs",
            "factor",
            far,
            fading,
            legend="center right",
            xticks=[at for at, _ in ticks],
            xticklabels=[words for _, words in ticks],
        ),
    ]
    caption = (
        "Left: the score of a query and a key with the same features. xPos follows RoPE up to some hundred tokens and "
        "then fades, where RoPE goes on to angles that it may never have been trained on. Right: what each pair's "
        f"part is multiplied by, {num_pairs} pairs, decay once every {scale_base:g} tokens."
    )
    return Picture("xpos_decay", "xPos: RoPE that fades", caption, draw_grid(plots, 2, aspect=0.85))


def _lines(
    title: str,
    y_label: str,
    distances: torch.Tensor,
    lines: Mapping[str, torch.Tensor],
    legend: str = "upper right",
    **settings: Any,
) -> Draw:
    """Return what draws lines over distances; ``settings`` are those of the axes."""

    def draw(axes: Any) -> None:
        for at, (name, values) in enumerate(lines.items()):
            _plot(axes, at, name, distances, values, linewidth=1.4)
        _dress(axes, title, y_label, legend)
        axes.set(**settings)

    return draw


def _bands(title: str, y_label: str, lines: Mapping[str, torch.Tensor]) -> Draw:
    """Return what draws values at the distances 1, 2, ...: their means, and between which they lie."""

    def draw(axes: Any) -> None:
        for at, (name, values) in enumerate(lines.items()):
            middles, means, lows, highs = zip(*binned(values), strict=True)
            axes.fill_between(middles, lows, highs, color=COLOURS[at], alpha=0.22, linewidth=0)
            _plot(axes, at, name, middles, means, linewidth=1.6)
        _dress(axes, title, y_label)
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 8, 64, 512, 4096], ["1", "8", "64", "512", "4k"])
        axes.minorticks_off()

    return draw


def _plot(axes: Any, at: int, name: str, x: Sequence[float] | torch.Tensor, y: Any, linewidth: float) -> None:
    """Draw a line; its id in the SVG has the number of its plot and its name."""
    gid = f"plot-{axes.get_subplotspec().num1 + 1}-{name.replace(' ', '-')}"
    axes.plot(x, y, color=COLOURS[at], linestyle=DASHES[at], linewidth=linewidth, label=name, gid=gid)


def _dress(axes: Any, title: str, y_label: str, legend: str = "upper right") -> None:
    axes.set_title(title)
    axes.set(xlabel="distance in tokens", ylabel=y_label)
    draw_lines_across(axes)
    axes.legend(fontsize=8, loc=legend)


def binned(values: torch.Tensor, per_octave: int = 6) -> list[tuple[float, float, float, float]]:
    """Return distance, mean, lowest and highest of what depends on the distances 1, 2, ..., by stretches of them.

    Args:
        values: Float64 ``(n,)``.
        per_octave: Stretches in each doubling of the distance; near ones hold one distance each.
    """
    distances = torch.arange(1, len(values) + 1)
    stretches = (distances.double().log2() * per_octave).round()
    rows = []
    for stretch in sorted(set(stretches.tolist())):
        inside = stretches == stretch
        found = values[inside]
        middle = float(distances[inside].double().log().mean().exp())
        rows.append((middle, float(found.mean()), float(found.min()), float(found.max())))
    return rows


def draw_sinusoidal_table(base: float, rows: int = 256, width: int = 128) -> Picture:
    """Draw the table: positions down, features across, as the paper interleaves them and sines before cosines."""
    table = sinusoidal_table(torch.arange(rows), width, base)
    apart = torch.cat((table[:, ::2], table[:, 1::2]), dim=-1)
    edges, labels = (width, rows), ("feature", "position")
    maps = [
        HeatMap(table, edges, "sines and cosines alternating (paper)", "table-paper", labels),
        HeatMap(apart, edges, "sines, then cosines (tensor2tensor)", "table-halves", labels),
    ]
    caption = (
        f"The rows that are added to the words at the positions 0 to {rows - 1}, {width} features at base {base:g}: "
        "fast waves in the first features, ever slower ones to the right, the last of "
        f"{2 * torch.pi * base ** (1 - 2 / width):,.0f} tokens. Both orders hold the same numbers."
    )
    drawing = draw_heat_maps(maps, (-1, 1), 2, aspect=0.95, bar="value")
    return Picture("sinusoidal_table", "Sinusoidal positions: the table", caption, drawing)


def draw_alibi_bias(model: ModelShape) -> Picture:
    """Draw the bias of some heads as matrices: what is added to a score."""
    slopes, positions = alibi_slopes(model.num_heads), torch.arange(_TOKENS)
    apart = positions[:, None] - positions
    maps = []
    for head in model.some_heads:
        bias, title = (
            torch.where(apart >= 0, -slopes[head] * apart, torch.nan),
            f"head {head + 1}: slope {slopes[head]:.3g}",
        )
        maps.append(HeatMap(bias, (_TOKENS, _TOKENS), title, f"bias-{head}"))
    caption = (
        f"What is added to the scores of {_TOKENS} tokens, in three of {model.num_heads} heads: minus the slope times "
        "the distance. No number is trained."
    )
    drawing = draw_heat_maps(maps, (_LOWEST, 0.0), len(maps), aspect=0.95, bar="bias in nats, -8 or less")
    return Picture("alibi_bias", "ALiBi: the bias of three heads", caption, drawing)


def draw_alibi_slopes(heads: Sequence[int]) -> Picture:
    """Draw each head's reach, for some numbers of heads: the distance at which a weight falls to a hundredth."""
    lines = []
    for at, number in enumerate(heads):
        reach = math.log(100) / alibi_slopes(number)
        lines.append(Line(f"{number} heads", torch.linspace(0, 1, number).tolist(), reach.tolist(), numbered_look(at)))
    ticks = [(0.0, "first head"), (1.0, "last head")]
    title, y_label = "The distance at which ALiBi divides a weight by 100", "tokens until the weight is a hundredth"
    chart = Chart(title, "head", y_label, lines, ticks, log_x=False)
    caption = (
        "How far each head looks: the distance at which ALiBi divides an attention weight by 100. The slopes of 12 "
        "heads, which is no power of two, are those of 8 and then every other one of 16, as the paper's code has them."
    )
    return Picture("alibi_reach", "ALiBi: how far heads look", caption, draw_chart(chart))


def draw_t5_buckets(method: T5Bias) -> Picture:
    """Draw which learned number each query and key share, causal and in both directions."""
    buckets, farthest = method.num_buckets, method.max_distance
    size = 2 * farthest
    positions = torch.arange(size)
    relative = positions - positions[:, None]  # key minus query
    shown = []
    if farthest > buckets // 2:
        causal = t5_buckets(relative, num_buckets=buckets, max_distance=farthest).double()
        shown.append((torch.where(relative <= 0, causal, torch.nan), "causal (decoder)"))
    if buckets >= 4:  # two for each direction, at least
        both = t5_buckets(relative, bidirectional=True, num_buckets=buckets, max_distance=farthest).double()
        shown.append((both, "both directions (encoder)"))
    maps = [HeatMap(values, (size, size), title, f"buckets-{at}") for at, (values, title) in enumerate(shown)]
    caption = (
        f"Which of a head's {buckets} learned numbers a query adds to the score of a key, among {size} tokens. In both "
        "directions half of them are for later keys. The numbers themselves come from training, and differ by head."
    )
    drawing = draw_heat_maps(maps, (0, buckets - 1), len(maps), aspect=0.85, bar="bucket")
    return Picture("t5_buckets", "T5's bias: who shares a number", caption, drawing)
