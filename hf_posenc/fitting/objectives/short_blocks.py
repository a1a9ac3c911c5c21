"""The loss of short texts, which the rule should cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from hf_posenc.fitting.objectives import register_objective
from hf_posenc.fitting.objectives.base import Objective
from hf_posenc.fitting.objectives.full_length import stretch_loss


@register_objective
class ShortBlocks(Objective):
    """Language-model loss of a stretch of at most the original length, with gradients through all of it."""

    name: ClassVar[str] = "short_blocks"
    needs_teacher: ClassVar[bool] = False

    def losses(self) -> Iterator[torch.Tensor]:
        yield stretch_loss(self, min(self.config.block, self.problem.original))
