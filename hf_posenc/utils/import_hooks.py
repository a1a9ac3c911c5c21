"""Changes to modules of other libraries, made now or right after the library is imported, and to their functions."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_WRAPPER = "_is_hf_posenc_wrapper"
Change = Callable[[ModuleType], None]


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function, method or class method by ``around(original, *args, **kwargs)``, unless that was done."""
    defined = inspect.getattr_static(owner, name)
    original = defined.__func__ if isinstance(defined, classmethod) else defined
    if hasattr(original, _WRAPPER):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, _WRAPPER, True)
    setattr(owner, name, classmethod(wrapper) if isinstance(defined, classmethod) else wrapper)


def when_imported(name: str, change: Change) -> None:
    """Call ``change(module)`` now if the module is imported already, else right after its import.

    A module that another thread is importing is waited for. A change that fails is logged, and the import of the other
    library goes on.

    Args:
        name: Full name of a module, such as ``"peft.peft_model"``.
        change: Called once for each call of this function.
    """
    if _is_imported(name):
        _make(change, sys.modules[name])
        return
    _FINDER.changes[name] = change
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if name not in sys.modules:
        return
    with suppress(Exception):  # importing waits for the other thread; an import that failed is tried again later
        import_module(name)
    if _is_imported(name):
        if _FINDER.changes.pop(name, None) is not None:
            _make(change, sys.modules[name])
    elif name in sys.modules:
        del _FINDER.changes[name]
        logger.warning("%s is being imported by the caller. Call hf_posenc.install() after that import.", name)


def _is_imported(name: str) -> bool:
    """Return whether a module was imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _make(change: Change, module: ModuleType) -> None:
    try:
        change(module)
    except Exception as error:  # the import of the other library must not fail because of us
        logger.warning(
            "%s was not changed (%s: %s), so extended models are not saved and loaded by it. Use save_extended and "
            "load_extended of hf_posenc.",
            module.__name__,
            type(error).__name__,
            error,
        )


class _Finder(MetaPathFinder):
    """Finds modules where Python would have found them, and has their changes made after they were executed.

    It stays in ``sys.meta_path``: other threads may be iterating over this list.
    """

    def __init__(self) -> None:
        self.changes: dict[str, Change] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.changes:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


_FINDER = _Finder()


class _Loader(Loader):
    def __init__(self, loader: Loader, name: str) -> None:
        self.loader, self.name = loader, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:  # the module keeps the loader that Python would have given it
            spec.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        change = _FINDER.changes.pop(self.name, None)  # not before: an import that fails is tried again
        if change is not None:
            _make(change, module)
