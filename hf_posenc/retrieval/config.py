"""Which retrieval is measured: these settings, their defaults and help texts are declared only here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, argument
from hf_posenc.retrieval.tasks import get_task, tasks

DEFAULT_DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)


@dataclass
class RetrievalConfig:
    """Retrieval, measured instead of perplexity.

    The names are those of ``retrieval``. The help text of a field is its documentation.
    """

    HELP_COMMON: ClassVar[tuple[str, ...]] = ("tasks",)

    tasks: list[str] = field(
        default_factory=list,
        metadata={
            "help": "measure retrieval, without --documents in the package's novels: one or more of %(choices)s",
            "choices": tasks(),  # the registry itself: what is registered later is allowed too
            "metavar": "TASK",
        },
    )
    depths: list[float] = field(
        default_factory=lambda: list(DEFAULT_DEPTHS),
        metadata={"help": "where the answer is hidden: percent of the text that comes before it"},
    )
    samples: int = field(default=1, metadata={"help": "prompts for each task, length and depth"})
    chat: Literal["auto", "on", "off"] = field(
        default="auto", metadata={"help": "use the tokenizer's chat template: on, off, or auto: if it has one"}
    )


def check_retrieval(
    names: Sequence[str], context_lengths: Sequence[int], depths: Sequence[float], samples: int
) -> list[int]:
    """Return the lengths, rising and each once.

    Raises:
        ValueError: A task is unknown, a length is not positive, a depth not in percent, or one of them is missing.
    """
    if isinstance(names, str):
        raise InvalidTypeError(f"tasks must be a list of names; put a single one in a list: [{names!r}].")
    for name in names:
        get_task(name)
    for name, values in (("tasks", names), ("context_lengths", context_lengths), ("depths", depths)):
        if len(values) == 0:
            raise InvalidRequestError(f"{argument(name)} is empty: give at least one.")
    for depth in depths:
        if not 0 <= depth <= 100:
            raise InvalidRequestError(
                f"a depth is a percentage from 0 (the beginning of the text) to 100, got {depth:g}."
            )
    for name, number in (("a context length", min(context_lengths)), ("samples", samples)):
        if number < 1:
            raise InvalidRequestError(f"{name} must be at least 1, got {number}.")
    return sorted(set(context_lengths))
