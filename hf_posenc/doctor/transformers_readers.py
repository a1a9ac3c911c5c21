"""The rotary settings that versions of Transformers read from a config.json: JSON in, facts out, nothing is loaded.

Checked against Transformers 4.57.6, 5.0.0 and 5.23.0 (``tests/integration/test_doctor_versions.py``). Version 4 reads
the base from the top level and the rule from ``rope_scaling``. Version 5 takes ``rope_scaling`` if it is there, whole,
and else ``rope_parameters``; the top level only fills in a base that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hf_posenc.families.dialects import in_shared_words
from hf_posenc.families.family_data import FULL_ATTENTION, Family, family_of
from hf_posenc.methods.registry import method_of_rope_type
from hf_posenc.methods.yarn import Yarn
from hf_posenc.patching.lengths import ORIGINAL

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


def text_part(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
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


VERSIONS = ("4.57", "5.0", "5.23")
_USUAL = (
    ("beta_fast", 32.0),
    ("beta_slow", 1.0),
    ("truncate", True),
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
)


@dataclass(frozen=True)
class RopeType:
    """The way in which Transformers reads one ``rope_type``.

    Attributes:
        needed_keys: Keys that it cannot do without.
        reads_original: It reads ``original_max_position_embeddings`` there.
        reads_head_dim: It reads ``config.head_dim`` itself, and so fails where that is None.
    """

    needed_keys: tuple[str, ...] = ()
    reads_original: bool = False
    reads_head_dim: bool = False


# Transformers 5.23, modeling_rope_utils.py.
_ROPE_TYPES = {
    "linear": RopeType(("factor",)),
    "dynamic": RopeType(("factor",), reads_head_dim=True),
    "yarn": RopeType(("factor",), reads_original=True, reads_head_dim=True),
    "llama3": RopeType(("factor", "low_freq_factor", "high_freq_factor"), reads_original=True),
    "longrope": RopeType(("short_factor", "long_factor"), reads_original=True, reads_head_dim=True),
}


def rope_type_of(name: str | None) -> RopeType:
    """Return the way in which a ``rope_type`` is read; an unknown one is read as one that needs nothing."""
    return _ROPE_TYPES.get(str(name), RopeType())


@dataclass(frozen=True)
class Rope:
    """The rotary rule a reader arrives at; two are equal if and only if the frequencies are.

    Attributes:
        rope_type: default, linear, dynamic, yarn, llama3 or longrope.
        rope_theta: Base of the frequencies.
        factor: Target / original length, where the frequencies depend on it.
        original: Original length in tokens, where the rule uses it.
        options: The rule's other numbers, as they take effect.
        partial: Share of a head that is rotated; None where only the family says.
        every_layer: Whether the rule is in layers with a sliding window too, where only full attention should have it.
    """

    rope_type: str
    rope_theta: float
    factor: float = 1.0
    original: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    partial: float | None = None
    every_layer: bool = False

    def __str__(self) -> str:
        words = ["no scaling" if self.rope_type == "default" else self.rope_type]
        if self.rope_type not in ("default", "longrope"):
            words[0] += f" x{self.factor:g}"
        words[0] += f" of {self.original}" if self.original is not None else ""
        shown = [(k, v) for k, v in self.options if not isinstance(v, tuple) and (k, v) not in _USUAL]
        words += [f"{key} {format(value, '.4g') if isinstance(value, float) else value}" for key, value in shown]
        if self.partial is not None:
            words.append(f"{self.partial:g} of each head")
        words.append(f"rope_theta {self.rope_theta:g}")
        return ", ".join([*words, "on every layer"] if self.every_layer else words)


class Refused(ValueError):
    """A version of Transformers cannot build or run a model from a config; the message says why.

    Attributes:
        for_good: Whether no other serialization of the rule helps.
    """

    def __init__(self, message: str, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


def _family(config: Mapping[str, Any]) -> Family:
    return family_of(config.get("model_type"))


def is_nested(config: Mapping[str, Any]) -> bool:
    """Return whether each layer type of the family has rotary settings of its own."""
    return _family(config).layer_types_in_4 is not None or full_label(config) is not None


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
    return config.get(_family(config).names_in_4.get(key, key))


def read_by(version: str, config: Mapping[str, Any]) -> Rope | None:
    """Return the positions that a version of Transformers reads from the text part of a config.json.

    Args:
        version: One of ``VERSIONS``.
        config: The JSON of the text config.

    Returns:
        The rule in its full-attention layers; None where it is not known (families it does not have).

    Raises:
        Refused: It raises on such a config.
    """
    family = _family(config)
    if is_nested(config) and family.layer_types_in_4 is None and version != "5.23":
        return None
    if version == "4.57":
        own_rule = family.scaled_in_4 and "rope_scaling" not in config
        if own_rule or family.not_in_4:
            return None
    if version == "5.23" and isinstance(config.get("max_position_embeddings"), float):
        raise Refused("max_position_embeddings must be an int")
    if version == "5.0" and is_nested(config):
        return _read_5_0_by_layer(config)
    rope = _read_4(config) if version == "4.57" else _read_5(config)
    if family.several_axes_in_layers:
        _check_section(version, config)
    if (
        family.needs_head_dim
        and not (config.get("model_type") == "mistral" and version != "4.57")
        and config.get("head_dim") is None
        and rope_type_of(rope.rope_type).reads_head_dim
    ):
        raise Refused(f"its {rope.rope_type} rule needs head_dim, which is not written")
    return rope


def _read_4(config: Mapping[str, Any]) -> Rope:
    model_type = str(config.get("model_type"))
    family = family_of(model_type)
    theta = top_level(config, "rope_theta") or family.rope_theta_in_4 or default_theta(model_type)
    parameters = dict(config.get("rope_scaling") or {})
    if parameters and "rope_type" not in parameters and ("type" not in parameters or is_nested(config)):
        raise Refused("rope_scaling has no rope_type")
    if family.several_axes_in_module:
        if config.get("rope_scaling") is None:
            raise Refused("it needs rope_scaling, even for no scaling")
        if parameters.get("rope_type") is None and parameters.get("type") != "mrope":
            raise Refused("rope_scaling has no rope_type")
        parameters.setdefault("rope_type", "default")
    else:
        parameters["rope_type"] = parameters.get("type", parameters.get("rope_type", "default"))
    if family.several_axes_in_layers and parameters.get("type") == "mrope":
        parameters["rope_type"] = "default"
    if parameters["rope_type"] == "llama3" and parameters.get(ORIGINAL) is None:
        raise Refused(f"its llama3 rule needs {ORIGINAL}")
    length, top = config.get("max_position_embeddings"), _top_original(config)
    if parameters["rope_type"] == "longrope" or family.longrope_only:
        parameters[ORIGINAL] = top or length  # it looks nowhere else
        if top and length:
            parameters["factor"] = length / top
        elif parameters["rope_type"] != "default" and parameters.get("factor") is None:
            raise Refused(f"its longrope rule needs factor, or {ORIGINAL} at the top level")
    return effective(config, parameters, theta, top_level(config, "partial_rotary_factor"))


def _read_5(config: Mapping[str, Any]) -> Rope:
    scaling, given = dict(config.get("rope_scaling") or {}), flat_parameters(config)
    if is_nested(config):
        # What is not under a layer type is not read; rope_scaling fills in over a rope_type that is there already.
        parameters = {"rope_type": "default", **(given if full_label(config) else {}), **scaling}
    else:
        parameters = scaling or given
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] == "mrope" and _family(config).several_axes_in_layers:
        parameters["rope_type"] = "default"
    theta = parameters.get("rope_theta", top_level(config, "rope_theta") or default_theta(str(config["model_type"])))
    if theta is None:
        raise Refused("rope_theta is null")
    if (top := _top_original(config)) is not None:
        parameters[ORIGINAL] = top
    partial = parameters.get("partial_rotary_factor", top_level(config, "partial_rotary_factor"))
    return effective(config, parameters, theta, partial)


def _read_5_0_by_layer(config: Mapping[str, Any]) -> Rope:
    """Read a family whose layer types have settings of their own as 5.0.0 does, where that was new."""
    if config.get("model_type") == "olmo3":  # one rule for all layers; of settings by layer type it reads nothing
        flat = {} if full_label(config) else dict(config.get("rope_parameters") or {})
        theta = top_level(config, "rope_theta") or _family(config).rope_theta_in_4
        rope = _read_5({**config, "model_type": "olmo2", "rope_parameters": {**flat}, "rope_theta": theta})
        return replace(rope, every_layer=rope.rope_type != "default")
    given = config.get("rope_parameters") or {}
    if given and not {"full_attention", "sliding_attention"} <= given.keys():
        raise Refused("rope_parameters lacks full_attention or sliding_attention")
    rope = _read_5(config)
    if rope.rope_type == Yarn.rope_type:
        raise Refused("its check of a yarn rule fails where each layer type has settings of its own", for_good=True)
    return rope


def _check_section(version: str, config: Mapping[str, Any]) -> None:
    parameters = config.get("rope_scaling") or ({} if version == "4.57" else config.get("rope_parameters")) or {}
    if not parameters.get("mrope_section") and (version != "5.23" or not usual_section_fits(config)):
        raise Refused("it needs mrope_section")


def usual_section_fits(config: Mapping[str, Any]) -> bool:
    """Return whether Qwen2-VL's ``mrope_section`` is as long as half a head."""
    return 2 * sum(MROPE_SECTION) * int(config["num_attention_heads"]) == int(config["hidden_size"])


def head_dim_in(text: Mapping[str, Any]) -> int:
    """Return the features of a head; of full attention, where they differ by layer (Gemma 4)."""
    layers = list(text.get("layer_types") or ())
    first = layers.index("full_attention") if "full_attention" in layers else None
    own = (text.get("per_layer_config") or {}).get(str(first), {})
    given = own.get("head_dim") or text.get("head_dim")
    return int(given or text["hidden_size"] // text["num_attention_heads"])


def _top_original(config: Mapping[str, Any]) -> Any:
    return config.get(ORIGINAL, 4096 if _family(config).longrope_only else None)


def effective(config: Mapping[str, Any], parameters: Mapping[str, Any], theta: float, partial: Any) -> Rope:
    """Return the rule of a flat dict, with what is left out filled in as Transformers does.

    Raises:
        Refused: Transformers has no such rule, or numbers are missing or not numbers.
    """
    parameters = in_shared_words(
        config.get("model_type"), {**parameters, "rope_theta": float(theta)}, lambda: head_dim_in(config)
    )
    rope_type, theta = parameters["rope_type"], parameters["rope_theta"]
    usual = _family(config).rotated_share
    partial = usual if partial is None else float(partial)
    partial = None if partial == 1.0 and usual is None else partial
    if rope_type == "default":
        return Rope("default", float(theta), partial=partial)
    if _family(config).longrope_only and rope_type in ("su", Yarn.rope_type):
        rope_type = "longrope"
    if rope_type == "proportional":  # Gemma 4's own
        return Rope("proportional", float(theta), float(parameters.get("factor") or 1.0), partial=partial)
    method = method_of_rope_type(rope_type)
    if method is None:
        raise Refused(f"it has no rope_type {rope_type!r}")
    if missing := [key for key in rope_type_of(rope_type).needed_keys if parameters.get(key) is None]:
        raise Refused(f"its {rope_type} rule needs {', '.join(missing)}")
    length = config.get("max_position_embeddings")
    original = parameters.get(ORIGINAL) or length
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
        attention_factor: Any = parameters.get("attention_factor")
        if attention_factor is None:
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        lists = [(key, tuple(map(float, parameters[key]))) for key in ("short_factor", "long_factor")]
        return [("attention_factor", round(float(attention_factor), 9)), *lists]
    if rope_type == Yarn.rope_type:
        return [
            ("attention_factor", round(yarn_temperature(parameters, factor), 9)),
            ("beta_fast", float(parameters.get("beta_fast") or 32)),
            ("beta_slow", float(parameters.get("beta_slow") or 1)),
            ("truncate", bool(parameters.get("truncate", True))),
        ]
    return []


def yarn_temperature(parameters: Mapping[str, Any], factor: float) -> float:
    """Return the attention factor of a dict's yarn rule, as Transformers reads it: not ``attn_factor``."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(float(parameters["mscale"])) / scale(float(parameters["mscale_all_dim"]))
    return scale(1.0)
