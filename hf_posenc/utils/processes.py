"""The agreement of the processes of one distributed run, and their shared work: torchrun, accelerate, mpirun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from accelerate import PartialState  # type: ignore[import-untyped]  # accelerate ships no types
from accelerate.utils import broadcast_object_list, gather_object  # type: ignore[import-untyped]  # accelerate ships no types

from hf_posenc.errors import InvalidRequestError, RunStoppedError

T = TypeVar("T")
R = TypeVar("R")
_PATIENCE = timedelta(days=2)  # a process without work waits for those that read a long document


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
        raise RunStoppedError(f"the main process stopped this run. {message}")
    return value  # type: ignore[no-any-return]  # what decide returned, as it was sent


def join_processes(device: str | None) -> bool:
    """Meet the other processes if a launcher started several, each on its own GPU or all on the CPU.

    Args:
        device: What was requested: None, "cpu" or "cuda".

    Returns:
        Whether there are several.

    Raises:
        ValueError: A device that processes cannot share.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    if device not in (None, "cpu", "cuda"):
        raise InvalidRequestError(
            f"device {device!r} with several processes: each takes its own GPU. Leave it out, give 'cpu' for all of "
            "them, or start one process."
        )
    PartialState(cpu=device == "cpu", timeout=_PATIENCE)
    return True


def leave_processes() -> None:
    """Part from the others once all are through: a process that ends while another still listens may tear it down."""
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


class Processes:
    """The processes that share one piece of work; a single one, which talks to nobody, unless ``several``.

    Every process goes through the same steps and ends with the same results; ``is_main`` is the one that writes.
    """

    def __init__(self, several: bool = False) -> None:
        state = PartialState() if several else None
        self.count: int = 1 if state is None else state.num_processes
        self.index: int = 0 if state is None else state.process_index

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def from_main(self, decide: Callable[[], T]) -> T:
        """As the function of this name."""
        return decide() if self.count == 1 else from_main(decide)

    def gather(self, value: T) -> list[T]:
        """Return every process' value, which must be picklable, in every process, in their order."""
        return [value] if self.count == 1 else list(gather_object([value]))

    def agree(self, keys: list[str]) -> None:
        """Raise unless all processes were given the same work; a text read from stdin, for one, goes to one of them.

        Raises:
            ValueError: Model, texts or settings differ.
        """
        if any(others != keys for others in self.gather(keys)):
            raise InvalidRequestError(
                "the processes do not measure the same: model, texts and settings must be equal in all of them. Texts "
                "from stdin reach one process only: give a file."
            )

    def share(self, items: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[T, R]]:
        """Work on as many items at a time as there are processes, one each; yield all in order in every process.

        So what was yielded does not depend on how many processes there are, if an item's result does not.

        Raises:
            Exception: What ``work`` raised here.
            RuntimeError: It raised in another process.
        """
        for start in range(0, len(items), self.count):
            together = items[start : start + self.count]
            if self.count == 1:
                yield together[0], work(together[0])
            else:
                yield from zip(together, self._one_each(together, work), strict=False)

    def _one_each(self, items: Sequence[T], work: Callable[[T], R]) -> list[R]:
        """Return the results; of processes without an item, which come last, None."""
        done: Any = None
        failure: Exception | None = None
        if self.index < len(items):
            try:
                done = work(items[self.index])
            except Exception as error:  # the others wait for a word
                failure = error
        said = "" if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes = self.gather((done, said))
        if failure is not None:
            raise failure
        for index, (_, message) in enumerate(outcomes):
            if message:
                raise RunStoppedError(f"process {index} stopped this run. {message}")
        return [result for result, _ in outcomes]
