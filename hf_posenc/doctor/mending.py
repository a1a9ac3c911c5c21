"""The config.json that a checkpoint should have had: both serializations, whole lengths, nothing that is not read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedConfig

from hf_posenc.checkpoint.extended import both_serializations
from hf_posenc.doctor.config_checks import ConfigMeaning, read_meaning
from hf_posenc.doctor.config_meaning import OWN_RULES, Known
from hf_posenc.doctor.transformers_readers import default_text, full_label, is_nested, text_part
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.discovery import head_dim_of
from hf_posenc.families.family_data import family_of
from hf_posenc.families.sliding_window import window_of_all_layers
from hf_posenc.methods.base import Extension
from hf_posenc.methods.registry import get_method, read_method
from hf_posenc.methods.yarn import Yarn
from hf_posenc.patching.config_writing import write_config
from hf_posenc.patching.extension import SCALING_KEYS, plain_spec
from hf_posenc.patching.lengths import MARK, ORIGINAL, limits_below


def mended(config: Mapping[str, Any], known: Known | None = None) -> dict[str, Any]:
    """Return the JSON of a config that says what the given one means, as Transformers 4.57 and 5 read it.

    Args:
        config: The JSON of a config.json, in any serialization; it is not touched.
        known: What the user says about the model, which wins.

    Raises:
        ValueError: What the config means cannot be read; the message says what to give.
    """
    meaning = read_meaning(config, known)
    if stuck := [finding for finding in meaning.findings if not finding.mendable]:
        raise InvalidRequestError("the config cannot be corrected: " + "; ".join(f"{f.what}. {f.todo}" for f in stuck))
    if meaning.rope is None:
        raise InvalidRequestError(f"model_type {meaning.model_type!r} has no rotary positions to correct.")
    key, fixed = text_part(config)[0], _write(meaning)
    return {**copy.deepcopy(dict(config)), key: fixed} if key else fixed


def _write(meaning: ConfigMeaning) -> dict[str, Any]:
    text = meaning.text
    method, factor, options = _request(meaning)
    config = plain_config(meaning)
    if window_of_all_layers(config) is not None:
        config.sliding_window = None  # how far it reaches is another matter, and the text's own stays
    if method != "none":
        target = meaning.target or config.max_position_embeddings
        write_config(config, Extension(plain_spec(config), read_method(method, factor, options), target))
    stale = ("rope_scaling", "rope_parameters", "rope_theta", ORIGINAL)
    fixed = {k: copy.deepcopy(v) for k, v in text.items() if k not in stale}
    fixed["rope_parameters"] = copy.deepcopy(config.rope_parameters)
    if method == "none":  # a factor of Gemma 4's own rule stays
        label = full_label(fixed)
        rule = fixed["rope_parameters"][label] if label else fixed["rope_parameters"]
        rule |= {key: value for key, value in meaning.parameters.items() if key in OWN_RULES[rule["rope_type"]]}
    fixed["max_position_embeddings"] = meaning.target or config.max_position_embeddings
    if method != "none" and meaning.target:
        fixed |= dict.fromkeys(limits_below(fixed, meaning.target), meaning.target)
    if hasattr(config, ORIGINAL):
        fixed[ORIGINAL] = getattr(config, ORIGINAL)
    if family_of(meaning.model_type).needs_head_dim and text.get("head_dim") is None:
        fixed["head_dim"] = head_dim_of(config)
    written = both_serializations(fixed)
    axes = {k: v for k, v in written["rope_parameters"].items() if k.startswith("mrope_")}
    several = axes or family_of(meaning.model_type).several_axes_in_module
    if several and written["rope_scaling"] is None:  # where Transformers 4 looks for the axes
        written["rope_scaling"] = {**axes, "rope_type": "default", "type": "default"}
    return written


def _request(meaning: ConfigMeaning) -> tuple[str, float, dict[str, Any]]:
    """Return method, factor and options to write; ``none`` for a plain config."""
    if meaning.mark is not None:
        method, options = meaning.mark["method"], dict(meaning.mark["options"])
        return method, float(meaning.mark["factor"]), options
    parameters = meaning.parameters
    rope_type = parameters["rope_type"]
    if rope_type in OWN_RULES:
        return "none", 1.0, {}
    names = get_method(rope_type).option_fields()
    options = {key: value for key, value in parameters.items() if key in names and value is not None}
    if rope_type == "dynamic":
        options["scope"] = "sequence"
    if rope_type == Yarn.rope_type and meaning.known.ramp is not None:
        options["ramp"] = meaning.known.ramp
    factor = parameters.get("factor") or max((meaning.target or 1) / (meaning.original or 1), 1.0)
    return rope_type, factor, options


def plain_config(meaning: ConfigMeaning) -> PreTrainedConfig:
    """Return the config that the model had before it was scaled.

    Raises:
        ValueError: Transformers does not know the family.
    """
    text, usual = meaning.text, default_text(meaning.model_type)
    if usual is None:
        raise InvalidRequestError(
            f"Transformers {transformers.__version__} does not know model_type {meaning.model_type!r}."
        )
    kept = {k: v for k, v in meaning.parameters.items() if k not in SCALING_KEYS}
    others = ("rope_scaling", "rope_parameters", "vision_config", MARK)
    plain = {k: copy.deepcopy(v) for k, v in text.items() if k not in others}
    plain["model_type"] = usual.model_type  # Qwen2-VL's text config is often at the top level, under the model's name
    if meaning.mark is not None:
        kept["rope_theta"] = meaning.mark["rope_theta"]
    own = meaning.parameters.get("rope_type")
    flat = {**kept, "rope_type": own if own in OWN_RULES else "default"}
    label = full_label(text)
    if label is not None:
        plain["rope_parameters"] = {**copy.deepcopy(text["rope_parameters"]), label: flat}
    elif is_nested(text):  # the family lays it out by layer type itself
        plain["rope_theta"] = kept["rope_theta"]
    else:
        plain.pop("rope_theta", None)
        plain["rope_parameters"] = flat
    # Without a known original (a linear rule), the length there is: the frequencies do not depend on it.
    length = meaning.original or text.get("max_position_embeddings")
    if length is None:
        raise InvalidRequestError(
            "the config states no length (max_position_embeddings), so no config can be written from it. Say what the "
            f"model was trained on: {argument('original_max_position_embeddings')}."
        )
    plain["max_position_embeddings"] = int(length)
    if ORIGINAL in plain:
        plain[ORIGINAL] = plain["max_position_embeddings"]
    return type(usual).from_dict(plain)
