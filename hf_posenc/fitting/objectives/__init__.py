"""The objectives of a fit, by name: one file of this folder for each."""

from __future__ import annotations

from hf_posenc.fitting.objectives.base import Objective
from hf_posenc.utils.registries import Registry

_REGISTRY: Registry[type[Objective]] = Registry("objective", __name__, without={"base"})
objectives = _REGISTRY.all
get_objective = _REGISTRY.get


def register_objective(cls: type[Objective]) -> type[Objective]:
    """Make a class known as an objective; a decorator.

    Raises:
        ValueError: The name is taken.
    """
    _REGISTRY.add(cls, [cls.name], cls)
    return cls
