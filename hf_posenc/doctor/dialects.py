"""How versions of Transformers read the rotary settings of a config.json: JSON in, facts out, nothing is loaded.

Checked against Transformers 4.57.6, 5.0.0 and 5.23.0 (``tests/test_doctor_versions.py``). Version 4 reads the base from
the top level and the rule from ``rope_scaling``. Version 5 takes ``rope_scaling`` if it is there, whole, and else
``rope_parameters``; the top level only fills in a base that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hf_posenc.families import FULL_ATTENTION, LEGACY_KEYS, LONGROPE_ONLY, NESTED_KEYS

VERSIONS = ("4.57", "5.0", "5.23")
# Their configs leave head_dim None where it is not written: yarn, dynamic, longrope then crash. Mistral's: only in 4.
HEAD_DIM_NONE = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "minimax", "ministral", "mistral", "mixtral"})
_READS_HEAD_DIM = frozenset({"yarn", "dynamic", "longrope"})
_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
# Where version 4 assumes another base than version 5, and what share of a head turns where no version is told.
_THETA_4 = {"cohere": 1e4, "falcon_h1": 1e5, "fuyu": 25e3, "olmo3": 1e4, "persimmon": 25e3}
_PARTIAL = {"gpt_neox": 0.25, "stablelm": 0.25, "phi": 0.5, "persimmon": 0.5, "glm": 0.5, "glm4": 0.5, "nemotron": 0.5}
_PARTIAL |= {"bamba": 0.5, "glm4_moe": 0.5, "recurrent_gemma": 0.5, "qwen3_next": 0.25, "fuyu": 0.5}
# Families that 4.57 does not know, and those whose rule it has by default where rope_scaling is not written.
# fmt: off
_NOT_IN_4 = frozenset({
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
_SCALED_IN_4 = frozenset({"apertus", "gpt_oss"})
_USUAL = (
    ("beta_fast", 32.0),
    ("beta_slow", 1.0),
    ("truncate", True),
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
)
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Rope:
    """The rotary rule a reader arrives at; two are equal if and only if the frequencies are.

    Attributes:
        rope_type: default, linear, dynamic, yarn, llama3 or longrope.
        rope_theta: Base of the frequencies.
        factor: Target / original length, where the frequencies depend on it.
        original: Original length in tokens, where the rule uses it.
        options: The rule's other numbers, as they take effect.
        partial: Share of a head that turns; None where only the family says.
    """

    rope_type: str
    rope_theta: float
    factor: float = 1.0
    original: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    partial: float | None = None

    def __str__(self) -> str:
        words = ["no scaling" if self.rope_type == "default" else self.rope_type]
        if self.rope_type not in ("default", "longrope"):
            words[0] += f" x{self.factor:g}"
        words[0] += f" of {self.original}" if self.original is not None else ""
        shown = [(k, v) for k, v in self.options if not isinstance(v, tuple) and (k, v) not in _USUAL]
        words += [f"{key} {format(value, '.4g') if isinstance(value, float) else value}" for key, value in shown]
        if self.partial is not None:
            words.append(f"{self.partial:g} of each head")
        return ", ".join([*words, f"rope_theta {self.rope_theta:g}"])


class Refused(ValueError):
    """A version of Transformers cannot build a model from a config; the message says why."""


def text_config(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the part of a config.json about the language model, and the key it stands under ("" for the top)."""
    for key in ("text_config", "llm_config"):
        if isinstance(config.get(key), Mapping) and config[key].get("max_position_embeddings") is not None:
            return key, dict(config[key])
    return "", dict(config)


@cache
def default_theta(model_type: str) -> float:
    """Return the base that Transformers assumes for a family where none is written."""
    from transformers import AutoConfig

    try:
        parameters = AutoConfig.for_model(model_type).rope_parameters
    except (ValueError, AttributeError):
        return 1e4
    label = next((name for name in parameters if name in FULL_ATTENTION), None)
    return float(((parameters[label] if label else parameters) or {}).get("rope_theta") or 1e4)


def is_nested(config: Mapping[str, Any]) -> bool:
    """Return whether each layer type of the family has rotary settings of its own."""
    return config.get("model_type") in NESTED_KEYS or full_label(config) is not None


def full_label(config: Mapping[str, Any]) -> str | None:
    """Return the key of ``rope_parameters`` that holds the settings of full attention, None if they are flat."""
    parameters = config.get("rope_parameters") or {}
    return next((k for k, v in parameters.items() if k in FULL_ATTENTION and isinstance(v, Mapping)), None)


def flat_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters``, those of full attention if each layer type has its own; {} if there are none."""
    parameters = config.get("rope_parameters") or {}
    label = full_label(config)
    return dict(parameters[label] if label else parameters)


def top_level(config: Mapping[str, Any], key: str) -> Any:
    """Return ``rope_theta`` or ``partial_rotary_factor`` as version 4 wrote it for the family."""
    names = LEGACY_KEYS.get(str(config.get("model_type")), {})
    return config.get(names.get(key, key))


def read_by(version: str, config: Mapping[str, Any]) -> Rope | None:
    """Return what a version of Transformers makes of the text part of a config.json.

    Args:
        version: One of ``VERSIONS``.
        config: The JSON of the text config.

    Returns:
        The rule in its full-attention layers; None where it is not known (families it does not have).

    Raises:
        Refused: It raises on such a config.
    """
    if is_nested(config) and (version == "5.0" or (config.get("model_type") not in NESTED_KEYS and version == "4.57")):
        return None
    if version == "4.57":
        own_rule = config.get("model_type") in _SCALED_IN_4 and "rope_scaling" not in config
        if own_rule or config.get("model_type") in _NOT_IN_4:
            return None
    if version == "5.23" and isinstance(config.get("max_position_embeddings"), float):
        raise Refused("it wants max_position_embeddings to be an int")
    rope = _read_4(config) if version == "4.57" else _read_5(config)
    model_type = config.get("model_type")
    if (
        model_type in HEAD_DIM_NONE
        and not (model_type == "mistral" and version != "4.57")
        and config.get("head_dim") is None
        and rope.rope_type in _READS_HEAD_DIM
    ):
        raise Refused(f"its {rope.rope_type} rule needs head_dim, which is not written")
    return rope


def _read_4(config: Mapping[str, Any]) -> Rope:
    model_type = str(config.get("model_type"))
    theta = top_level(config, "rope_theta") or _THETA_4.get(model_type) or default_theta(model_type)
    parameters = dict(config.get("rope_scaling") or {})
    if parameters and "rope_type" not in parameters and ("type" not in parameters or is_nested(config)):
        raise Refused("rope_scaling has no rope_type")
    parameters["rope_type"] = parameters.get("type", parameters.get("rope_type", "default"))
    if parameters["rope_type"] == "llama3" and parameters.get(_ORIGINAL) is None:
        raise Refused(f"its llama3 rule needs {_ORIGINAL}")
    length, top = config.get("max_position_embeddings"), _top_original(config)
    if parameters["rope_type"] == "longrope" or model_type in LONGROPE_ONLY:
        parameters[_ORIGINAL] = top or length  # it looks nowhere else
        if top and length:
            parameters["factor"] = length / top
        elif parameters["rope_type"] != "default" and parameters.get("factor") is None:
            raise Refused(f"its longrope rule needs factor, or {_ORIGINAL} at the top level")
    return effective(config, parameters, theta, top_level(config, "partial_rotary_factor"))


def _read_5(config: Mapping[str, Any]) -> Rope:
    scaling, given = dict(config.get("rope_scaling") or {}), flat_parameters(config)
    if is_nested(config):
        # What is not under a layer type is not read; rope_scaling fills in over a rope_type that is there already.
        parameters = {"rope_type": "default", **(given if full_label(config) else {}), **scaling}
    else:
        parameters = scaling or given
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    theta = parameters.get("rope_theta", top_level(config, "rope_theta") or default_theta(str(config["model_type"])))
    if theta is None:
        raise Refused("rope_theta is null")
    if (top := _top_original(config)) is not None:
        parameters[_ORIGINAL] = top
    partial = parameters.get("partial_rotary_factor", top_level(config, "partial_rotary_factor"))
    return effective(config, parameters, theta, partial)


def _top_original(config: Mapping[str, Any]) -> Any:
    return config.get(_ORIGINAL, 4096 if config.get("model_type") in LONGROPE_ONLY else None)


def effective(config: Mapping[str, Any], parameters: Mapping[str, Any], theta: float, partial: Any) -> Rope:
    """Return the rule of a flat dict, with what is left out filled in as Transformers does.

    Raises:
        Refused: Transformers has no such rule, or numbers are missing or not numbers.
    """
    rope_type = parameters["rope_type"]
    usual = _PARTIAL.get(str(config.get("model_type")))
    partial = usual if partial is None else float(partial)
    partial = None if partial == 1.0 and usual is None else partial
    if rope_type in ("default", "mrope"):
        return Rope("default", float(theta), partial=partial)
    if config.get("model_type") in LONGROPE_ONLY and rope_type in ("su", "yarn"):
        rope_type = "longrope"
    if rope_type == "proportional":  # Gemma 4's own
        return Rope("proportional", float(theta), float(parameters.get("factor") or 1.0), partial=partial)
    if rope_type not in _NEEDS:
        raise Refused(f"it has no rope_type {rope_type!r}")
    if missing := [key for key in _NEEDS[rope_type] if parameters.get(key) is None]:
        raise Refused(f"its {rope_type} rule needs {', '.join(missing)}")
    length = config.get("max_position_embeddings")
    original = parameters.get(_ORIGINAL) or length
    factor = parameters.get("factor")
    if rope_type == "longrope" and factor is None:
        factor = length / original if length and original else 1.0
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise Refused(f"factor is {factor!r}, not a number")
    if rope_type == "linear":
        return Rope("linear", float(theta), float(factor), partial=partial)
    if rope_type == "dynamic":
        original = length
    options = tuple(_options(rope_type, parameters, float(factor), float(original or 1)))
    if rope_type == "longrope":  # there it only made the attention factor
        factor = 1.0
    return Rope(rope_type, float(theta), float(factor), int(original) if original else None, options, partial)


def _options(rope_type: str, parameters: Mapping[str, Any], factor: float, original: float) -> list[tuple[str, Any]]:
    if rope_type == "llama3":
        return [(key, float(parameters[key])) for key in ("low_freq_factor", "high_freq_factor")]
    if rope_type == "longrope":
        found: Any = parameters.get("attention_factor")
        if found is None:
            found = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        lists = [(key, tuple(map(float, parameters[key]))) for key in ("short_factor", "long_factor")]
        return [("attention_factor", round(float(found), 9)), *lists]
    if rope_type == "yarn":
        return [
            ("attention_factor", round(yarn_temperature(parameters, factor), 9)),
            ("beta_fast", float(parameters.get("beta_fast") or 32)),
            ("beta_slow", float(parameters.get("beta_slow") or 1)),
            ("truncate", bool(parameters.get("truncate", True))),
        ]
    return []


def yarn_temperature(parameters: Mapping[str, Any], factor: float) -> float:
    """Return what a dict's yarn rule multiplies cos and sin by, as Transformers reads it: not ``attn_factor``."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(float(parameters["mscale"])) / scale(float(parameters["mscale_all_dim"]))
    return scale(1.0)
