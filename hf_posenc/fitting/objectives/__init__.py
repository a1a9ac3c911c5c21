"""What a fit lowers, by name: the objectives of this folder, one file for each."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from hf_posenc.errors import InvalidRequestError, UnknownNameError
from hf_posenc.fitting.objectives.base import Objective

_REGISTERED: dict[str, type[Objective]] = {}


def register_objective(cls: type[Objective]) -> type[Objective]:
    """Make a class known as an objective; a decorator.

    Raises:
        ValueError: The name is taken.
    """
    if cls.name in _REGISTERED and _REGISTERED[cls.name].__qualname__ != cls.__qualname__:
        raise InvalidRequestError(f"objective {cls.name!r} is registered already.")
    _REGISTERED[cls.name] = cls
    return cls


def objectives() -> dict[str, type[Objective]]:
    """Return the objectives by name."""
    _import_all()
    return _REGISTERED


def get_objective(name: str) -> type[Objective]:
    """Look an objective up.

    Raises:
        ValueError: It is unknown; the nearest known name is suggested.
    """
    if name not in objectives():
        raise UnknownNameError("objective", name, objectives())
    return objectives()[name]


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        if module.name != "base":
            import_module(f"{__name__}.{module.name}")
