"""Staged dynamic scaling: the scale belongs to the position of the query, so no token depends on what comes later."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch

from hf_posenc.methods.base import Frequencies, StagedMethod, plain_frequencies
from hf_posenc.spec import RopeSpec

# Stage 0 is the original length; each later one is this share of it long, unless another is given. The measurements
# are in docs/pages/understand/staged-and-distance-methods.md.
DEFAULT_STAGE = 0.25


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a rule: where each ends, and the frequencies of its queries and of all keys they look at."""

    spec: RopeSpec
    method: StagedMethod

    @cached_property
    def stage_length(self) -> int:
        """Tokens of the first stage past the original length."""
        original = self.spec.original_max_position_embeddings
        return self.method.stage or max(1, round(DEFAULT_STAGE * original))

    def ends(self, length: int) -> list[int]:
        """Return the position each stage ends before, of as many stages as ``length`` tokens need."""
        ends = [self.spec.original_max_position_embeddings]
        ratio = 1 + self.stage_length / ends[0]
        while ends[-1] < length:
            grown = round(ends[-1] * ratio) if self.method.growth == "geometric" else ends[-1] + self.stage_length
            ends.append(max(grown, ends[-1] + 1))
        return ends

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the stage of each position, int64, same shape."""
        longest = int(positions.max()) + 1 if positions.numel() else 0
        return torch.bucketize(positions, torch.tensor(self.ends(longest)), right=True)

    def factor(self, stage: int) -> float:
        """Return the scale of a stage: its end / the original length."""
        original = self.spec.original_max_position_embeddings
        length = original
        while len(ends := self.ends(length)) <= stage:
            length = ends[-1] + 1
        return ends[stage] / original

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # makes a dataclass, which is not traced
    def frequencies(self, stage: int) -> Frequencies:
        """Return ``inv_freq``, float64 ``(rotary_dim // 2,)``, and ``attention_factor`` of a stage."""
        if stage == 0:
            return plain_frequencies(self.spec), 1.0
        return self.method.at(self.factor(stage)).frequencies(self.spec)
