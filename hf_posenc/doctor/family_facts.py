"""What differs by family when a config.json is read: facts of Transformers 4.57, 5.0 and 5.23, as data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hf_posenc.families.family_data import FULL_ATTENTION

# How Qwen2-VL shares the pairs of a head among the axes of a position.
MROPE_SECTION = [16, 24, 24]


@cache
def default_text(model_type: str) -> PreTrainedConfig | None:
    """Return the text config that Transformers has for a family by default; None if it does not know the family."""
    try:
        return AutoConfig.for_model(model_type).get_text_config(decoder=True)
    except (ValueError, KeyError, AttributeError):
        return None


@cache
def default_theta(model_type: str) -> float:
    """Return the base that Transformers assumes for a family where none is written."""
    parameters = getattr(default_text(model_type), "rope_parameters", None) or {}
    label = next((name for name in parameters if name in FULL_ATTENTION), None)
    return float(((parameters[label] if label else parameters) or {}).get("rope_theta") or 1e4)


def text_config(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the part of a config.json about the language model, and its key there ("" for the top).

    Family and length, which a published config may leave to Transformers (Gemma 3's do), are filled in there.
    """
    for key in ("text_config", "llm_config"):
        part = config.get(key)
        if isinstance(part, Mapping) and part:
            usual = default_text(str(part.get("model_type") or config.get("model_type")))
            filled = {name: getattr(usual, name, None) for name in ("model_type", "max_position_embeddings")}
            text = {**{name: value for name, value in filled.items() if value is not None}, **part}
            if text.get("max_position_embeddings") is not None:
                return key, text
    return "", dict(config)
