"""Families as data, from ``patches/*.toml``: facts of published checkpoints, and presets, how they are extended."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import InvalidRequestError

if TYPE_CHECKING:  # only named here: `hf-posenc list presets` answers without PyTorch
    from transformers import PreTrainedConfig

from hf_posenc.errors import UnknownNameError
from hf_posenc.families.sliding_window import KEEP, window_of_all_layers


@dataclass(frozen=True)
class Checkpoint:
    """The known facts of a published checkpoint.

    Attributes:
        name: On the Hugging Face Hub.
        family: For people.
        model_type: That of its ``config.json``.
        trained_length: Tokens it was trained on before the scaling it has, if any: what factors count from.
        head_dim: Features of an attention head.
        rotary_dim: How many of them are rotated.
        rope_theta: Base, on layers that read the whole context.
        source: Where the numbers come from.
        declared_length: ``max_position_embeddings`` of its ``config.json``, in tokens; None: no source for it.
        sliding_window: Tokens that a layer with a window looks back; None: every layer reads everything.
        windowed_layers: Which layers have it: ``"all"``, or ``"1 in 2"``.
        scaled: ``method`` and ``factor`` of the rule its weights were trained with; it needs no other.
    """

    name: str
    family: str
    model_type: str
    trained_length: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    source: str
    declared_length: int | None = None
    sliding_window: int | None = None
    windowed_layers: str | None = None
    scaled: dict[str, Any] | None = None


@dataclass(frozen=True)
class Preset:
    """One way to extend certain checkpoints.

    Attributes:
        name: What users type.
        family: For people.
        model_types: Those of ``config.json`` it is for: its checkpoints'.
        method: A name of ``available_methods()``.
        factor: Target length / original length.
        original_max_position_embeddings: Tokens the checkpoints were trained on.
        checkpoints: Names on the Hugging Face Hub; those trained with the rule too: a config can lose it.
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

    def window_for(self, config: PreTrainedConfig, requested: str | int) -> str | int:
        """Return the value for a window that every layer has: as requested, or as the checkpoints had it."""
        if requested == KEEP and self.sliding_window and window_of_all_layers(config):
            return self.sliding_window
        return requested

    def refuse_besides(self, **given: Any) -> None:
        """Refuse what a caller gave although the preset decides it; None and an empty dict are not given.

        Raises:
            ValueError: Something was given.
        """
        if decided := [argument for argument, value in given.items() if value not in (None, {})]:
            raise InvalidRequestError(
                f"preset {self.name!r} decides {', '.join(decided)} (it is {self.method}, factor {self.factor:g}): "
                "give the preset alone, or give its numbers without it."
            )


def _patches() -> Traversable:
    """Return ``patches/``: in the package where that is installed, beside it in a checkout that is on the path."""
    try:
        return files("hf_posenc.patches")
    except ModuleNotFoundError:
        return files("hf_posenc").joinpath("..", "patches")


def _families() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each file of ``patches/`` and what it holds."""
    for file in sorted(_patches().iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            yield file.name, tomllib.loads(file.read_text(encoding="utf-8"))


@cache
def checkpoints() -> dict[str, Checkpoint]:
    """Return all known checkpoints by name, family by family."""
    found: dict[str, Checkpoint] = {}
    for file, family in _families():
        for row in family["checkpoints"]:
            facts = {"family": family["family"], "rotary_dim": row["head_dim"], **row}
            for name in facts.pop("names"):
                if name in found:
                    raise InvalidRequestError(f"patches/{file}: checkpoint {name!r} is there already.")
                found[name] = Checkpoint(name, **facts)
    return found


def known_checkpoint(name: str) -> Checkpoint | None:
    """Return the known facts of a checkpoint, by its name on the Hub (upper or lower case); None if there are none.

    For a loaded model the name is ``config._name_or_path``.
    """
    return {known.lower(): facts for known, facts in checkpoints().items()}.get(str(name).lower())


@cache
def presets() -> dict[str, Preset]:
    """Return all presets by name."""
    found: dict[str, Preset] = {}
    for file, family in _families():
        for name, values in family.get("presets", {}).items():
            if name in found:
                raise InvalidRequestError(f"patches/{file}: there is another preset named {name!r}.")
            names = tuple(values.pop("checkpoints"))
            if unknown := [checkpoint for checkpoint in names if checkpoint not in checkpoints()]:
                raise InvalidRequestError(
                    f"patches/{file}: preset {name!r} is for {unknown}, of which there are no facts."
                )
            model_types = tuple(dict.fromkeys(checkpoints()[checkpoint].model_type for checkpoint in names))
            found[name] = Preset(name, family["family"], model_types, checkpoints=names, **values)
    return found


def get_preset(name: str) -> Preset:
    """Look a preset up.

    Raises:
        ValueError: It is unknown; the nearest known name is suggested.
    """
    if name not in presets():
        raise UnknownNameError("preset", name, presets())
    return presets()[name]


def preset_for(name: str, config: PreTrainedConfig) -> Preset:
    """Return a preset for a model, or say why it does not fit.

    Args:
        name: The preset.
        config: The model's text config.

    Raises:
        ValueError: It is unknown, for another family or for models trained on another length.
    """
    preset = get_preset(name)
    if config.model_type not in preset.model_types:
        raise InvalidRequestError(
            f"preset {name!r} is for {preset.family} (model_type {', '.join(preset.model_types)}), this model is "
            f"{config.model_type!r}. `hf-posenc list presets` lists all."
        )
    original = preset.original_max_position_embeddings
    known = known_checkpoint(getattr(config, "_name_or_path", ""))
    if known is not None and known.trained_length != original:
        raise InvalidRequestError(
            f"preset {name!r} is for models trained on {original} tokens, {known.name} was trained on "
            f"{known.trained_length}."
        )
    # Longer is no contradiction: Mistral 0.1 declares 32768 tokens, and was trained on 8192.
    if config.max_position_embeddings < original:
        raise InvalidRequestError(
            f"preset {name!r} is for models trained on {original} tokens, this one's config says "
            f"{config.max_position_embeddings}."
        )
    return preset
