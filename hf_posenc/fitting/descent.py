"""The steps of a fit: Adam on the rule's numbers, saved as it goes, so that a stopped fit goes on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_posenc.errors import InvalidRequestError
from hf_posenc.fitting.objectives.base import Objective
from hf_posenc.fitting.rule import RuleParameters
from hf_posenc.utils.console import Progress
from hf_posenc.utils.files import read_json, write_whole

_BETAS = (0.9, 0.95)
_LAST_RATE = 0.05  # of the learning rate, at the end of the cosine
_SAVE_EVERY = 5
_AVERAGED = 0.25  # of the steps: the rule is the mean over the last ones, whose noise cancels


@dataclass(frozen=True)
class Step:
    """The measurements of a step: the objectives' losses, and its seconds."""

    losses: dict[str, float]
    seconds: float


class Descent:
    """Adam on a rule, one step at a time.

    Its state is a few lists of as many numbers as are fitted, and a random generator, kept as JSON in ``file``: after
    ``load``, the same request goes on from there and ends at the same numbers as one that was never stopped.
    """

    def __init__(
        self,
        rule: RuleParameters,
        objectives: Mapping[str, tuple[Objective, float]],
        generator: torch.Generator,
        *,
        steps: int,
        learning_rate: float,
        smoothness: float,
        file: Path,
        identity: str,
    ) -> None:
        """Prepare the first step.

        Args:
            rule: What is changed, in place.
            objectives: By name, with their weights.
            generator: What the objectives draw from.
            steps: How many in all.
            learning_rate: Learning rate of the first step; it falls along a cosine to a twentieth.
            smoothness: Weight of the rule's roughness.
            file: Where the state is kept.
            identity: Identity of the request; a state of another one, or of another number of steps, is not used.
        """
        self.rule, self.objectives, self.generator = rule, objectives, generator
        self.steps, self.learning_rate, self.smoothness = steps, learning_rate, smoothness
        self.file, self.identity = file, identity
        self.parameters = [one for one in (rule.log_divisors, rule.log_factor) if one.requires_grad and one.numel()]
        self.optimizer = torch.optim.Adam(self.parameters, learning_rate, _BETAS)
        self.averages = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.history: list[Step] = []

    @property
    def done(self) -> int:
        """Steps so far."""
        return len(self.history)

    def step(self) -> Step:
        """Take one step."""
        began = time.perf_counter()
        losses = self._gradients()
        self._descend()
        numbers = [float(parameter.detach().abs().max()) for parameter in self.parameters]
        if not all(math.isfinite(value) for value in (*losses.values(), *numbers)):
            raise InvalidRequestError(
                f"step {self.done + 1} gave {losses}, which is not finite: the model overflows in its dtype, or the "
                "learning rate is too large. Load it in bfloat16 or float32, or lower --learning-rate."
            )
        taken = Step(losses, time.perf_counter() - began)
        self.history.append(taken)
        if self.done % _SAVE_EVERY == 0 or self.done == self.steps:
            self._save()
        return taken

    def _gradients(self) -> dict[str, float]:
        """Put the gradients of a new sample into the parameters; return the objectives' losses."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        losses = {}
        for name, (objective, weight) in self.objectives.items():
            losses[name] = 0.0
            for part in objective.losses():
                (weight * part).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                losses[name] += float(part.detach())
        if self.smoothness:
            (self.smoothness * self.rule.roughness()).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return losses

    def seconds_of_a_step(self) -> float:
        """Time a step that changes nothing; the second of two, as the first one warms up."""
        state = self.generator.get_state()
        objectives = {name: objective.state() for name, (objective, _) in self.objectives.items()}
        for _ in range(2):
            began = time.perf_counter()
            self._gradients()
        seconds = time.perf_counter() - began
        self.generator.set_state(state)
        for name, (objective, _) in self.objectives.items():
            objective.load_state(objectives[name])
        return seconds

    def run(self, show_progress: bool) -> None:
        """Take all steps that are left, and put the mean of the last ones into the rule."""
        with Progress("fit", self.steps, unit="steps", done=self.done, shown=show_progress) as bar:
            while self.done < self.steps:
                self.step()
                bar.update()
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.averages, strict=True):
                parameter.copy_(average / self._averaged)
        self.rule.project()

    @property
    def _averaged(self) -> int:
        return max(1, round(_AVERAGED * self.steps))

    @torch.no_grad()
    def _descend(self) -> None:
        """Move the parameters, at a rate that falls along a cosine."""
        cosine = 0.5 * (1 + math.cos(math.pi * self.done / self.steps))
        self.optimizer.param_groups[0]["lr"] = self.learning_rate * (_LAST_RATE + (1 - _LAST_RATE) * cosine)
        self.optimizer.step()
        self.rule.project()
        if self.done >= self.steps - self._averaged:
            for parameter, average in zip(self.parameters, self.averages, strict=True):
                average.add_(parameter)

    def _save(self) -> None:
        state = {
            "identity": self.identity,
            "steps": self.steps,
            "parameters": [parameter.tolist() for parameter in self.parameters],
            "optimizer": [
                {name: value.tolist() for name, value in self.optimizer.state[parameter].items()}
                for parameter in self.parameters
            ],
            "averages": [average.tolist() for average in self.averages],
            "generator": self.generator.get_state().tolist(),
            "objectives": {name: objective.state() for name, (objective, _) in self.objectives.items()},
            "history": [[one.losses, one.seconds] for one in self.history],
        }
        write_whole(self.file, json.dumps(state))

    @torch.no_grad()
    def load(self) -> None:
        """Go on where ``file`` ends, if that is of this request and of as many steps."""
        if not self.file.is_file():
            return
        state = read_json(self.file)
        # The rate and what is averaged depend on the number of steps.
        if (state["identity"], state.get("steps")) != (self.identity, self.steps) or "optimizer" not in state:
            return
        for parameter, values, of_adam in zip(self.parameters, state["parameters"], state["optimizer"], strict=True):
            parameter.copy_(torch.tensor(values))
            self.optimizer.state[parameter] = {
                name: torch.tensor(value, device=None if name == "step" else parameter.device)
                for name, value in of_adam.items()
            }
        for average, values in zip(self.averages, state["averages"], strict=True):
            average.copy_(torch.tensor(values))
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        for name, (objective, _) in self.objectives.items():
            objective.load_state(state["objectives"][name])
        self.history = [Step(losses, seconds) for losses, seconds in state["history"]]
