"""The retrieval tasks by name: those of this folder, one file for each, and any that are registered besides."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module

from hf_posenc.errors import InvalidRequestError, UnknownNameError
from hf_posenc.retrieval.tasks.base import MakePuzzle, Task

_REGISTERED: dict[str, Task] = {}


def register_task(name: str, *, has_depth: bool, source: str) -> Callable[[MakePuzzle], MakePuzzle]:
    """Make a function known as a task; a decorator.

    Args:
        name: As ``--tasks`` and records have it.
        has_depth: Whether the answer lies at one depth of the text, so that it is measured by depth.
        source: Where the task was published.

    Raises:
        ValueError: The name is taken.
    """

    def register(make: MakePuzzle) -> MakePuzzle:
        if not getattr(make, "__module__", "").startswith(__name__):
            _import_all()  # so that a name of ours is taken, whoever comes first
        if name in _REGISTERED:
            raise InvalidRequestError(f"task {name!r} is registered already, from {_REGISTERED[name].source}.")
        _REGISTERED[name] = Task(name, make, has_depth, source)
        return make

    return register


def tasks() -> dict[str, Task]:
    """Return the registry itself: a task that is registered later appears in it."""
    _import_all()
    return _REGISTERED


def get_task(name: str) -> Task:
    """Look a task up.

    Raises:
        ValueError: It is unknown; the nearest known name is suggested.
    """
    if name not in tasks():
        raise UnknownNameError("task", name, tasks())
    return tasks()[name]


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
