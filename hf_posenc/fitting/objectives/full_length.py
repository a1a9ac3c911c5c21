"""The loss of the text itself, in whole texts of the target length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy

from hf_posenc.fitting.objectives import register_objective
from hf_posenc.fitting.objectives.base import Objective


@register_objective
class FullLength(Objective):
    """Language-model loss of a stretch of the target length, with gradients through all of it."""

    name: ClassVar[str] = "full_length"
    needs_teacher: ClassVar[bool] = False

    def losses(self) -> Iterator[torch.Tensor]:
        yield stretch_loss(self, self.problem.target)


def stretch_loss(objective: Objective, length: int) -> torch.Tensor:
    """Return the language-model loss of a stretch of a text at a random place, read from its beginning."""
    problem = objective.problem
    text = problem.texts[problem.integer(0, len(problem.texts))]
    start = problem.integer(0, len(text) - length)
    ids = text[start : start + length]
    logits = problem.block_logits(None, ids[None, :-1], 0)[0]
    return cross_entropy(logits, ids[1:].to(logits.device))
