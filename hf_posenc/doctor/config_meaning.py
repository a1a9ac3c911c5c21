"""The positions of a config.json: other programs' words translated into Transformers'. JSON in, facts out."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_posenc.doctor.transformers_readers import (
    MROPE_SECTION,
    Refused,
    Rope,
    default_text,
    default_theta,
    effective,
    flat_parameters,
    full_label,
    head_dim_in,
    top_level,
    usual_section_fits,
    yarn_temperature,
)
from hf_posenc.families.dialects import in_shared_words
from hf_posenc.families.family_data import family_of
from hf_posenc.methods.registry import make_method, method_of_rope_type
from hf_posenc.methods.yarn import Yarn
from hf_posenc.patching.config_writing import full_rope_parameters
from hf_posenc.patching.extension import SCALING_KEYS, rotary_width
from hf_posenc.patching.lengths import MARK, OriginalLength, original_length_of
from hf_posenc.patching.lengths import ORIGINAL as ORIGINAL
from hf_posenc.spec import RopeSpec

# Rules of Transformers that are no method: the model's own frequencies, and Gemma 4's with pairs that are not rotated.
OWN_RULES = {"default": frozenset[str](), "proportional": frozenset({"factor"})}
_OTHER_KEYS = SCALING_KEYS | {"rope_theta", "partial_rotary_factor", "mrope_section", "llama_4_scaling_beta"}


@dataclass(frozen=True)
class Known:
    """The facts that the user knows and a config cannot state.

    Attributes:
        original: Original length, in tokens.
        rope_theta: Base of the frequencies.
        ramp: YaRN's curve, ``harmonic`` for PoSE's.
        trained_length: Tokens that a LongLoRA merge was tuned to, whose config does not carry the linear rule.
        name: What the checkpoint is called on the Hugging Face Hub.
    """

    original: int | None = None
    rope_theta: float | None = None
    ramp: str | None = None
    trained_length: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class ConfigFacts:
    """The facts that the checks read.

    Attributes:
        text: The JSON of the text config.
        parameters: The full-attention rule it means, as one flat dict in Transformers' words, mistakes taken out; {}
            if the family has no rotary embedding.
        source: The dict that declares it, as it is.
        lengths: The original length, and what states another.
        known: What the user says.
        mark: Method, options and lengths, as ``save_extended`` noted them beside it; None for other checkpoints.
    """

    text: dict[str, Any]
    parameters: dict[str, Any]
    source: dict[str, Any]
    lengths: OriginalLength
    known: Known
    mark: dict[str, Any] | None

    @property
    def model_type(self) -> str:
        """The family."""
        return str(self.text["model_type"])

    @property
    def original(self) -> int | None:
        """Original length in tokens, None if unknown."""
        return self.lengths.tokens


def keys_of(rope_type: str) -> frozenset[str] | None:
    """Return the keys that Transformers reads of a rule, besides base and original length; None if it has no such rule.

    It says "unrecognized" to any other key, and does without it.
    """
    method = method_of_rope_type(rope_type)
    return OWN_RULES.get(rope_type) if method is None else method.rope_keys


def has_rope(text: Mapping[str, Any]) -> bool:
    if any(text.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")):
        return True
    return bool(getattr(default_text(text["model_type"]), "rope_parameters", None))


def source_of(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict that declares the rule: as Transformers 5 does, ``rope_scaling`` before ``rope_parameters``."""
    return dict(text.get("rope_scaling") or flat_parameters(text))


def serialization_name(text: Mapping[str, Any]) -> str:
    given_keys = [key for key in ("rope_parameters", "rope_scaling") if text.get(key)]
    words = {"rope_parameters": "rope_parameters (Transformers 5)", "rope_scaling": "rope_scaling (Transformers 4)"}
    return " and ".join(words[key] for key in given_keys) or "the base only, no rule"


def canonical(text: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """Return the declared rule as one flat dict, with other programs' words put into Transformers'."""
    given, scaling = flat_parameters(text), dict(text.get("rope_scaling") or {})
    parameters = {**source_of(text)}
    rope_type = parameters.pop("type", None)
    rope_type = parameters.setdefault("rope_type", rope_type or _guess(parameters))
    if rope_type in ("su", "mrope"):
        parameters["rope_type"] = {"su": "longrope", "mrope": "default"}[rope_type]
    thetas = (known.rope_theta, given.get("rope_theta"), scaling.get("rope_theta"), top_level(text, "rope_theta"))
    theta = next((value for value in thetas if value is not None), None)
    parameters["rope_theta"] = default_theta(text["model_type"]) if theta is None else theta
    if (
        family_of(text["model_type"]).several_axes_in_layers
        and not parameters.get("mrope_section")
        and usual_section_fits(text)
    ):
        parameters["mrope_section"] = list(MROPE_SECTION)
    parameters = in_shared_words(text["model_type"], parameters, lambda: head_dim_in(text))
    partial = given.get("partial_rotary_factor", top_level(text, "partial_rotary_factor"))
    if partial is not None:
        parameters["partial_rotary_factor"] = partial
    if isinstance(parameters.get("factor"), int) and not isinstance(parameters["factor"], bool):
        parameters["factor"] = float(parameters["factor"])
    length = text.get("max_position_embeddings")
    if known.trained_length is not None and length and parameters["rope_type"] == "default":  # as LongLoRA counts
        parameters |= {"rope_type": "linear", "factor": float(math.ceil(known.trained_length / length))}
        parameters.setdefault(ORIGINAL, known.original or int(length))
    if bool(parameters.get("mscale")) != bool(parameters.get("mscale_all_dim")):  # together or not at all
        parameters = {k: v for k, v in parameters.items() if k not in ("mscale", "mscale_all_dim")}
    multiple = parameters.get("attn_factor")
    usable = parameters["rope_type"] == Yarn.rope_type and isinstance(parameters.get("factor"), float)
    if usable and isinstance(multiple, (int, float)) and multiple != 1:  # YaRN's authors multiply by it
        parameters["attention_factor"] = float(multiple) * yarn_temperature(parameters, parameters["factor"])
    allowed = (keys_of(parameters["rope_type"]) or frozenset()) | {"rope_type", ORIGINAL}
    return {k: v for k, v in parameters.items() if k in allowed or not (k in SCALING_KEYS or is_misspelled(k))}


def is_misspelled(key: str) -> bool:
    """Return whether a key is none of a rule's, and nearly one."""
    return key not in _OTHER_KEYS and bool(difflib.get_close_matches(key, SCALING_KEYS - {"type"}, n=1, cutoff=0.85))


def _guess(parameters: Mapping[str, Any]) -> str:
    if "low_freq_factor" in parameters:
        return "llama3"
    return "longrope" if "long_factor" in parameters else "default"


def original_of(
    text: Mapping[str, Any], parameters: Mapping[str, Any], mark: Mapping[str, Any] | None, known: Known
) -> OriginalLength:
    """Return the original length, what says so, and what states another."""
    if known.original:
        return OriginalLength(known.original, "you")
    width = None
    if all(text.get(name) for name in ("hidden_size", "num_attention_heads")) or text.get("head_dim"):
        width = head_dim_in(text)
    return original_length_of(text, parameters, width, mark=mark, name=known.name)


def from_mark(text: Mapping[str, Any], parameters: Mapping[str, Any], mark: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rule that ``save_extended`` noted beside it, as it writes it."""
    width, unrotated_pairs = rotary_width(head_dim_in(text), parameters)
    spec = RopeSpec(width, float(mark["rope_theta"]), mark[ORIGINAL], unrotated_pairs)
    scaling = make_method(mark["method"], mark["factor"], mark["options"])
    label = full_label(text)
    source, read = source_of(text), family_of(text["model_type"]).keys_read_in_attention
    own = {**parameters, **{key: source[key] for key in read if key in source}}
    return full_rope_parameters(text["model_type"], own, label, scaling, spec)


def meant(facts: ConfigFacts) -> Rope | None:
    # The length that the rule would be read with in a right config.
    length = facts.original if facts.parameters["rope_type"] == "dynamic" else target_length(facts)
    try:
        return effective(
            {"model_type": facts.text["model_type"], "max_position_embeddings": length},
            facts.parameters,
            float(facts.parameters["rope_theta"]),
            facts.parameters.get("partial_rotary_factor"),
        )
    except (Refused, TypeError, ValueError):
        return None


def target_length(facts: ConfigFacts) -> int | None:
    """Return the right value of ``max_position_embeddings``: factor x original, or the config's own."""
    mark, length, rope_type = (
        facts.text.get(MARK),
        facts.text.get("max_position_embeddings"),
        facts.parameters["rope_type"],
    )
    length = int(length) if isinstance(length, (int, float)) else None
    if mark and facts.mark and rope_type != "dynamic" and facts.known.original is None:
        return int(mark["context_length"])
    factor = facts.parameters.get("factor")
    if facts.original is None or not isinstance(factor, float):
        return length
    if rope_type == "dynamic":
        return facts.original
    # Llama 3.1 (factor 8, 8192 -> 131072) and Phi-3 advertise more or other than factor x original.
    free = rope_type in ("llama3", "longrope") and length is not None and length > facts.original
    return length if free else round(factor * facts.original)
