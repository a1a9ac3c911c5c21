"""Presets: how published checkpoints are extended, read from ``patches/*.toml``."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Preset:
    """One way to extend certain checkpoints.

    Attributes:
        name: What users type.
        family: For people.
        model_types: Those of ``config.json`` it is for.
        method: A name of ``available_methods()``.
        factor: Target length / original length.
        original_max_position_embeddings: Tokens the checkpoints were trained on.
        checkpoints: Names on the Hugging Face Hub.
        source: Where each number comes from.
        options: The method's own.
        sliding_window: What a window that every layer has was raised to, in tokens.
    """

    name: str
    family: str
    model_types: tuple[str, ...]
    method: str
    factor: float
    original_max_position_embeddings: int
    checkpoints: tuple[str, ...]
    source: str
    options: dict[str, Any] = field(default_factory=dict)
    sliding_window: int | None = None


@cache
def presets() -> dict[str, Preset]:
    """Return all presets by name."""
    found: dict[str, Preset] = {}
    for file in sorted(files("hf_posenc.patches").iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".toml"):
            continue
        family = tomllib.loads(file.read_text(encoding="utf-8"))
        for name, values in family["presets"].items():
            if name in found:
                raise ValueError(f"patches/{file.name}: there is another preset named {name!r}.")
            shared = {"name": name, "family": family["family"], "model_types": tuple(family["model_types"])}
            found[name] = Preset(**shared, **{**values, "checkpoints": tuple(values["checkpoints"])})
    return found


def get_preset(name: str) -> Preset:
    """Look a preset up.

    Raises:
        ValueError: It is unknown; the nearest known name is suggested.
    """
    if name not in presets():
        near = difflib.get_close_matches(str(name), presets(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown preset {name!r}.{hint} Known: {', '.join(presets())}.")
    return presets()[name]


def choose_preset(name: str, config: PreTrainedConfig, **given: Any) -> Preset:
    """Return a preset for a model, or say why it does not fit.

    Args:
        name: The preset.
        config: The model's text config.
        **given: What the caller gave besides it; None is not given.

    Raises:
        ValueError: It is unknown, for another family or for longer trained models, or something it decides was given
            as well.
    """
    preset = get_preset(name)
    if config.model_type not in preset.model_types:
        raise ValueError(
            f"preset {name!r} is for {preset.family} (model_type {', '.join(preset.model_types)}), this model is "
            f"{config.model_type!r}. `hf-posenc presets` lists all."
        )
    if decided := [argument for argument, value in given.items() if value not in (None, {})]:
        raise ValueError(
            f"preset {name!r} decides {', '.join(decided)} (it is {preset.method}, factor {preset.factor:g}): "
            "give the preset alone, or spell its numbers out without it."
        )
    # Longer is no contradiction: Mistral 0.1 declares 32768 tokens, and was trained on 8192.
    if config.max_position_embeddings < preset.original_max_position_embeddings:
        raise ValueError(
            f"preset {name!r} is for models trained on {preset.original_max_position_embeddings} tokens, this one's "
            f"config says {config.max_position_embeddings}."
        )
    return preset
