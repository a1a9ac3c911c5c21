"""Rules that change the distance between a query and far keys: Self-Extend, DCA, ReRoPE and Leaky ReRoPE."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_posenc.spec import RopeScaling, RopeSpec

Places = Callable[[torch.Tensor], torch.Tensor]
PLAIN = "plain"


@dataclass(frozen=True)
class Region:
    """Keys that a query sees in one way: those of places ``begin(query) <= key < end(query)``.

    All functions take int64 places in a row, counted from its first token, and neither bound ever falls.

    Attributes:
        name: Of the way keys are turned; equal names share turned keys.
        query: The position a query turns by.
        key: The position a key turns by.
        begin: The first key of a query.
        end: One past the last, not beyond the query itself.
    """

    name: str
    query: Places
    key: Places
    begin: Places
    end: Places

    @property
    def is_plain(self) -> bool:
        """Whether distances are what they are: queries and keys stay as the model turned them."""
        return self.name == PLAIN


@dataclass(frozen=True)
class DistanceRule:
    """A partition of the keys before a query.

    Attributes:
        regions: Each key before a query is in exactly one.
        plain_until: Tokens up to which it is plain RoPE.
        chunk: Queries between two multiples of it see the same keys of each region, but for those among themselves;
            None if the regions move with the query.
    """

    regions: tuple[Region, ...]
    plain_until: int
    chunk: int | None = None


def _same(places: torch.Tensor) -> torch.Tensor:
    return places


def _zero(places: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(places)


def _after(places: torch.Tensor) -> torch.Tensor:
    return places + 1


def _near_and_far(window: int, query: Places, key: Places, name: str) -> DistanceRule:
    """Plain RoPE up to a distance of ``window - 1``, other positions from there on."""

    def border(places: torch.Tensor) -> torch.Tensor:
        return (places - window + 1).clamp(min=0)

    near = Region(PLAIN, _same, _same, border, _after)
    return DistanceRule((near, Region(name, query, key, _zero, border)), window)


def self_extend(spec: RopeSpec, scaling: RopeScaling) -> DistanceRule:
    """Far keys share positions in groups: key ``p // group``, query ``p // group + window - window // group``.

    The authors' code divides truly in one phase and by floor in the other; here it is floor everywhere, so that
    prefill and decoding agree.

    Reference: Jin et al. 2024, arXiv:2401.01325, section 3.2, algorithm 1; its rule of thumb for the group.
    """
    original = spec.original_max_position_embeddings
    window = scaling.window or max(1, original // 4)
    # The farthest token then stands within two thirds of the original length.
    room = max(2 * original // 3 - window, 1)
    group = scaling.group or max(2, math.ceil((original * scaling.factor - window) / room))
    return _near_and_far(
        window,
        lambda places: places // group + window - window // group,
        lambda places: places // group,
        "grouped",
    )


def rerope(spec: RopeSpec, scaling: RopeScaling) -> DistanceRule:
    """All keys at a distance of ``window`` or more are that far away.

    Reference: Su 2023, github.com/bojone/rerope.
    """
    window = scaling.window or max(1, spec.original_max_position_embeddings // 2)
    return _near_and_far(window, lambda places: torch.full_like(places, window), _zero, "unturned")


def leaky_rerope(spec: RopeSpec, scaling: RopeScaling) -> DistanceRule:
    """Distances beyond ``window`` grow by ``1 / leak`` a token.

    Reference: Su 2023, github.com/bojone/rerope.
    """
    window = scaling.window or max(1, spec.original_max_position_embeddings // 2)
    leak = scaling.leak
    return _near_and_far(
        window,
        lambda places: places.double() / leak + window * (1 - 1 / leak),
        lambda places: places.double() / leak,
        "leaking",
    )


def dca(spec: RopeSpec, scaling: RopeScaling) -> DistanceRule:
    """Dual chunk attention, as its code defines it: inside a chunk, to the one before, and to all earlier ones.

    With ``length = chunk_size - local_window``, keys turn by ``p mod length``; queries by the same inside a chunk, by
    ``min(length + p mod length, chunk_size)`` towards the chunk before and by ``chunk_size`` towards earlier ones.

    Reference: An et al. 2024, arXiv:2402.17463, section 3.2; github.com/HKUNLP/ChunkLlama.

    Raises:
        ValueError: The local window is not shorter than the chunk.
    """
    original = spec.original_max_position_embeddings
    chunk = scaling.chunk_size or max(2, 3 * original // 4)
    local = scaling.local_window or max(1, original // 8)
    if not local < chunk:
        raise ValueError(f"local_window must be less than chunk_size, got {local} and {chunk}.")
    length = chunk - local

    def this(places: torch.Tensor) -> torch.Tensor:
        return places // length * length

    def before(places: torch.Tensor) -> torch.Tensor:
        return (this(places) - length).clamp(min=0)

    def within(places: torch.Tensor) -> torch.Tensor:
        return places % length

    def towards_last(places: torch.Tensor) -> torch.Tensor:
        return (length + places % length).clamp(max=chunk)

    def towards_earlier(places: torch.Tensor) -> torch.Tensor:
        return torch.full_like(places, chunk)

    return DistanceRule(
        (
            Region(PLAIN, _same, _same, this, _after),  # distances inside a chunk are those of ``within``
            Region("chunked", towards_last, within, before, this),
            Region("chunked", towards_earlier, within, _zero, before),
        ),
        length,
        chunk=length,
    )


DISTANCE_RULES = {"self_extend": self_extend, "dca": dca, "rerope": rerope, "leaky_rerope": leaky_rerope}


def query_factors(spec: RopeSpec, scaling: RopeScaling, places: torch.Tensor) -> torch.Tensor | None:
    """Return what multiplies the queries at these places, float64, same shape; None if that is nothing.

    ``log_n``: ``max(1, ln(p + 1) / ln(original))`` (Su 2021, kexue.fm/archives/8823; used by ReRoPE's code).
    ``sharpen`` of ``dca``: ``(0.05 ln s + 1) ** 2``, s the query's own length / original, >= 1. Its code
    (``chunkllama_attn_replace.py``) always does, and multiplies queries and keys by the root of it, with one s for all:
    the longest text its rotary module has met so far. So there early queries are sharpened too, cached keys keep the
    factor of their time, and what ran before counts; the last token of a first forward is the same in both. That code
    says the paper's results are without it, and its sibling for Qwen has none.
    """
    if not scaling.log_n and not scaling.sharpen:
        return None
    original = spec.original_max_position_embeddings
    length = places.double() + 1
    factors = torch.ones_like(length)
    if scaling.log_n:
        factors = factors * (length.log() / math.log(original)).clamp(min=1)
    if scaling.method == "dca" and scaling.sharpen:
        factors = factors * (0.05 * (length / original).log().clamp(min=0) + 1) ** 2
    return None if bool((factors == 1).all()) else factors
