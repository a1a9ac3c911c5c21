"""The settings of a fine-tuning command that are not flags: the recipe's values, and the file's over them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hf_posenc.training.recipes import get_recipe, recipe_values
from hf_posenc.training.toml_config import read_run

_TARGET = ("factor", "context_length", "stages", "preset")


def settings_besides_flags(told: argparse.Namespace, known: Sequence[type]) -> dict[str, Any]:
    """Return values for flags that were not given: those of ``--config``, which win over those of ``--recipe``.

    Args:
        told: What the flags say, and nothing else.
        known: Dataclasses whose fields a file may set.

    Raises:
        FileNotFoundError, ValueError, TypeError: The recipe is unknown, or the file cannot be read.
    """
    flags = vars(told)
    values = read_run(flags["config"], known) if flags.get("config") else {}
    if any(name in flags for name in _TARGET):  # each says how far, so that another one must not say it too
        values = {name: value for name, value in values.items() if name not in _TARGET}
    if any(flags.get(name, values[name]) != values[name] for name in ("method", "preset") if name in values):
        values.pop("options", None)  # of the file's method
    recipe = flags.get("recipe") or values.get("recipe")
    if recipe is None:
        return values
    rule: dict[str, Any] = {name: flags[name] for name in ("method", "preset") if name in flags}
    fitting = recipe_values(recipe, {**values, **rule})
    return {**get_recipe(recipe).loading, **{name: value for name, value in fitting.items() if name not in rule}}
