"""A request checked against a config and made an ``Extension``; ``extend_config``, which does no more than that."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from hf_posenc.errors import AlreadyExtendedError, InvalidRequestError, argument
from hf_posenc.families.discovery import declared_rope, head_dim_of, refuse_family
from hf_posenc.families.family_data import family_of
from hf_posenc.families.sliding_window import KEEP, choose_window
from hf_posenc.methods.base import Extension, RotatedPart, check_factor
from hf_posenc.methods.registry import DEFAULT_METHOD, get_method, make_method
from hf_posenc.patching.config_writing import warn_about_layer_types, warn_about_limits, write_config
from hf_posenc.patching.extension import (
    declared_scaling,
    layer_types_words,
    original_length,
    plain_spec,
    scaled_layer_types,
)
from hf_posenc.patching.extension_config import ExtensionRequest
from hf_posenc.patching.presets import preset_for
from hf_posenc.patching.rope_scaling import check_model_values
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.warning import warn_user


def _base_spec(config: PreTrainedConfig, declared: Extension | None, original: int | None, on_scaled: str) -> RopeSpec:
    """Return the RoPE that the model was trained with, before any scaling; refuse a model of which it is unknown."""
    if declared is None and on_scaled == "refuse" and (others := scaled_layer_types(config)):
        first = next(iter(others.values())).method
        raise AlreadyExtendedError(
            f"layers of the model are already scaled: {layer_types_words(others)}. Pass "
            f"{argument('on_scaled', 'replace')} to extend full attention beside them; they keep their rule.",
            first.name,
            first.factor,
        )
    if declared is not None and on_scaled == "refuse":
        was = (
            f"original length {declared.spec.original_max_position_embeddings}"
            if declared.original_known
            else "original length not recorded"
        )
        raise AlreadyExtendedError(
            f"the model is already scaled: {declared.method.name}, factor {declared.method.factor:g}, {was}. Factors "
            f"do not multiply. Pass {argument('on_scaled', 'replace')} to put the new rule in its place, with factor "
            f"or {argument('context_length')} counted from the original length.",
            declared.method.name,
            declared.method.factor,
        )
    spec = plain_spec(config) if declared is None else declared.spec
    original = original or original_length(config).counted_from()
    if original is None:
        scaled = "" if declared is None else f" ({declared.method.name}, factor {declared.method.factor:g})"
        raise InvalidRequestError(
            f"the model is already scaled{scaled}, and its config does not say what it was trained on: pass "
            f"{argument('original_max_position_embeddings')}."
        )
    return dataclasses.replace(spec, original_max_position_embeddings=original)


def _target(original: int, factor: float | None, context_length: int | None, default: float) -> int:
    if context_length is not None:
        if context_length < original:
            raise InvalidRequestError(
                f"{argument('context_length')} must be at least the original length, {original} tokens, got "
                f"{context_length}."
            )
        return int(context_length)
    return round(check_factor(default if factor is None else factor) * original)


def resolve(config: PreTrainedConfig, request: ExtensionRequest) -> Extension:
    """Return the extension that a request means for a text config. It changes nothing; errors as ``patch_model``."""
    if request.model_values:
        check_model_values(request.model_values, declared_rope(config))
    window: str | int = request.sliding_window
    if request.preset is not None:
        window = preset_for(request.preset, config).window_for(config, window)
    method = get_method(DEFAULT_METHOD if request.method is None else request.method)
    refuse_family(config)
    declared = declared_scaling(config)
    spec = _base_spec(config, declared, request.original_max_position_embeddings, request.on_scaled)
    original = spec.original_max_position_embeddings
    from_dictionary = request.rope_scaling is not None
    if from_dictionary and declared is None and original > (longest := original_length(config).longest):
        warn_user(
            f"rope_scaling says that the model was trained on {original} tokens, and its config {longest}: is the "
            "dictionary another model's?"
        )
    default = method.default_factor_with(request.options)
    target = _target(original, request.factor, request.context_length, default)
    # target is whole, so factor is made to agree with it: Transformers compares the two exactly.
    made = make_method(method.name, target / original, request.options).temperature_for(rotated_part(config, spec))
    choose_window(config, window, target)
    made.frequencies(spec)  # raises on options that do not fit the model
    return Extension(spec, made, target, sliding_window=window)


def rotated_part(config: PreTrainedConfig, spec: RopeSpec) -> RotatedPart:
    """Return the features that the attention of a model with this text config rotates."""
    family = family_of(config.model_type)
    if family.latent_attention:
        return RotatedPart.PART_OF_LATENT_HEADS
    if family.rotated_values:
        return RotatedPart.HEADS_AND_VALUES
    return RotatedPart.WHOLE_HEADS if spec.rotary_dim == head_dim_of(config) else RotatedPart.PART_OF_HEADS


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

    Args:
        config: A model's config; of a multimodal model, the part about the language model is extended.
        method: A name or alias of ``available_methods()``, of a static method; None is ``yarn``, or what ``preset`` or
            ``rope_scaling`` says.
        factor: Target length / original length, >= 1; rounded so that the target is a whole number of tokens. If
            neither it nor ``context_length`` is given, 4.
        context_length: The target in tokens, instead of ``factor``.
        original_max_position_embeddings: Tokens the model was trained on; None to read it from the config.
        preset: A name of ``hf-posenc list presets``, instead of method, factor, lengths and options.
        rope_scaling: A dictionary as Transformers, vLLM, LLaMA-Factory and Axolotl take it, or its JSON, instead of
            method, factor, original length and options.
        sliding_window: What becomes of a window that every layer has: ``"keep"``, ``"off"`` or a number of tokens.
        on_scaled: ``"replace"`` to put the rule in place of one that the config already has; lengths still count from
            the original length.
        **options: The method's own, such as ``beta_fast`` or ``rope_theta``.

    Returns:
        A copy of the config with the rule in its ``rope_parameters`` and the target in ``max_position_embeddings``.

    Raises:
        TypeError: An option the method does not take.
        ValueError: A bad value, an already scaled config, an unsupported family, or a method that no config can say.
    """
    extended = copy.deepcopy(config)
    text_config = extended.get_text_config(decoder=True)
    request = ExtensionRequest.of(
        method=method,
        factor=factor,
        context_length=context_length,
        original_max_position_embeddings=original_max_position_embeddings,
        preset=preset,
        rope_scaling=rope_scaling,
        sliding_window=sliding_window,
        on_scaled=on_scaled,
        **options,
    )
    extension = resolve(text_config, request)
    if extension.method.needs_hf_posenc:
        raise InvalidRequestError(
            f"no config can say method {extension.method.name!r}: it depends on the position of each query. Call "
            "patch_model on the loaded model, or take a static method such as 'yarn'."
        )
    if extension.method.temperature_on_logits:
        raise InvalidRequestError(
            "no config can say temperature 'logits': it changes the softmax scale of a loaded model. Call patch_model "
            "on it, or leave temperature at 'rotary'."
        )
    write_config(text_config, extension)
    warn_about_limits(text_config, extension)
    warn_about_layer_types(config.get_text_config(decoder=True), text_config)
    return extended
