"""The output of commands while they work: their progress, the time that is left, and no bars of other libraries."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

from hf_posenc.utils.units import duration_name

logger = logging.getLogger(__name__)

LONG = 600.0  # seconds; of work that takes longer it is said what would make it shorter
_WORTH_SAYING = 5.0  # seconds; work that takes less is not announced
_BETWEEN_LINES = 30.0  # seconds, where there is no terminal


class Progress:
    """A bar on a terminal, a line now and then in a log file; and how long the work takes, once its first part is done.

    Args:
        what: The work, for the lines: "perplexity".
        total: How much there is to do.
        unit: What is counted, in the plural.
        done: How much of it was done before.
        shown: False shows nothing.
        shorter: What would make the work shorter, said where it takes more than ten minutes.
    """

    def __init__(
        self, what: str, total: int, *, unit: str = "tokens", done: int = 0, shown: bool = True, shorter: str = ""
    ) -> None:
        self.what, self.total, self.unit, self.shorter = what, total, unit, shorter
        self.done = self.before = done
        self.shown = shown and done < total
        on_terminal = self.shown and sys.stderr.isatty()
        scaled: dict[str, Any] = {"unit": "tok", "unit_scale": True} if unit == "tokens" else {}
        self.bar = tqdm(desc=what, total=total, initial=done, disable=not on_terminal, dynamic_ncols=True, **scaled)
        self.lines = self.shown and not on_terminal
        self.began = self.last_line = time.perf_counter()
        self.announced = self.advised = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, amount: int = 1) -> None:
        """Count ``amount`` more as done."""
        self.done += amount
        self.bar.update(amount)
        if self.shown and self.before < self.done < self.total:
            self._say(time.perf_counter())

    def close(self) -> None:
        """End the line of the bar, so that the next output begins on a new one."""
        self.bar.close()

    def _say(self, now: float) -> None:
        left = (now - self.began) / (self.done - self.before) * (self.total - self.done)
        if not self.announced and left > _WORTH_SAYING:
            part = f"the first {self.done - self.before:,} of {self.total:,} {self.unit}"
            self._log(logging.INFO, f"{self.what}: about {duration_name(left)} on this machine, by {part}")
        elif self.lines and now - self.last_line > _BETWEEN_LINES:
            words = f"{self.what}: {self.done:,} of {self.total:,} {self.unit}, about {duration_name(left)} left"
            self._log(logging.INFO, words)
        self.announced = True
        if left > LONG and self.shorter and not self.advised:
            self._log(logging.WARNING, f"{self.what} takes long on this machine. Shorter: {self.shorter}.")
            self.advised = True

    def _log(self, level: int, text: str) -> None:
        self.last_line = time.perf_counter()
        with tqdm.external_write_mode(file=sys.stderr):  # not into the line of a bar
            logger.log(level, text)


def text_width() -> int:
    """Return the columns of text on this terminal, at most 120."""
    return min(shutil.get_terminal_size().columns, 120)


@contextmanager
def quiet(*names: str, level: int = logging.WARNING) -> Iterator[None]:
    """While open, loggers of these names say nothing below ``level``."""
    logs = [logging.getLogger(name) for name in names]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(level)
    try:
        yield
    finally:
        for log, was in zip(logs, before, strict=True):
            log.setLevel(was)


@contextmanager
def without_weight_bars() -> Iterator[None]:
    """While open, Transformers draws no bars for weights that it loads and writes; those of downloads stay."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    drawn, hidden = transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # which hides downloads too
    if not hidden:
        enable_progress_bars()
    try:
        yield
    finally:
        if drawn:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if hidden:
            disable_progress_bars()
