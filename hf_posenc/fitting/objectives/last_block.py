"""The loss of the text itself, on blocks over a cached prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy

from hf_posenc.fitting.objectives import register_objective
from hf_posenc.fitting.objectives.base import Objective


@register_objective
class LastBlock(Objective):
    """Language-model loss of a block anywhere in the text, over the teacher's keys and values of what is before it.

    Gradients pass through the block alone.
    """

    name: ClassVar[str] = "last_block"
    reads_on: ClassVar[bool] = True

    def losses(self) -> Iterator[torch.Tensor]:
        problem, block = self.problem, self.config.block
        recording = problem.recording()
        start = problem.place(len(recording.input_ids), block, self.config.short_share)
        ids = recording.input_ids[start : start + block + 1]
        logits = problem.block_logits(recording, ids[None, :-1], start)[0]
        yield cross_entropy(logits, ids[1:].to(logits.device))
