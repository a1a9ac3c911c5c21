"""Dual chunk attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import PLAIN, DistanceMethod, Region, Regions, after, same, zero
from hf_posenc.methods.options import option, tokens
from hf_posenc.methods.registry import register_method
from hf_posenc.settings import flag
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class DualChunkAttention(DistanceMethod):
    """One distance inside a chunk, another to the chunk before, one more to all earlier ones, as its code has it.

    With ``length = chunk_size - local_window``, keys are rotated by ``p mod length``; queries by the same inside a
    chunk, by ``min(length + p mod length, chunk_size)`` towards the chunk before and by ``chunk_size`` towards earlier
    ones. Also github.com/HKUNLP/ChunkLlama.
    """

    name: ClassVar[str] = "dca"
    paper: ClassVar[str] = "An et al. 2024, arXiv:2402.17463, section 3.2 (ChunkLlama)"
    summary: ClassVar[str] = "Positions start anew in each chunk, and far chunks are all equally far; no fine-tuning."

    chunk_size: int | None = option(None, tokens, "in tokens; default: 3/4 of the original length")
    local_window: int | None = option(None, tokens, "in tokens; default: 1/8 of the original length")
    sharpen: bool = option(False, flag, "its code's temperature: queries times (0.05 ln(position / original) + 1) ** 2")

    def regions(self, spec: RopeSpec) -> Regions:
        original = spec.original_max_position_embeddings
        chunk = self.chunk_size or max(2, 3 * original // 4)
        local = self.local_window or max(1, original // 8)
        if not local < chunk:
            raise InvalidRequestError(f"local_window must be less than chunk_size, got {local} and {chunk}.")
        length = chunk - local

        def this(positions: torch.Tensor) -> torch.Tensor:
            return positions // length * length

        def before(positions: torch.Tensor) -> torch.Tensor:
            return (this(positions) - length).clamp(min=0)

        def within(positions: torch.Tensor) -> torch.Tensor:
            return positions % length

        def towards_last(positions: torch.Tensor) -> torch.Tensor:
            return (length + positions % length).clamp(max=chunk)

        def towards_earlier(positions: torch.Tensor) -> torch.Tensor:
            return torch.full_like(positions, chunk)

        regions = (
            Region(PLAIN, same, same, this, after),  # distances inside a chunk are those of ``within``
            Region("chunked", towards_last, within, before, this),
            Region("chunked", towards_earlier, within, zero, before),
        )
        return Regions(regions, length, chunk=length)

    def settings(self, spec: RopeSpec) -> str:
        return f"Chunks are {self.regions(spec).chunk:,} tokens long."

    def query_factors(self, spec: RopeSpec, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the factors of the queries; besides ``log_n``, ``sharpen``: ``(0.05 ln s + 1) ** 2``.

        s is the query's own length / original, >= 1. The code of the paper (``chunkllama_attn_replace.py``) always
        does, and multiplies queries and keys by the root of it, with one s for all: the longest text its rotary module
        has met so far. So there early queries are sharpened too, cached keys keep the factor of their time, and what
        ran before counts; the last token of a first forward is the same in both. That code says the paper's results
        are without it, and its sibling for Qwen has none.
        """
        factors = super().query_factors(spec, positions)
        if not self.sharpen:
            return factors
        longer = ((positions.double() + 1) / spec.original_max_position_embeddings).log().clamp(min=0)
        sharpened = (0.05 * longer + 1) ** 2
        factors = sharpened if factors is None else factors * sharpened
        return None if bool((factors == 1).all()) else factors
