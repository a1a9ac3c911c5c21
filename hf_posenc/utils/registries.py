"""Things by name: those that the modules of a package register, and any that are registered besides."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Generic, TypeVar

from hf_posenc.errors import InvalidRequestError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A registry whose own things are found by importing every module of its packages.

    Args:
        kind: What messages call a thing of it.
        *packages: Names of the packages.
        without: Modules of them that register nothing.
    """

    def __init__(self, kind: str, *packages: str, without: Iterable[str] = ()) -> None:
        self.kind, self.packages, self.without = kind, packages, frozenset(without)
        self._things: dict[str, T] = {}
        self._owners: dict[str, tuple[tuple[str, ...], str]] = {}
        self._is_complete = False

    def add(self, thing: T, names: Iterable[str], made_by: Any) -> None:
        """Register a thing under its first name, and keep its other names from being taken.

        Args:
            thing: To register.
            names: The first one is what ``all`` has.
            made_by: The class or function, whose module and name messages give; the same one may register again, as
                when its module is imported anew.

        Raises:
            InvalidRequestError: A name is taken.
        """
        if not made_by.__module__.startswith(self.packages):
            self.import_all()  # so that a name of the package is taken, whoever comes first
        owner, names = f"{made_by.__module__}.{made_by.__qualname__}", tuple(names)
        for first, (others, other_owner) in self._owners.items():
            taken = [name for name in names if name in others and first in self._things and owner != other_owner]
            if taken:
                raise InvalidRequestError(f"{self.kind} {taken[0]!r} is registered already, by {other_owner}.")
        self._things[names[0]] = thing
        self._owners[names[0]] = names, owner

    def all(self) -> dict[str, T]:
        """Return the registry itself: what is registered later appears in it."""
        self.import_all()
        return self._things

    def get(self, name: str) -> T:
        """Look a thing up by its first name.

        Raises:
            UnknownNameError: The name is unknown; the nearest known name is suggested.
        """
        if name not in self.all():
            raise UnknownNameError(self.kind, name, self.all())
        return self._things[name]

    def import_all(self) -> None:
        """Import every module of the packages, once."""
        if self._is_complete:
            return
        self._is_complete = True
        for package in self.packages:
            for module in pkgutil.iter_modules(import_module(package).__path__):
                if module.name not in self.without:
                    import_module(f"{package}.{module.name}")
