"""The rotary embedding of a config: as it was trained, and as it is extended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from hf_posenc.errors import InvalidRequestError
from hf_posenc.families.discovery import (
    declared_rope,
    head_dim_of,
    refuse_family,
    rope_label,
    rope_of_other_layer_types,
)
from hf_posenc.methods.base import NEVER_ROTATED, Extension, Unscaled, encoding_of, encoding_rope_type
from hf_posenc.methods.registry import make_method, method_of_rope_type
from hf_posenc.patching.lengths import DECLARED, MARK, OriginalLength, original_length_of
from hf_posenc.spec import RopeSpec, check_length

# What a scaled rope_parameters holds besides rope_theta, partial_rotary_factor and what belongs to the family.
SCALING_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "attn_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "alpha",
        "low_freq_factor",
        "high_freq_factor",
        "short_factor",
        "long_factor",
        "short_mscale",
        "long_mscale",
        "finetuned",
    }
)


def rotary_width(head_dim: int, parameters: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of features of a head that rotate in ``rope_parameters``, and of their pairs that never do."""
    share = parameters.get("partial_rotary_factor", 1.0)
    if parameters.get("rope_type") == "proportional":
        return head_dim, head_dim // 2 - int(share * head_dim // 2)
    unrotated_pairs = sum(divisor >= NEVER_ROTATED for divisor in parameters.get("long_factor") or ())
    return int(head_dim * share), unrotated_pairs


def declared_scaling(config: PreTrainedConfig) -> Extension | None:
    """Return the scaling that a config already carries, None for a plain one.

    Raises:
        ValueError: Its ``rope_type`` is none that hf_posenc knows.
    """
    parameters = declared_rope(config)
    mark = mark_on(config)
    if mark is not None and not rule_is_elsewhere(mark):
        spec = _spec(config, {**parameters, **mark}, mark["original_max_position_embeddings"])
        # A temperature on whole logits is not in a config: load_extended applies it, and says so.
        options = {name: value for name, value in mark["options"].items() if name != "temperature"}
        return Extension(spec, make_method(mark["method"], mark["factor"], options), mark["context_length"])
    return _scaling_in(config, parameters)


def _scaling_in(config: PreTrainedConfig, parameters: Mapping[str, Any], label: str | None = None) -> Extension | None:
    """Return the scaling in ``rope_parameters``, of a layer type if it is given; None if there is none."""
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "proportional":  # some pairs never rotate; a factor divides the others
        rope_type = "default" if parameters.get("factor") in (None, 1) else "linear"
    if rope_type == "default":
        return None
    if encoding := encoding_of(rope_type):
        raise InvalidRequestError(
            f"the model was trained with {encoding} in place of RoPE, which only hf_posenc runs: load it with "
            "load_extended."
        )
    method = method_of_rope_type(rope_type)
    if method is None:
        raise InvalidRequestError(f"rope_type {rope_type!r} (model_type {config.model_type!r}) is not supported.")
    target = int(config.max_position_embeddings)
    original, known = parameters.get("original_max_position_embeddings") or target, True
    if rope_type == "linear":  # some keep max_position_embeddings at the trained length, and some raise it
        trained = original_length(config).tokens
        original, known = trained or target, trained is not None
    factor = parameters.get("factor")
    if rope_label(config) is not None:  # Transformers looks for it beside the layer types alone
        parameters = {**parameters, "truncate": config.rope_parameters.get("truncate", True)}
    read = method.as_read(target / original if factor is None else factor, method.read_options(parameters))
    if not read.declares_target:  # Transformers' dynamic counts from it, whatever else is written
        original, known = target, original == target
    return Extension(_spec(config, parameters, original, label), read, target, known)


def other_layer_types(config: PreTrainedConfig) -> dict[str, Extension]:
    """Return the rules of the layer types that a config does not extend, by layer type: scaled or ``Unscaled``.

    Raises:
        ValueError: A ``rope_type`` is none that hf_posenc knows.
    """
    length = config.max_position_embeddings
    return {
        label: _scaling_in(config, parameters, label)
        or Extension(_spec(config, parameters, length, label), Unscaled(), int(length))
        for label, parameters in rope_of_other_layer_types(config).items()
    }


def scaled_layer_types(config: PreTrainedConfig) -> dict[str, Extension]:
    """Return those of ``other_layer_types`` that are scaled; none in a model as it is usually published."""
    others = other_layer_types(config)
    return {label: extension for label, extension in others.items() if not isinstance(extension.method, Unscaled)}


def layer_types_words(scaled: Mapping[str, Extension]) -> str:
    """Return scaled layer types with their rules, in words."""
    return ", ".join(f"{label} ({rule.method.name}, factor {rule.method.factor:g})" for label, rule in scaled.items())


def mark_on(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the note on its extension in a text config; see ``read_mark``."""
    return read_mark(getattr(config, MARK, None))


def read_mark(found: Any) -> dict[str, Any] | None:
    """Return the value of ``MARK`` in a config; None if it is not one that we write."""
    return dict(found) if isinstance(found, Mapping) and all(key in found for key in Extension.FACTS) else None


def rule_is_elsewhere(mark: Mapping[str, Any]) -> bool:
    """Return whether what a config or manifest says of an extension is a rule that only a manifest can hold.

    Raises:
        ValueError: It is no rule that this version has.
    """
    try:
        return make_method(mark["method"], mark["factor"], mark["options"]).needs_hf_posenc
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"the model was extended by {mark['method']!r}, which this hf_posenc cannot read: "
            f"{error} If a newer one wrote it, upgrade hf_posenc."
        ) from error


def _spec(config: PreTrainedConfig, parameters: Mapping[str, Any], original: Any, label: str | None = None) -> RopeSpec:
    length = check_length("original_max_position_embeddings", original)
    rotary_dim, unrotated_pairs = rotary_width(head_dim_of(config, label), parameters)
    return RopeSpec(rotary_dim, float(parameters["rope_theta"]), length, unrotated_pairs)


def mark_encoding(parameters: dict[str, Any], label: str | None, method: str) -> None:
    """Make ``rope_parameters`` say, in place, that another encoding took RoPE's place.

    Args:
        parameters: Parameters of a text config.
        label: The layer type whose rule it is; None where all share one.
        method: The encoding.
    """
    section = parameters if label is None else parameters[label]
    section["rope_type"] = encoding_rope_type(method)


def plain_spec(config: PreTrainedConfig) -> RopeSpec:
    """Return the RoPE that the model of an unscaled config was trained with."""
    return _spec(config, declared_rope(config), original_length(config).tokens or config.max_position_embeddings)


def original_length(config: PreTrainedConfig) -> OriginalLength:
    """Return the trained length that a text config declares; see ``original_length_of``."""
    values = {**vars(config), "model_type": config.model_type, DECLARED: getattr(config, DECLARED, None)}
    return original_length_of(values, declared_rope(config), head_dim_of(config), mark=mark_on(config))


def with_layer_types(facts: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Return the facts of an extension with those of the scaled layer types of a text config, if there are any."""
    scaled = {label: rule.describe() for label, rule in scaled_layer_types(config).items()}
    return {**facts, "other_layer_types": scaled} if scaled else facts


def has_frequencies(config: PreTrainedConfig) -> bool:
    """Return whether a text config is one of a model whose rotary embedding hf_posenc can scale."""
    try:
        refuse_family(config)
        return bool(declared_rope(config))
    except ValueError:
        return False


def rule_in_config(config: PreTrainedConfig) -> Extension | None:
    """Return the rule for positions in a text config: a scaling, or ``Unscaled`` if it is plain.

    None for models whose positions hf_posenc cannot change, such as those without a rotary embedding.
    """
    if not has_frequencies(config):
        return None
    length = int(config.max_position_embeddings)
    return declared_scaling(config) or Extension(plain_spec(config), Unscaled(), length)


def describe_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return method, factor, options, original and target length of a config.

    The method is ``"none"`` if the config is plain, and for models whose positions hf_posenc cannot change.
    ``other_layer_types`` is there where layers with a sliding window are scaled.
    """
    text_config = config.get_text_config(decoder=True)
    return describe_rule(rule_in_config(text_config), text_config)


def describe_rule(rule: Extension | None, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the facts of a rule with those of the scaled layer types of its text config, if there are any."""
    if rule is not None:
        return with_layer_types(rule.describe(), config)
    length = getattr(config, "max_position_embeddings", None)  # GPT-2's n_positions under a common name
    return dict(zip(Extension.FACTS, ("none", 1.0, {}, length, length), strict=True))
