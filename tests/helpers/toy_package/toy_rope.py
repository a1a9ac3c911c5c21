"""A method of another package: each pair is stretched by a power of the factor that grows with its number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_posenc.methods.base import Frequencies, StaticMethod, plain_frequencies
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class Toy(StaticMethod):
    """Divide pair i of n by ``factor ** (i / (n - 1)) ** power``."""

    name: ClassVar[str] = "toy"
    aliases: ClassVar[tuple[str, ...]] = ("toy_rope",)
    paper: ClassVar[str] = "nobody 2026, unpublished"
    summary: ClassVar[str] = "Stretches slow pairs more than fast ones, by a power."
    on_disk: ClassVar[str] = "longrope"

    power: float = option(1.0, positive, "how late the stretching begins")

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        share = torch.arange(spec.num_pairs, dtype=torch.float64) / max(spec.num_pairs - 1, 1)
        return plain_frequencies(spec) / self.factor ** (share**self.power), 1.0
