"""The costs of a longer context, and the method, recipe and training option to take, before any weights are loaded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.planning.planner import Plan, plan
    from hf_posenc.planning.text import plan_text

# Imported at first use: the training packages take seconds, which `hf-posenc plan --help` need not cost.
_MODULES = {"Plan": "planner", "plan": "planner", "plan_text": "text"}

__all__ = ["Plan", "plan", "plan_text"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
