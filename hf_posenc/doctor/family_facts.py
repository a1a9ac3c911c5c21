"""What differs by family when a config.json is read: facts of Transformers 4.57, 5.0 and 5.23, as data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hf_posenc.families.discovery import FULL_ATTENTION

# Their configs leave head_dim None where it is not written: yarn, dynamic, longrope then crash. Mistral's: only in 4.
HEAD_DIM_NONE = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "minimax", "ministral", "mistral", "mixtral"})
# Where version 4 assumes another base than version 5, and what share of a head turns where no version is told.
THETA_4 = {"cohere": 1e4, "falcon_h1": 1e5, "fuyu": 25e3, "olmo3": 1e4, "persimmon": 25e3}
PARTIAL = {"gpt_neox": 0.25, "stablelm": 0.25, "phi": 0.5, "persimmon": 0.5, "glm": 0.5, "glm4": 0.5, "nemotron": 0.5}
PARTIAL |= {"bamba": 0.5, "glm4_moe": 0.5, "recurrent_gemma": 0.5, "qwen3_next": 0.25, "fuyu": 0.5}
# Families that 4.57 does not know, and those whose rule it has by default where rope_scaling is not written.
# fmt: off
NOT_IN_4 = frozenset({
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "cohere_compass_text", "cwm", "deepseek_v32",
    "deepseek_v4", "dots3_note", "dots3_note_text", "exaone_moe", "flint", "gemma4", "gemma4_assistant",
    "gemma4_text", "gemma4_unified", "gemma4_unified_assistant", "gemma4_unified_text", "glm4_moe_lite",
    "glm_moe_dsa", "granite_swa", "granitemoe_swa", "hrm_text", "hy_v3", "hy_v4", "hyperclovax", "inkling2_text",
    "inkling_text", "internlm3", "iquestcoder", "jais2", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "lfm3",
    "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral3",
    "moss_transcribe_diarize", "nanochat", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen4_exp", "qwen4_exp_text", "solar_open", "youtu", "zaya",
})
# fmt: on
SCALED_IN_4 = frozenset({"apertus", "gpt_oss"})

# Positions of several axes (mrope). In the first, which take rope_type "mrope" for "default", 4.57 and 5.0 look for
# mrope_section in each layer, when the model runs, and 5.23 puts this one where none is written. In the second, 4.57
# cannot do without rope_scaling, and no version has a rope_type "mrope".
MROPE_SECTION = [16, 24, 24]
MROPE_IN_LAYERS = frozenset({"qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"})
MROPE_IN_MODULE = frozenset({"qwen3_vl_text", "qwen3_vl_moe_text"})


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
    """Return the part of a config.json about the language model, and the key it stands under ("" for the top).

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
