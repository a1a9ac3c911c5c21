"""The teacher's next-token distributions, on blocks over its cached prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch.nn.functional import kl_div

from hf_posenc.evaluation.lm_head import head_logits
from hf_posenc.fitting.objectives import register_objective
from hf_posenc.fitting.objectives.base import Objective


@register_objective
class TeacherTokens(Objective):
    """Kullback-Leibler divergence of the next-token distributions from the teacher's, in nats per token.

    A block of tokens anywhere in the text is read under the rule, over the teacher's keys and values of all tokens
    before it; gradients pass through the block alone, so that a long text costs little more than attention over it.
    """

    name: ClassVar[str] = "teacher_tokens"
    reads_on: ClassVar[bool] = True

    def losses(self) -> Iterator[torch.Tensor]:
        problem, block = self.problem, self.config.block
        recording = problem.recording()
        start = problem.place(len(recording.input_ids), block, self.config.short_share)
        rows = slice(start, start + block)
        log_probabilities = problem.block_logits(recording, recording.input_ids[None, rows], start)[0].log_softmax(-1)
        with torch.no_grad():
            hidden = recording.hidden[rows].to(problem.rotary.device)
            wanted = head_logits(problem.rotary.model, hidden).log_softmax(-1)
        yield kl_div(log_probabilities, wanted, log_target=True, reduction="none").sum(-1).mean()
