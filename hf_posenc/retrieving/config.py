"""The settings of retrieval: their defaults and help texts are declared only here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.evaluation.windows import whole_lengths
from hf_posenc.retrieving.tasks import expand_groups, get_task, tasks, tasks_and_groups

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
            "help": "measure retrieval, without --documents in the package's novels: tasks and groups from "
            "`hf-posenc list tasks`",
            "choices": tasks_and_groups(),  # with the registry itself: what is registered later is allowed too
            "metavar": "TASK",
        },
    )
    depths: list[float] = field(
        default_factory=lambda: list(DEFAULT_DEPTHS),
        metadata={"help": "where the answer is hidden: percent of the text that comes before it"},
    )
    samples: int = field(
        default=1, metadata={"help": "texts for each task and length; of one question each, for each depth too"}
    )
    questions: int = field(
        default=1,
        metadata={"help": "questions of each text, which is read once; with several, their needles lie at all depths"},
    )
    chat: Literal["auto", "on", "off"] = field(
        default="auto", metadata={"help": "use the tokenizer's chat template: on, off, or auto: if it has one"}
    )

    def __post_init__(self) -> None:
        self.tasks = expand_groups(self.tasks)


def check_retrieval(
    names: Sequence[str], context_lengths: Sequence[int], depths: Sequence[float], samples: int, questions: int = 1
) -> list[int]:
    """Return the lengths, rising and each once.

    Raises:
        TypeError: The lengths are no list of whole numbers.
        ValueError: A task is unknown, a length is not positive, a depth not in percent, or one of them is missing; or
            several questions of a text are requested of a task that has one, or at given depths.
    """
    for name in names:
        get_task(name)
    lengths = whole_lengths(context_lengths)
    for name, values in (("tasks", names), ("context_lengths", lengths), ("depths", depths)):
        if len(values) == 0:
            raise InvalidRequestError(f"{argument(name)} is empty: give at least one.")
    for depth in depths:
        if not 0 <= depth <= 100:
            raise InvalidRequestError(
                f"a depth is a percentage from 0 (the beginning of the text) to 100, got {depth:g}."
            )
    for name, number in (
        ("a context length", lengths[0]),
        ("samples", samples),
        ("questions", questions),
    ):
        if number < 1:
            raise InvalidRequestError(f"{name} must be at least 1, got {number}.")
    if questions > 1:
        _check_several(names, depths, questions)
    return lengths


def _check_several(names: Sequence[str], depths: Sequence[float], questions: int) -> None:
    if single := [name for name in names if not get_task(name).several_questions]:
        able = ", ".join(name for name, task in tasks().items() if task.several_questions)
        raise InvalidRequestError(
            f"{questions} questions of one text were requested, and task {single[0]!r} has one. Measure it by itself, "
            f"with {argument('samples')} for more texts. Tasks with several: {able}."
        )
    if tuple(depths) != DEFAULT_DEPTHS:
        raise InvalidRequestError(
            f"{argument('depths')} cannot be used with several questions of one text: their needles are spread over "
            f"the whole text, so that every depth is measured. Leave {argument('depths')} or {argument('questions')} "
            "out."
        )
