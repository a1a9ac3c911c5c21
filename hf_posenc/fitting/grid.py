"""The first rule of a fit: the best of a small grid of published two-number rules, forward only."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_posenc.fitting.objectives.base import Objective
from hf_posenc.fitting.problem import FitProblem
from hf_posenc.fitting.rule import RuleParameters
from hf_posenc.fitting.run import FitRun
from hf_posenc.methods.base import Frequencies
from hf_posenc.methods.ntk_rcd import critical_pair_of
from hf_posenc.methods.registry import make_method

_EARLIER = (0, 2, 4, 6)  # pairs before the theoretical critical one
_SCALES = (1.0, 1.25, 1.5)  # times the factor
_SAMPLES = 3


@torch.no_grad()
def best_of_grid(
    run: FitRun,
    rule: RuleParameters,
    problem: FitProblem,
    objectives: Mapping[str, tuple[Objective, float]],
) -> tuple[str, Frequencies]:
    """Return the rule of the grid with the lowest loss, all on the same samples, and its name in words.

    Args:
        run: The fit.
        rule: What the objectives are computed under; it is left at the last rule of the grid.
        problem: Its generator is put back to where it was.
        objectives: By name, with their weights.
    """
    critical = critical_pair_of(run.spec, None)
    candidates: dict[str, tuple[float, Frequencies]] = {}
    state = problem.generator.get_state()
    for name, fixed in (("ntk", None), ("yarn", None), ("ntk_rcd", {"beyond_critical": "constant"}), ("yarn_rcd", {})):
        choices = (
            [{}]
            if fixed is None
            else [
                {**fixed, "critical_pair": critical - earlier, "scale": scale * run.factor}
                for earlier in _EARLIER
                for scale in _SCALES
                if critical - earlier >= 1
            ]
        )
        for options in choices:
            start = make_method(name, run.factor, options).frequencies(run.spec)
            rule.begin_at(start)
            problem.generator.set_state(state)
            loss = 0.0
            for objective, weight in objectives.values():
                objective.load_state([])
                for _ in range(_SAMPLES):
                    loss += weight * sum(float(part) for part in objective.losses())
                objective.load_state([])
            words = ", ".join(f"{key}={value:g}" for key, value in options.items() if key != "beyond_critical")
            candidates[f"{name} ({words})" if words else name] = (loss, start)
    problem.generator.set_state(state)
    best = min(candidates, key=lambda one: candidates[one][0])
    return best, candidates[best][1]
