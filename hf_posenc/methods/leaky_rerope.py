"""Leaky ReRoPE: distances grow more slowly beyond a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.methods.base import DistanceMethod, Regions, near_and_far
from hf_posenc.methods.options import option, tokens
from hf_posenc.methods.registry import register_method
from hf_posenc.methods.rerope import default_window
from hf_posenc.settings import number
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class LeakyReRope(DistanceMethod):
    """Distances beyond ``window`` grow by ``1 / leak`` a token."""

    name: ClassVar[str] = "leaky_rerope"
    paper: ClassVar[str] = "Su 2023, github.com/bojone/rerope"
    summary: ClassVar[str] = "Distances grow more slowly beyond a window; no fine-tuning."

    window: int | None = option(
        None, tokens, "distance in tokens from which keys are far; default: half of the original length"
    )
    leak: float = option(16.0, number(at_least=1), "tokens beyond the window that count as one")

    def regions(self, spec: RopeSpec) -> Regions:
        window, leak = self.window or default_window(spec), self.leak
        return near_and_far(
            window,
            lambda positions: positions.double() / leak + window * (1 - 1 / leak),
            lambda positions: positions.double() / leak,
            "leaking",
        )

    def settings(self, spec: RopeSpec) -> str:
        window = self.window or default_window(spec)
        return (
            f"Keys nearer than {window:,} tokens keep their distance; beyond, it grows by one every {self.leak:g} "
            "tokens."
        )
