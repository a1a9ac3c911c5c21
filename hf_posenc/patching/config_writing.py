"""The writing of an extension into a config: ``rope_parameters`` in Transformers' words, lengths, windows, the note."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.discovery import declared_rope, head_dim_of, rope_label, rope_of_other_layer_types
from hf_posenc.families.family_data import family_of
from hf_posenc.families.sliding_window import KEEP, choose_window, warn_about_window
from hf_posenc.methods.base import Extension, Method, plain_rope_parameters
from hf_posenc.patching.extension import SCALING_KEYS, declared_scaling, layer_types_words, scaled_layer_types
from hf_posenc.patching.lengths import LENGTH_KEYS, MARK, limits_below
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.warning import warn_user


def full_rope_parameters(
    model_type: str, own: Mapping[str, Any], label: str | None, method: Method, spec: RopeSpec
) -> dict[str, Any]:
    """Return the ``rope_parameters`` of full attention that express a method, merged with what is the model's own.

    Args:
        model_type: The family.
        own: The model's ``rope_parameters`` of full attention.
        label: Their layer type; None where all share one.
        method: The method.
        spec: What the model was trained with.

    Raises:
        ValueError: The rule needs another value of a key that the family's attention reads too.
    """
    rule = method.rope_parameters(spec)
    longrope_only = family_of(model_type).longrope_only and not method.needs_hf_posenc
    if longrope_only or (label is not None and "truncate" in rule):  # which Transformers reads beside the layer types
        rule = method.longrope_parameters(spec)
    read = {key: own[key] for key in family_of(model_type).keys_read_in_attention if own.get(key) is not None}
    if wrong := [key for key, value in read.items() if rule.get(key, value) != value]:
        told = ", ".join(f"{key} {read[key]!r}, and this rule needs {rule[key]!r} there" for key in wrong)
        raise InvalidRequestError(
            f"the attention of model_type {model_type!r} reads rope_parameters too: {told}, which would change the "
            f"model on texts of every length. Pass {argument(wrong[0], read[wrong[0]])}, or take a method whose rule "
            "does not need it: linear, ntk, abf, or dynamic_yarn."
        )
    return {**_without_scaling(own), "rope_theta": spec.rope_theta, **rule, **read}


def write_config(config: PreTrainedConfig, extension: Extension) -> None:
    """Write an extension into a text config, in place: merged, never replaced, lengths as ints.

    Raises:
        ValueError: Transformers cannot check the rule for the family, or it would change what the model reads besides.
    """
    spec, method = extension.spec, extension.method
    label = rope_label(config)
    written = full_rope_parameters(config.model_type, declared_rope(config), label, method, spec)
    if (bases := getattr(config, "layer_rope_theta", None)) is not None:  # one base, which layers have or not
        config.layer_rope_theta = [base and written["rope_theta"] for base in bases]
    if "attention_factor" in written:  # under the family's own names too, if it has any
        written |= dict.fromkeys(family_of(config.model_type).attention_factor_names, written["attention_factor"])
    was = scaled_layer_types(config)
    if label is not None:
        config.rope_parameters = {**config.rope_parameters, **_plain_again(config), label: written}
    else:
        config.rope_parameters = written
    declared = extension.context_length if method.declares_target else spec.original_max_position_embeddings
    _write_lengths(config, declared, raise_all=method.declares_target)
    if hasattr(config, "original_max_position_embeddings"):  # Phi-3: wins over rope_parameters
        config.original_max_position_embeddings = spec.original_max_position_embeddings
    if config.__dict__.get("head_dim", 0) is None:  # yarn, dynamic and longrope do not derive it
        config.head_dim = head_dim_of(config)
    if extension.sliding_window != KEEP:
        config.sliding_window = choose_window(config, extension.sliding_window, extension.context_length)
    setattr(config, MARK, extension.mark())  # which a config saved alone keeps
    try:
        config.validate_rope()
    except (KeyError, RuntimeError) as error:  # as on families whose values differ by layer, or by layer type
        why = f"it misses {error}" if isinstance(error, KeyError) else "its head_dim or another size differs by layer"
        raise InvalidRequestError(
            f"{method.name} is written as {written['rope_type']} here, and this Transformers cannot check "
            f"{written['rope_type']} for model_type {config.model_type!r}: {why}. Take linear, ntk or abf."
        ) from error
    left = scaled_layer_types(config)
    if moved := {
        kind: was[kind] for kind, rule in left.items() if (rule.method, rule.spec) != (was[kind].method, was[kind].spec)
    }:
        raise InvalidRequestError(
            f"other layers have a rule that depends on max_position_embeddings, which becomes "
            f"{config.max_position_embeddings}: {layer_types_words(moved)}. Set their part of config.rope_parameters "
            "to a rule with its own factor and original_max_position_embeddings, or to rope_type 'default', before "
            "the model is loaded."
        )


def _plain_again(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Return, unscaled, the ``rope_parameters`` of the other layer types that have the rule of full attention.

    A flat dictionary, which some config classes copy to each layer type, is one rule, and is replaced as one. A loaded
    config does not tell whether it came from there or from the same rule under each layer type. A rule that differs
    from full attention's must have been written for these layers, and stays.
    """
    declared = declared_scaling(config)
    rope = rope_of_other_layer_types(config)
    return {
        label: {**_without_scaling(rope[label]), **plain_rope_parameters(rule.spec)}
        for label, rule in scaled_layer_types(config).items()
        if declared is not None
        and (rule.method, rule.spec.original_max_position_embeddings)
        == (declared.method, declared.spec.original_max_position_embeddings)
    }


def _without_scaling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``rope_parameters`` that are no part of a scaling."""
    return {key: value for key, value in parameters.items() if key not in SCALING_KEYS}


def warn_about_layer_types(before: PreTrainedConfig, after: PreTrainedConfig) -> None:
    """Warn of layer types that were scaled besides full attention: what became of them cannot be read off the request.

    Args:
        before: The text config as it was.
        after: The one that an extension was written into.
    """
    was, left = scaled_layer_types(before), scaled_layer_types(after)
    if replaced := {label: rule for label, rule in was.items() if label not in left}:
        warn_user(
            f"the rule that was replaced was on other layers too: {layer_types_words(replaced)}. They look no further "
            "than their window, so only full attention is extended, and they rotate by the model's own frequencies "
            "again. If they were trained with that rule, they have to be trained again."
        )
    if left:
        warn_user(
            f"other layers keep a rule of their own: {layer_types_words(left)}. If they were not trained with it, set "
            "their part of config.rope_parameters to rope_type 'default' before the model is loaded."
        )


def _write_lengths(config: PreTrainedConfig, declared: int, *, raise_all: bool) -> None:
    """Write the declared length, and what servers read beside it: keys that say the same, or limit a target."""
    before = config.max_position_embeddings
    follow = {key for key in LENGTH_KEYS if vars(config).get(key) == before}
    for key in follow | (limits_below(vars(config), declared).keys() if raise_all else set()):
        setattr(config, key, declared)
    config.max_position_embeddings = declared


def warn_about_limits(config: PreTrainedConfig, extension: Extension) -> None:
    """Warn about what the positions cannot help: a sliding window on every layer, Transformers' dynamic rule."""
    warn_about_window(config, extension.context_length)
    if extension.method.caution is not None:
        warn_user(extension.method.caution)
