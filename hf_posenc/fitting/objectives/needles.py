"""The loss on the digits of numbers that are hidden in the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import cross_entropy

from hf_posenc.errors import InvalidRequestError
from hf_posenc.fitting.objectives import register_objective
from hf_posenc.fitting.objectives.base import Objective

if TYPE_CHECKING:
    from hf_posenc.fitting.config import FitConfig
    from hf_posenc.fitting.problem import FitProblem


@register_objective
class Needles(Objective):
    """Language-model loss on the digits of numbers hidden in the text, asked for later in it (LongRoPE2, section 4.2).

    Numbers are hidden in the texts before the teacher reads them. A question is a short block over the teacher's keys
    and values, so that one forward of the teacher serves all questions.
    """

    name: ClassVar[str] = "needles"
    reads_on: ClassVar[bool] = True

    def __init__(self, problem: FitProblem, config: FitConfig) -> None:
        super().__init__(problem, config)
        if not any(problem.needles):
            raise InvalidRequestError("objective 'needles' needs a tokenizer and texts that numbers were hidden in.")

    def losses(self) -> Iterator[torch.Tensor]:
        problem, count = self.problem, self.config.questions
        at = problem.integer(0, len(problem.recordings))
        recording, needles = problem.recordings[at], problem.needles[at]
        end = len(recording.input_ids)
        # A text may be asked about at any of its lengths; longer ones hold more that can be asked for.
        start = min(max(problem.place(end, 1, self.config.short_share), needles[0].end), end)
        # An unextended teacher's text may end before the first one, and has none to ask for.
        hidden = [needle for needle in needles if needle.end <= start]
        if not hidden:
            return
        drawn = torch.randint(len(hidden), (count,), generator=problem.generator).tolist()
        # Questions of one length are one batch.
        by_length: dict[tuple[int, int], list[int]] = {}
        for index in drawn:
            needle = hidden[index]
            by_length.setdefault((len(needle.question), len(needle.answer)), []).append(index)
        for (length, _), indices in by_length.items():
            ids = torch.tensor([hidden[index].question + hidden[index].answer for index in indices])
            logits = problem.block_logits(recording, ids[:, :-1], start)[:, length - 1 :]
            wanted = ids[:, length:].to(logits.device)
            yield cross_entropy(logits.flatten(0, 1), wanted.flatten()) * (len(indices) / count)
