"""No positions at all (NoPE, DroPE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_posenc.methods.base import Frequencies, StaticMethod
from hf_posenc.methods.explained import InPlaceOfRope, ModelShape, Numbers, PositionMap
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class Nope(InPlaceOfRope, StaticMethod):
    """Stop the rotation of every pair: only the causal mask says what came before."""

    name: ClassVar[str] = "nope"
    aliases: ClassVar[tuple[str, ...]] = ("drope",)
    paper: ClassVar[str] = "Kazemnejad et al. 2023, arXiv:2305.19466; Gelberg et al. 2025, arXiv:2512.12167 (DroPE)"
    summary: ClassVar[str] = "Removes the positions; of no use before fine-tuning, for which short texts are enough."
    on_disk: ClassVar[str] = "longrope"
    zero_shot: ClassVar[bool] = False

    attention_factor: float | None = option(None, positive, "sharpens attention, by its square; default: 1")

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        factor = 1.0 if self.attention_factor is None else self.attention_factor
        return torch.zeros(spec.num_pairs, dtype=torch.float64), factor

    def numbers(self, model: ModelShape) -> Numbers:
        sentences = [
            f"The last of {model.length:,} tokens spreads its attention over as many keys, that of {model.target:,} "
            f"over {model.target / model.length:.3g} times as many."
        ]
        if model.spec is not None:
            sentences.append(
                f"This model has {model.spec.rotated_pairs} rotated pairs; without positions none of them is rotated."
            )
        return Numbers(sentences)

    def position_map(self, model: ModelShape) -> PositionMap:
        return PositionMap(
            "NoPE",
            [("", lambda distances: torch.ones_like(distances, dtype=torch.float64))],
            "score, 1 at distance 0",
            (0.0, 1.0),
            "Nothing is said of positions: all keys up to the query are alike. Only the causal mask, which cuts off "
            "the upper half, tells queries apart.",
        )
