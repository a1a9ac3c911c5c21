"""Rules that depend on where a query stands, as sentences and tables: stages, and distances told."""

from __future__ import annotations

import math

import torch

from hf_posenc.attention.distances import DISTANCE_RULES, query_factors
from hf_posenc.attention.staged import Stages
from hf_posenc.explaining.pairs import number_name
from hf_posenc.gallery.told import last_row
from hf_posenc.spec import RopeScaling, RopeSpec

STAGE_HEADS = ["stage", "queries at", "scale", "cos and sin times", "slowest pair, tokens"]
DISTANCE_HEADS = ["true distance", "told"]


def stage_rows(spec: RopeSpec, scaling: RopeScaling, reach: int) -> list[list[str]]:
    """Return a row for each stage up to a length: number, places, scale, temperature, and the slowest pair's tokens."""
    stages = Stages(spec, scaling)
    rows, begin = [], 0
    for stage, end in enumerate(stages.ends(reach)):
        inv_freq, attention_factor = stages.frequencies(stage)
        slowest = 2 * math.pi / float(inv_freq[spec.turning_pairs - 1])
        places = f"{begin:,} to {end - 1:,}"
        rows.append(
            [str(stage), places, f"{end / stages.ends(1)[0]:.4g}", f"{attention_factor:.4g}", number_name(slowest)]
        )
        begin = end
    return rows


def stage_sentences(spec: RopeSpec, scaling: RopeScaling, reach: int) -> list[str]:
    """Return the stages in words."""
    stages = Stages(spec, scaling)
    growth = "each longer than the one before by one ratio" if scaling.growth == "geometric" else "all of one length"
    return [
        f"Queries up to {spec.original_max_position_embeddings:,} use the model's own frequencies. From there the "
        f"first stage is {stages.stage_length:,} tokens long, {growth}; {len(stages.ends(reach))} stages, the original "
        f"length included, reach {reach:,} tokens. Each has the scale of its end."
    ]


def distance_rows(spec: RopeSpec, scaling: RopeScaling, reach: int) -> list[list[str]]:
    """Return true distances from the last token of a text, and what it is told."""
    told = last_row(spec, scaling, reach)
    places = {4**power for power in range(1, 12) if 4**power < reach} | {1, reach - 1}
    places |= _borders(told)
    return [[f"{place:,}", f"{float(told[place]):,.6g}"] for place in sorted(places)]


def _borders(told: torch.Tensor) -> set[int]:
    """Return the first distance that is not told as it is, and the one before."""
    changed = torch.nonzero(told != torch.arange(len(told)))
    first = int(changed[0]) if len(changed) else 0
    return {first - 1, first} if first else set()


def distance_sentences(spec: RopeSpec, scaling: RopeScaling, reach: int) -> list[str]:
    """Return what happens to distances, in words."""
    rule, original = DISTANCE_RULES[scaling.method](spec, scaling), spec.original_max_position_embeddings
    farthest = _farthest(spec, scaling, reach)
    verdict = (
        "a distance it was trained on" if farthest < original else "more than it was trained on: the rule cannot reach"
    )
    return [
        f"Texts up to {rule.plain_until:,} tokens are read as ever. Frequencies stay as they are: what changes is how "
        f"far apart a query and a far key are turned. {_settings(spec, scaling)}",
        f"Within {reach:,} tokens the farthest key of all is told to be {farthest:,.6g} tokens away, of {original:,} "
        f"trained: {verdict}.",
        f"What the last of {reach:,} tokens is told:",
    ]


def _farthest(spec: RopeSpec, scaling: RopeScaling, reach: int) -> float:
    """Return the largest distance that any query is told, of queries close enough to each other to miss nothing."""
    rule = DISTANCE_RULES[scaling.method](spec, scaling)
    step = rule.chunk or reach
    queries = {reach - 1, *range(step - 1, reach, step)}
    return max(float(last_row(spec, scaling, query + 1).max()) for query in queries)


def _settings(spec: RopeSpec, scaling: RopeScaling) -> str:
    """Say a rule's numbers as they are for a model, those that were not given too."""
    rule = DISTANCE_RULES[scaling.method](spec, scaling)
    if scaling.method == "dca":
        return f"Chunks are {rule.chunk:,} tokens long."
    near = f"Keys nearer than {rule.plain_until:,} tokens keep their distance"
    if scaling.method == "self_extend":
        keys = rule.regions[1].key(torch.arange(4 * spec.original_max_position_embeddings))
        return f"{near}; beyond, {int((keys == 0).sum())} tokens share a position."
    if scaling.method == "leaky_rerope":
        return f"{near}; beyond, it grows by one every {scaling.leak:g} tokens."
    return f"{near}; all others are {rule.plain_until:,} away."


def query_sentence(spec: RopeSpec, scaling: RopeScaling, reach: int) -> list[str]:
    """Say what multiplies the queries, where something does."""
    factors = query_factors(spec, scaling, torch.tensor([spec.original_max_position_embeddings - 1, reach - 1]))
    if factors is None:
        return []
    return [
        f"Queries are multiplied besides by where they stand: {float(factors[0]):.4g} at the original length, "
        f"{float(factors[1]):.4g} at {reach:,} tokens."
    ]
