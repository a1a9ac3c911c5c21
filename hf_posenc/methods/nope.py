"""No positions at all (NoPE, DroPE)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from hf_posenc.methods.base import Frequencies, StaticMethod
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class Nope(StaticMethod):
    """Stop the rotation of every pair: only the causal mask says what came before."""

    name: ClassVar[str] = "nope"
    aliases: ClassVar[tuple[str, ...]] = ("drope",)
    paper: ClassVar[str] = "Gelberg et al. 2025, arXiv:2512.12167 (DroPE)"
    summary: ClassVar[str] = (
        "Drops the positions altogether; of no use before fine-tuning, which it wants on short texts only."
    )
    on_disk: ClassVar[str] = "longrope"
    zero_shot: ClassVar[bool] = False
    plain_at_factor_1: ClassVar[bool] = False
    instead_of_rope: ClassVar[bool] = True

    attention_factor: float | None = option(None, positive, "sharpens attention, by its square; default: 1")

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        factor = 1.0 if self.attention_factor is None else self.attention_factor
        return torch.zeros(spec.num_pairs, dtype=torch.float64), factor

    def without_temperature(self) -> Self | None:
        return dataclasses.replace(self, attention_factor=1.0) if self.attention_factor in (None, 1) else None
