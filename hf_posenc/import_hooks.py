"""Running a function on a module of another library as soon as that library is imported, and not before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
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
    else:
        sys.meta_path.insert(0, _Finder(name, hook))


class _Finder(MetaPathFinder):
    """Finds one module where Python would have found it, and calls the hook after it was executed."""

    def __init__(self, name: str, hook: Hook) -> None:
        self.name, self.hook = name, hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.hook)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, hook: Hook) -> None:
        self.loader, self.hook = loader, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:  # the module keeps the loader that Python would have given it
            spec.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.hook(module)
