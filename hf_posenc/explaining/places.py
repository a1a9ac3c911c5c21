"""Rules that depend on where a query stands, as sentences and tables: stages, and distances told."""

from __future__ import annotations

import math

import torch

from hf_posenc.attention.staged import Stages
from hf_posenc.explaining.pairs import number_name
from hf_posenc.gallery.told import last_row
from hf_posenc.methods.base import AttentionMethod, DistanceMethod, StagedMethod
from hf_posenc.spec import RopeSpec

STAGE_HEADS = ["stage", "queries at", "scale", "cos and sin times", "slowest pair, tokens"]
DISTANCE_HEADS = ["true distance", "told"]


def stage_rows(spec: RopeSpec, method: StagedMethod, reach: int) -> list[list[str]]:
    """Return a row for each stage up to a length: number, places, scale, temperature, and the slowest pair's tokens."""
    stages = Stages(spec, method)
    rows, begin = [], 0
    for stage, end in enumerate(stages.ends(reach)):
        inv_freq, attention_factor = stages.frequencies(stage)
        slowest = 2 * math.pi / float(inv_freq[spec.rotated_pairs - 1])
        places = f"{begin:,} to {end - 1:,}"
        rows.append(
            [str(stage), places, f"{end / stages.ends(1)[0]:.4g}", f"{attention_factor:.4g}", number_name(slowest)]
        )
        begin = end
    return rows


def stage_sentences(spec: RopeSpec, method: StagedMethod, reach: int) -> list[str]:
    """Return the stages in words."""
    stages = Stages(spec, method)
    growth = "each longer than the one before by one ratio" if method.growth == "geometric" else "all of one length"
    return [
        f"Queries up to {spec.original_max_position_embeddings:,} use the model's own frequencies. From there the "
        f"first stage is {stages.stage_length:,} tokens long, {growth}; {len(stages.ends(reach))} stages, the original "
        f"length included, reach {reach:,} tokens. Each has the scale of its end."
    ]


def distance_rows(spec: RopeSpec, method: DistanceMethod, reach: int) -> list[list[str]]:
    """Return true distances from the last token of a text, and what it is told."""
    told = last_row(spec, method, reach)
    places = {4**power for power in range(1, 12) if 4**power < reach} | {1, reach - 1}
    places |= _borders(told)
    return [[f"{place:,}", f"{float(told[place]):,.6g}"] for place in sorted(places)]


def _borders(told: torch.Tensor) -> set[int]:
    """Return the first distance that is not told as it is, and the one before."""
    changed = torch.nonzero(told != torch.arange(len(told)))
    first = int(changed[0]) if len(changed) else 0
    return {first - 1, first} if first else set()


def distance_sentences(spec: RopeSpec, method: DistanceMethod, reach: int) -> list[str]:
    """Return what happens to distances, in words."""
    rule, original = method.regions(spec), spec.original_max_position_embeddings
    farthest = _farthest(spec, method, reach)
    verdict = (
        "a distance it was trained on" if farthest < original else "more than it was trained on: the rule cannot reach"
    )
    return [
        f"Texts up to {rule.plain_until:,} tokens are read as ever. Frequencies stay as they are: what changes is how "
        f"far apart a query and a far key are turned. {method.settings(spec)}",
        f"Within {reach:,} tokens the farthest key of all is told to be {farthest:,.6g} tokens away, of {original:,} "
        f"trained: {verdict}.",
        f"What the last of {reach:,} tokens is told:",
    ]


def _farthest(spec: RopeSpec, method: DistanceMethod, reach: int) -> float:
    """Return the largest distance that any query is told, of queries close enough to each other to miss nothing."""
    rule = method.regions(spec)
    step = rule.chunk or reach
    queries = {reach - 1, *range(step - 1, reach, step)}
    return max(float(last_row(spec, method, query + 1).max()) for query in queries)


def query_sentence(spec: RopeSpec, method: AttentionMethod, reach: int) -> list[str]:
    """Say what multiplies the queries, where something does."""
    factors = method.query_factors(spec, torch.tensor([spec.original_max_position_embeddings - 1, reach - 1]))
    if factors is None:
        return []
    return [
        f"Queries are multiplied besides by where they stand: {float(factors[0]):.4g} at the original length, "
        f"{float(factors[1]):.4g} at {reach:,} tokens."
    ]
