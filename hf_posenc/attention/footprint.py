"""The memory of a method that runs in attention, beside the model's own activations and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_posenc.attention.staged import Stages
from hf_posenc.methods.base import DistanceMethod, Extension, Regions, StagedMethod

# Cosines that a forward keeps for its layers (with the sines, 256 MiB). One table a stage is quadratic in a text's
# length: 8 GiB at 64 times an original length of 2048, so what goes beyond is made anew in each layer.
KEPT_COSINES = 2**25


@dataclass(frozen=True)
class Footprint:
    """The memory in use while the last tokens of a text are fed.

    Attributes:
        cosines: float32 numbers, and as many sines, from the first layer to the last.
        key_copies: How often all keys of the KV cache lie beside it, rotated; 0 without a cache.
    """

    cosines: int
    key_copies: int


def footprint(extension: Extension | None, num_tokens: int, fed: int) -> Footprint:
    """Return the memory that a rule needs beside the model's own; none for plain RoPE.

    Args:
        extension: What the model was patched with; only methods that run in attention keep anything.
        num_tokens: Tokens of the text so far.
        fed: How many of them are fed, the last; those before are in the KV cache.
    """
    if extension is None or not extension.method.runs_in_attention:
        return Footprint(0, 0)
    spec, method = extension.spec, extension.method
    if isinstance(method, DistanceMethod):
        return _of_distances(method.regions(spec), 2 * spec.num_pairs, num_tokens, fed)
    assert isinstance(method, StagedMethod), method
    return _of_stages(Stages(spec, method), num_tokens, fed)


def _of_stages(stages: Stages, num_tokens: int, fed: int) -> Footprint:
    """Each stage that a query is in rotates these queries, and all keys up to its end."""
    first, original = num_tokens - fed, stages.spec.original_max_position_embeddings
    if num_tokens <= original:
        return Footprint(0, 0)
    keys = sum(min(end, num_tokens) for end in stages.ends(num_tokens)[1:] if end > first)
    queries = num_tokens - max(first, original)
    return Footprint(min(KEPT_COSINES, 2 * stages.spec.num_pairs * (keys + queries)), int(first > 0))


def _of_distances(rule: Regions, dim: int, num_tokens: int, fed: int) -> Footprint:
    """Each region that is not plain and has keys rotates the queries, and each way of such regions the new keys."""
    if num_tokens <= rule.plain_until:
        return Footprint(0, 0)
    regions, last = [region for region in rule.regions if not region.is_plain], torch.tensor(num_tokens - 1)
    with_keys = sum(bool(region.begin(last) < region.end(last)) for region in regions)
    ways = len({region.name for region in regions})
    return Footprint(dim * fed * (with_keys + ways), ways if fed < num_tokens else 0)
