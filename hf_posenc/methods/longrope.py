"""LongRoPE: a divisor for each pair of features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import (
    NEVER_ROTATED,
    STOPPED,
    Frequencies,
    StaticMethod,
    longrope_lists,
    plain_frequencies,
)
from hf_posenc.methods.options import divisors, option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class LongRope(StaticMethod):
    """Divide each frequency by a number of its own: ``long_factor`` past the original length, else ``short_factor``.

    Also Transformers' ``_compute_longrope_parameters``.
    """

    name: ClassVar[str] = "longrope"
    paper: ClassVar[str] = "Ding et al. 2024, arXiv:2402.13753, section 3"
    summary: ClassVar[str] = "A divisor per pair, given as a list (found by search, or another model's)."
    needs_options: ClassVar[bool] = True
    example_options: ClassVar[Mapping[str, Any]] = {"long_factor": [1.0] * 32 + [4.0] * 32}
    on_disk: ClassVar[str] = "longrope"
    rope_type: ClassVar[str | None] = "longrope"
    rope_keys: ClassVar[frozenset[str]] = frozenset(
        {"factor", "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"}
    )

    short_factor: tuple[float, ...] | None = option(
        None, divisors, "divisors up to the original length, one for each rotated pair; default: all 1"
    )
    long_factor: tuple[float, ...] | None = option(
        None, divisors, "divisors past the original length, one for each rotated pair"
    )
    attention_factor: float | None = option(
        None, positive, "multiplies cos and sin; default: sqrt(1 + ln(factor) / ln(original length))"
    )

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        num_pairs, original = spec.rotated_pairs, spec.original_max_position_embeddings
        if self.long_factor is None:
            raise InvalidRequestError(
                f"method 'longrope' needs long_factor, a list of {num_pairs} numbers (one per pair)."
            )
        short_factor = self.short_factor or (1.0,) * num_pairs
        for name, factors in (("long_factor", self.long_factor), ("short_factor", short_factor)):
            if len(factors) != num_pairs:
                raise InvalidRequestError(
                    f"{name} must hold {num_pairs} numbers (one per pair of features), got {len(factors)}."
                )
        factors = self.long_factor if (seq_len or 0) > original else short_factor
        attention_factor = self.attention_factor
        if attention_factor is None:
            attention_factor = math.sqrt(1 + math.log(self.factor) / math.log(original)) if self.factor > 1 else 1.0
        by = torch.tensor((*factors, *(1.0,) * spec.unrotated_pairs), dtype=torch.float64)
        return torch.where(by < STOPPED, plain_frequencies(spec) / by, 0.0), attention_factor

    def longrope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        scaled, attention_factor = self.frequencies(spec)
        at_rest = torch.where(scaled > 0, plain_frequencies(spec) / scaled, STOPPED)[: spec.rotated_pairs].tolist()
        short = list(self.short_factor or at_rest)
        return longrope_lists(spec, self.factor, short, list(self.long_factor or ()), attention_factor)

    @classmethod
    def read_options(cls, parameters: Mapping[str, Any]) -> dict[str, Any]:
        read = super().read_options(parameters)
        for name in read.keys() & {"short_factor", "long_factor"}:
            read[name] = [divisor for divisor in read[name] if divisor < NEVER_ROTATED]
        return read
