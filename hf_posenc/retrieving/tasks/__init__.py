"""The retrieval tasks by name: those of this folder, one file for each, and any that are registered besides."""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, UnknownNameError
from hf_posenc.retrieving.tasks.base import MakePuzzle, Task
from hf_posenc.retrieving.tasks.groups import GROUPS, Group
from hf_posenc.utils.registries import Registry

logger = logging.getLogger(__name__)
_REGISTRY: Registry[Task] = Registry("task", __name__)
tasks = _REGISTRY.all


def register_task(
    name: str, *, has_depth: bool, source: str, several_questions: bool = False
) -> Callable[[MakePuzzle], MakePuzzle]:
    """Make a function known as a task; a decorator.

    Args:
        name: As ``--tasks`` and records have it.
        has_depth: Whether an answer lies at one depth of the text, so that it is measured by depth.
        source: Where the task was published.
        several_questions: Whether one text can hold several questions, so that they share its prefill.

    Raises:
        ValueError: The name is that of a task or group already.
    """

    def register(make: MakePuzzle) -> MakePuzzle:
        if name in GROUPS:
            raise InvalidRequestError(f"{name!r} is a group of tasks already: {', '.join(GROUPS[name].tasks)}.")
        _REGISTRY.add(Task(name, make, has_depth, source, several_questions), [name], make)
        return make

    return register


def tasks_and_groups() -> Mapping[str, Task | Group]:
    """Return the values of ``--tasks``, by name: the registry itself and the groups."""
    both: list[Any] = [GROUPS, tasks()]  # which are listed from the last
    return ChainMap(*both)


def expand_groups(names: Sequence[str]) -> list[str]:
    """Return the names of tasks, each once, with a group's tasks in its place; what a group leaves out is logged.

    A name that is neither is kept: ``get_task`` refuses it.

    Raises:
        TypeError: A name is given by itself.
    """
    if isinstance(names, str):
        raise InvalidTypeError(f"tasks must be a list of names. Put a single name into a list: [{names!r}].")
    names_of_tasks: dict[str, None] = {}
    for name in dict.fromkeys(names):
        group = GROUPS.get(name)
        names_of_tasks |= dict.fromkeys((name,) if group is None else group.tasks)
        if group is not None and group.left_out:
            logger.warning("tasks of %s: %s", name, group.left_out)
    return list(names_of_tasks)


def get_task(name: str) -> Task:
    """Look a task up.

    Raises:
        ValueError: It is unknown; the nearest known name is suggested.
    """
    if name not in tasks():
        raise UnknownNameError("task", name, tasks_and_groups())
    return tasks()[name]
