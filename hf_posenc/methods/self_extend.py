"""Self-Extend: far tokens share positions in groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.methods.base import DistanceMethod, Regions, near_and_far
from hf_posenc.methods.options import option, tokens
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class SelfExtend(DistanceMethod):
    """Far keys share positions in groups: key ``p // group``, query ``p // group + window - window // group``.

    The authors' code divides truly in one phase and by floor in the other; here it is floor everywhere, so that
    prefill and decoding agree. The group's default is the paper's rule of thumb.
    """

    name: ClassVar[str] = "self_extend"
    paper: ClassVar[str] = "Jin et al. 2024, arXiv:2401.01325, section 3.2"
    summary: ClassVar[str] = "Far tokens share positions in groups, near ones keep theirs; no fine-tuning."

    group: int | None = option(None, tokens, "far tokens that share a position; default: what the target needs")
    window: int | None = option(
        None, tokens, "distance in tokens from which keys are far; default: a quarter of the original length"
    )

    def _sizes(self, spec: RopeSpec) -> tuple[int, int]:
        original = spec.original_max_position_embeddings
        window = self.window or max(1, original // 4)
        # The farthest token is then within two thirds of the original length.
        room = max(2 * original // 3 - window, 1)
        return window, self.group or max(2, math.ceil((original * self.factor - window) / room))

    def regions(self, spec: RopeSpec) -> Regions:
        window, group = self._sizes(spec)
        return near_and_far(
            window,
            lambda positions: positions // group + window - window // group,
            lambda positions: positions // group,
            "grouped",
        )

    def settings(self, spec: RopeSpec) -> str:
        window, group = self._sizes(spec)
        return f"Keys nearer than {window:,} tokens keep their distance; beyond, {group} tokens share a position."
