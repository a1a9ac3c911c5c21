"""The base class of objectives: a loss on samples that it draws itself, differentiable in the rule."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from hf_posenc.fitting.config import FitConfig
    from hf_posenc.fitting.problem import FitProblem


class Objective(abc.ABC):
    """One term of what a fit lowers.

    Attributes:
        name: As ``--objectives`` has it.
        needs_teacher: Whether it compares with recordings of a teacher, or reads on behind them.
        reads_on: Whether it reads on behind them: recorded keys and values are then all that it knows of the text.
    """

    name: ClassVar[str]
    needs_teacher: ClassVar[bool] = True
    reads_on: ClassVar[bool] = False

    def __init__(self, problem: FitProblem, config: FitConfig) -> None:
        """Prepare.

        Args:
            problem: The model, the rule and the texts.
            config: The settings of the fit.
        """
        self.problem, self.config = problem, config

    @abc.abstractmethod
    def losses(self) -> Iterator[torch.Tensor]:
        """Yield scalars with gradients, whose sum is the loss of a new sample.

        The gradient of each is taken before the next is asked for, so that only one graph is in memory.
        """

    def state(self) -> list[int]:
        """Return the values besides the generator that decide the next sample, for a fit that goes on later."""
        return []

    def load_state(self, state: list[int]) -> None:  # noqa: B027  # most have none
        """Take what ``state`` returned."""
