"""The ``hf-posenc finetune`` command of a way to train."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from hf_posenc.planning.levers import Lever
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.recipes import get_recipe

# Given for every way alike, or by --option.
_SAID_OTHERWISE = ("output_dir", "options", "context_length")


def finetune_words(model: str, target: int) -> list[str]:
    """Return how the command of each way begins; texts and folder are left to be named."""
    where = ["--documents", "TEXTS", "--output-dir", "OUT"]
    return ["hf-posenc", "finetune", model, *where, "--context-length", str(int(target))]


def flags_of(lever: Lever, *, on_scaled: bool = False) -> list[str]:
    """Return the flags that make ``finetune`` train in one way.

    Args:
        lever: The way.
        on_scaled: The model has a scaling, in the place of which the new one is put.
    """
    run, usual, loading = lever.run, _usual(), {}
    if run.recipe is not None:
        recipe = get_recipe(run.recipe)
        usual, loading = {**usual, **recipe.values, "recipe": None}, dict(recipe.loading)
    told = {name: vars(run)[name] for name in usual if vars(run)[name] != usual[name] and name not in _SAID_OTHERWISE}
    if lever.load_in_4bit and not loading.get("load_in_4bit"):
        told["load_in_4bit"] = True
    if on_scaled:
        told["on_scaled"] = "replace"
    words = []
    for name, value in told.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True and usual[name] is False else _values(value))]
    for name, value in run.options.items() if run.options != usual["options"] else ():
        words += ["--option", f"{name}={value}"]
    if lever.sharding is not None:
        over = lever.sharding.num_devices
        if lever.sharding.context_parallel:
            return [*words, "--accelerate-config", f"context_parallel_{over}gpu"]
        return [*words, "--accelerate-config", "fsdp2", "--num-processes", str(over)]
    return words


def _usual() -> dict[str, Any]:
    """Return the default of each field that is a flag, and that of the options of a method."""
    shown = {one.name for one in dataclasses.fields(FinetuneConfig) if one.metadata.get("help") != argparse.SUPPRESS}
    usual = FinetuneConfig.defaults()
    return {**{name: usual[name] for name in usual if name in shown}, "options": {}}


def _values(value: Any) -> list[str]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [str(one).lower() if isinstance(one, bool) else str(one) for one in values]
