"""Attention matching: each layer's attention output under the rule equals the teacher's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_posenc.fitting.objectives import register_objective
from hf_posenc.fitting.objectives.base import Objective

if TYPE_CHECKING:
    from hf_posenc.fitting.config import FitConfig
    from hf_posenc.fitting.problem import FitProblem


@register_objective
class AttentionMatching(Objective):
    """Mean squared error of attention outputs on a teacher's queries, keys and values, layer by layer.

    Each layer gets the teacher's own inputs, so no gradient passes through the network: a step costs a few layers'
    attention. The error of a layer is divided by the mean square of the teacher's output there.
    """

    name: ClassVar[str] = "attention_matching"

    def __init__(self, problem: FitProblem, config: FitConfig) -> None:
        super().__init__(problem, config)
        self._layers: list[int] = []

    def losses(self) -> Iterator[torch.Tensor]:
        problem, config = self.problem, self.config
        recording, layers = problem.recording(), problem.layers
        positions = recording.query_positions
        short = (positions < problem.original).nonzero()[:, 0]
        long = (positions >= problem.original).nonzero()[:, 0]
        num_short = round(config.short_share * config.queries) if len(long) else config.queries
        # Two groups, for those of short texts need no keys past the original length.
        groups = [self._some(short, num_short), self._some(long, config.queries - num_short)]
        if len(self._layers) < min(config.layers, len(layers)):
            self._layers = torch.randperm(len(layers), generator=problem.generator).tolist()
        chosen, self._layers = self._layers[: config.layers], self._layers[config.layers :]
        for index in chosen:
            problem.attention.begin(recording, 0, 0)
            for rows in (rows for rows in groups if len(rows)):
                found, wanted = (one.float() for one in problem.attention.replay(layers[index], recording, rows))
                error = (found - wanted).square().mean() / wanted.square().mean()
                yield error * (len(rows) / config.queries / len(chosen))

    def _some(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        if not len(rows):
            return rows
        drawn = torch.randint(len(rows), (count,), generator=self.problem.generator)
        return rows[drawn].sort().values

    def state(self) -> list[int]:
        return list(self._layers)

    def load_state(self, state: list[int]) -> None:
        self._layers = list(state)
