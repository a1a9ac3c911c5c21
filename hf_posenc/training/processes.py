"""What the processes of one distributed run must agree on: the first decides, the others are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]

T = TypeVar("T")


def from_main(decide: Callable[[], T]) -> T:
    """Call ``decide`` in the main process only and return its answer, which must be picklable, in every process.

    Files are read and written this way, so that no process sees what another one has half done. It is a barrier too:
    nobody goes on before the main process is through.

    Raises:
        Exception: What ``decide`` raised, in the main process.
        RuntimeError: In the others then, so that they stop instead of waiting for ever.
    """
    answer: list[Any] = [None, None]
    failure: Exception | None = None
    if PartialState().is_main_process:
        try:
            answer = [decide(), None]
        except Exception as error:
            failure = error
            answer = [None, f"{type(error).__name__}: {error}"]
    broadcast_object_list(answer)
    if failure is not None:
        raise failure
    value, message = answer
    if message is not None:
        raise RuntimeError(f"the main process stopped this run. {message}")
    return value  # type: ignore[no-any-return]
