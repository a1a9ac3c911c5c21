"""A request checked against a config, and the config that says it in Transformers' words."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from hf_posenc.families.discovery import LONGROPE_ONLY, MLA, ROTATED_VALUES, refuse_family, rope_label
from hf_posenc.families.sliding_window import KEEP, choose_window, warn_about_window
from hf_posenc.methods.registry import METHODS, get_method, make_scaling
from hf_posenc.methods.serialization import OnDisk, longrope_spelling
from hf_posenc.patching.extension import (
    MARK,
    SCALING_KEYS,
    Extension,
    declared_rope,
    declared_scaling,
    head_dim_of,
    plain_spec,
)
from hf_posenc.patching.presets import choose_preset
from hf_posenc.patching.rope_scaling import check_model_values, read_rope_scaling
from hf_posenc.spec import DEFAULT_METHOD, RopeScaling, RopeSpec, check_length, check_number


def _base_spec(config: PreTrainedConfig, there: Extension | None, original: int | None, on_scaled: str) -> RopeSpec:
    """Return what the model was trained with, before any scaling it carries; refuse what cannot be known."""
    if on_scaled not in ("refuse", "replace"):
        raise ValueError(f"on_scaled must be 'refuse' or 'replace', got {on_scaled!r}.")
    if original is not None:
        original = check_length("original_max_position_embeddings", original)
    if there is None:
        spec = plain_spec(config)
    elif on_scaled == "refuse":
        was = (
            f"original length {there.spec.original_max_position_embeddings}"
            if there.original_known
            else "original length not recorded"
        )
        raise ValueError(
            f"the model is already scaled: {there.scaling.method}, factor {there.scaling.factor:g}, {was}. Factors do "
            "not multiply. Pass on_scaled='replace' to put the new rule in its place, with factor or context_length "
            "counted from the original length."
        )
    elif original is None and not there.original_known:
        raise ValueError(
            f"the model is already scaled (linear, factor {there.scaling.factor:g}), and such a config does not say "
            "what it was trained on: pass original_max_position_embeddings."
        )
    else:
        spec = there.spec
    return spec if original is None else dataclasses.replace(spec, original_max_position_embeddings=original)


def _target(original: int, factor: float | None, context_length: int | None, default: float) -> int:
    if factor is not None and context_length is not None:
        raise ValueError(
            f"give factor or context_length, not both (got {factor} and {context_length}): "
            f"factor is context_length / original length, {original} tokens here."
        )
    if context_length is not None:
        target = check_length("context_length", context_length)
        if target < original:
            raise ValueError(f"context_length must be at least the original length, {original} tokens, got {target}.")
        return target
    asked = default if factor is None else factor
    RopeScaling("linear", asked)  # checks the factor with its full message
    return round(check_number("factor", asked) * original)


def resolve(
    config: PreTrainedConfig,
    method: str | None,
    factor: float | None,
    options: Mapping[str, Any],
    *,
    context_length: int | None = None,
    original_max_position_embeddings: int | None = None,
    preset: str | None = None,
    rope_scaling: Mapping[str, Any] | str | None = None,
    sliding_window: str | int = KEEP,
    on_scaled: str = "refuse",
) -> Extension:
    """Check a request against a text config before anything is touched; arguments as ``patch_model``'s."""
    if rope_scaling is not None:
        asked = read_rope_scaling(rope_scaling)
        asked.refuse_other(
            method=method,
            factor=factor,
            original_max_position_embeddings=original_max_position_embeddings,
            preset=preset,
            options=dict(options),
        )
        asked.check_length_is_said(context_length)
        check_model_values(asked.model_values, declared_rope(config))
        method, factor, options = asked.method, asked.factor, asked.options
        original_max_position_embeddings = asked.original_max_position_embeddings
    if preset is not None:
        chosen = choose_preset(
            preset,
            config,
            method=method,
            factor=factor,
            context_length=context_length,
            original_max_position_embeddings=original_max_position_embeddings,
            options=dict(options),
        )
        method, factor, options = chosen.method, chosen.factor, chosen.options
        original_max_position_embeddings = chosen.original_max_position_embeddings
        sliding_window = chosen.window_for(config, sliding_window)
    name = get_method(DEFAULT_METHOD if method is None else method).name
    refuse_family(config)
    there = declared_scaling(config)
    spec = _base_spec(config, there, original_max_position_embeddings, on_scaled)
    original = spec.original_max_position_embeddings
    if (
        rope_scaling is not None
        and there is None
        and original > (own := plain_spec(config)).original_max_position_embeddings
    ):
        warnings.warn(
            f"rope_scaling says that the model was trained on {original} tokens, and its config "
            f"{own.original_max_position_embeddings}: is the dictionary another model's?",
            stacklevel=4,
        )
    target = _target(original, factor, context_length, METHODS[name].default_factor)
    # target is whole, so factor is made to agree with it: Transformers compares the two exactly.
    scaling = make_scaling(name, target / original, options)
    if name == "yarn" and config.model_type in MLA and scaling.has_default_temperature():
        # The rotated part is a fraction of a head: this pair puts the temperature on all of it, by the softmax scale.
        scaling = dataclasses.replace(scaling, mscale=1.0, mscale_all_dim=1.0)
    if name in ("yarn", "longrope", "nope") and config.model_type in ROTATED_VALUES:
        scaling = _without_temperature(config, scaling)
    if scaling.temperature == "logits":
        scaling = _temperature_on_logits(config, spec, scaling)
    choose_window(config, sliding_window, target)
    METHODS[name].formula(spec, scaling, None)  # raises on options that do not fit the model
    return Extension(spec, scaling, target, sliding_window=sliding_window)


def _temperature_on_logits(config: PreTrainedConfig, spec: RopeSpec, scaling: RopeScaling) -> RopeScaling:
    """Return the scaling whose temperature reaches whole logits, said the plain way where that is the same."""
    if config.model_type in MLA:
        if scaling.attention_factor is not None:
            raise ValueError(
                "temperature='logits' with attention_factor: on multi-head latent attention give mscale and "
                "mscale_all_dim instead, which Transformers reads; without any of them it is the default there."
            )
        return dataclasses.replace(scaling, temperature="rotary")
    if spec.rotary_dim == head_dim_of(config):  # all of a head turns
        return dataclasses.replace(scaling, temperature="rotary")
    return scaling


def _without_temperature(config: PreTrainedConfig, scaling: RopeScaling) -> RopeScaling:
    """Return the scaling with an attention factor of 1, the only one such a family can have."""
    if not (scaling.has_default_temperature() or scaling.attention_factor == 1) or scaling.temperature != "rotary":
        raise ValueError(
            f"model_type {config.model_type!r} turns its values with its keys, so a temperature would scale them too: "
            "attention_factor can only be 1."
        )
    return dataclasses.replace(scaling, attention_factor=1.0)


def spelling_of(model_type: str, label: str | None, scaling: RopeScaling) -> OnDisk:
    """Return how a rule is written for a family: by its own name unless Transformers would read that otherwise."""
    # Transformers looks for truncate where it is not: beside the layer types.
    untruncated = label is not None and scaling.method == "yarn" and not scaling.truncate
    if not scaling.on_attention_door and (model_type in LONGROPE_ONLY or untruncated):
        return longrope_spelling
    return METHODS[scaling.method].on_disk


def write_config(config: PreTrainedConfig, extension: Extension) -> None:
    """Write an extension into a text config, in place: merged, never replaced, lengths as ints."""
    spec, scaling = extension.spec, extension.scaling
    label = rope_label(config)
    kept = {k: v for k, v in declared_rope(config).items() if k not in SCALING_KEYS}
    written = {**kept, "rope_theta": spec.rope_theta, **spelling_of(config.model_type, label, scaling)(spec, scaling)}
    if "llama_4_scaling_beta" in kept:  # Ministral 3's attention reads the original length from here, whatever the rule
        written.setdefault("original_max_position_embeddings", spec.original_max_position_embeddings)
    if (bases := getattr(config, "layer_rope_theta", None)) is not None:  # one base, which layers have or not
        config.layer_rope_theta = [base and written["rope_theta"] for base in bases]
    if config.model_type == "phimoe" and "attention_factor" in written:  # names of its own, one for each list
        written |= dict.fromkeys(("short_mscale", "long_mscale"), written["attention_factor"])
    config.rope_parameters = written if label is None else {**config.rope_parameters, label: written}
    if scaling.method == "dynamic" and scaling.scope == "sequence":  # reads it as the original length
        config.max_position_embeddings = spec.original_max_position_embeddings
    else:
        config.max_position_embeddings = extension.context_length
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
        raise ValueError(
            f"{scaling.method} is written as {written['rope_type']} here, and this Transformers cannot check "
            f"{written['rope_type']} for model_type {config.model_type!r}: {why}. Take linear, ntk or abf."
        ) from error


def warn_about_limits(config: PreTrainedConfig, extension: Extension) -> None:
    """Warn about what the positions cannot help: a sliding window on every layer, Transformers' dynamic rule."""
    warn_about_window(config, extension.context_length)
    if extension.scaling.method == "dynamic" and extension.scaling.scope == "sequence":
        warnings.warn(
            "dynamic with scope='sequence' picks one scale per forward: results change with the KV cache, with "
            "batch-mates and with what ran before.",
            stacklevel=4,
        )


def extend_config(
    config: PreTrainedConfig,
    method: str | None = None,
    factor: float | None = None,
    *,
    context_length: int | None = None,
    original_max_position_embeddings: int | None = None,
    preset: str | None = None,
    rope_scaling: Mapping[str, Any] | str | None = None,
    sliding_window: str | int = KEEP,
    on_scaled: str = "refuse",
    **options: Any,
) -> PreTrainedConfig:
    """Return a new config to hand to ``from_pretrained``; the given one is not touched.

    Arguments and errors are those of ``patch_model``.
    """
    extended = copy.deepcopy(config)
    text_config = extended.get_text_config(decoder=True)
    extension = resolve(
        text_config,
        method,
        factor,
        options,
        context_length=context_length,
        original_max_position_embeddings=original_max_position_embeddings,
        preset=preset,
        rope_scaling=rope_scaling,
        sliding_window=sliding_window,
        on_scaled=on_scaled,
    )
    if extension.scaling.on_attention_door:
        raise ValueError(
            f"no config can say method {extension.scaling.method!r}: it depends on where each query stands. Call "
            "patch_model on the loaded model, or take a static method such as 'yarn'."
        )
    write_config(text_config, extension)
    warn_about_limits(text_config, extension)
    return extended
