"""How far a model is extended: the one place where these settings, their defaults and help texts are declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from hf_posenc.utils.units import ContextLength


@dataclass
class ExtensionConfig:
    """How far a model is extended; the names are those of ``patch_model``. Each help text is the documentation."""

    preset: str | None = field(
        default=None, metadata={"help": "a name from `hf-posenc presets`, instead of method, factor and options"}
    )
    rope_scaling: str | None = field(
        default=None,
        metadata={
            "help": "a dictionary as vLLM, LLaMA-Factory and Transformers take it, instead of method, factor and "
            """options: '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'"""
        },
    )
    factor: float | None = field(
        default=None, metadata={"help": "target length / original length; 4, 4x further, if no length is given either"}
    )
    context_length: ContextLength | None = field(
        default=None, metadata={"help": "target length in tokens (32k = 32768), instead of --factor"}
    )
    original_max_position_embeddings: ContextLength | None = field(
        default=None, metadata={"help": "tokens the model was trained on; default: what its config says"}
    )
    # A number of tokens is taken too, and kept as its digits.
    sliding_window: str = field(
        default="keep", metadata={"help": "what becomes of a window that every layer has: keep, off or tokens (16k)"}
    )
    on_scaled: Literal["refuse", "replace"] = field(
        default="refuse",
        metadata={"help": "replace: put the method in place of the scaling that the checkpoint came with"},
    )


@dataclass
class ExtensionRequest(ExtensionConfig):
    """What a model is to be extended by, and how far: the arguments of ``patch_model`` as one object.

    Attributes:
        method: A name or alias; None for the default, or what ``preset`` or ``rope_scaling`` says.
        options: The method's own.
    """

    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **arguments: Any) -> Self:
        """Return the request of ``patch_model``'s arguments: what is no setting is an option of the method."""
        settings = {each.name for each in fields(cls)} - {"options"}
        options = {name: value for name, value in arguments.items() if name not in settings}
        return cls(**{name: arguments[name] for name in arguments.keys() & settings}, options=options)
