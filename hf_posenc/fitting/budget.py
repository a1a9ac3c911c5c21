"""The time that a fit may take, and the steps that it leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.utils.files import read_json, write_whole
from hf_posenc.utils.units import duration_name

_FEWEST_STEPS = 20  # with fewer of them, a fit is refused

Seconds = tuple[float, float]  # what is needed however many steps there are, and of each step


@dataclass
class Budget:
    """The time that a fit may take.

    Attributes:
        seconds: Of all of it; None: as long as it takes.
        began: When the fit began, by ``time.perf_counter``.
        measuring: Seconds that are kept for measuring the result.
        rules: How many rules are measured in them.
    """

    seconds: float | None
    began: float
    measuring: float = 0.0
    rules: int = 0

    @property
    def left(self) -> float:
        """Seconds that are left, those for measuring too; infinite without a limit."""
        return float("inf") if self.seconds is None else self.seconds - (time.perf_counter() - self.began)

    def steps(
        self,
        wanted: int,
        file: Path,
        cost: Callable[[], Seconds],
        *,
        share: float = 1.0,
        fewest: int = _FEWEST_STEPS,
        of: str = "",
    ) -> int:
        """Return how many steps are taken: as many as wanted, or what is left beside the measurement.

        Args:
            wanted: The number in the settings.
            file: Where the number is kept, of fits that want as many, so that a stopped one goes on with it.
            cost: Measures what is needed; called only where there is a limit and no number is kept.
            share: Of the time that is left, for these steps.
            fewest: Steps with which it makes sense, if not fewer are wanted.
            of: What the steps are of, for the error.

        Raises:
            ValueError: There is no time for the fewest.
        """
        if self.seconds is None or not wanted:
            return wanted
        known = read_json(file) if file.is_file() else {}
        if known.get("budget") == self.seconds:
            return int(known["steps"])
        always, each = cost()
        steps = max(0, min(wanted, int((share * (self.left - self.measuring) - always) / each)))
        if steps < (fewest := min(fewest, wanted)):
            needed = self.seconds - self.left + self.measuring + (always + fewest * each) / share
            work, advice = f"{fewest} steps{of}", f"a shorter {argument('context_length')}"
            if self.rules:
                work += f" and the measurement of {self.rules} rules"
                advice += f", or {argument('held_out')} 0"
            raise InvalidRequestError(
                f"a budget of {duration_name(self.seconds)} is too short: {work} need {duration_name(needed)} in all. "
                f"Give more, or {advice}. What was recorded is kept if there is a folder for it."
            )
        write_whole(file, json.dumps({"steps": steps, "budget": self.seconds}))
        return steps
