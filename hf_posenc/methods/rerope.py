"""ReRoPE: distances stop growing at a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_posenc.methods.base import DistanceMethod, Regions, near_and_far, zero
from hf_posenc.methods.options import option, tokens
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec


def default_window(spec: RopeSpec) -> int:
    """Return half of the original length, in tokens."""
    return max(1, spec.original_max_position_embeddings // 2)


@register_method
@dataclass(frozen=True)
class ReRope(DistanceMethod):
    """All keys at a distance of ``window`` or more are that far away."""

    name: ClassVar[str] = "rerope"
    paper: ClassVar[str] = "Su 2023, github.com/bojone/rerope"
    summary: ClassVar[str] = "Distances stop growing at a window; no fine-tuning."

    window: int | None = option(
        None, tokens, "distance in tokens from which keys are far; default: half of the original length"
    )

    def regions(self, spec: RopeSpec) -> Regions:
        window = self.window or default_window(spec)
        return near_and_far(window, lambda positions: torch.full_like(positions, window), zero, "unrotated")

    def settings(self, spec: RopeSpec) -> str:
        window = self.window or default_window(spec)
        return f"Keys nearer than {window:,} tokens keep their distance; all others are {window:,} away."
