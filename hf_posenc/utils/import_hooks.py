"""Running a function on a module of another library as soon as that library is imported, and not before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook(module)`` with the module of that name: now if it is imported already, else right after its import.

    Args:
        name: Full name of a module, such as ``"peft.peft_model"``.
        hook: Called once.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        hook(module)
        return
    _FINDER.hooks[name] = hook
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(MetaPathFinder):
    """Finds modules where Python would have found them, and has their hooks called after they were executed.

    It stays where it is put: other threads may be walking through ``sys.meta_path``.
    """

    def __init__(self) -> None:
        self.hooks: dict[str, Hook] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.hooks:
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
        hook = _FINDER.hooks.pop(self.name, None)  # not before: an import that fails is tried again
        if hook is not None:
            hook(module)
