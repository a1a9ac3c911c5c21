"""The extension that a model is trained with: chosen from its facts, and put into the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hf_posenc.attention.shifted import check_shiftable
from hf_posenc.encodings.encoding_installation import refuse_adapter
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.discovery import declared_rope
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.sliding_window import KEEP, OFF, window_of_all_layers
from hf_posenc.methods.base import Extension
from hf_posenc.methods.registry import make_method, method_names, read_method
from hf_posenc.patching.api import describe, install_extension, is_patched, unpatch_model
from hf_posenc.patching.extension_config import ExtensionRequest
from hf_posenc.patching.presets import preset_for
from hf_posenc.patching.request import resolve
from hf_posenc.patching.rope_scaling import check_model_values
from hf_posenc.training.base_model_facts import ModelFacts

logger = logging.getLogger(__name__)

_ADVICE = (
    "Leave method, preset, factor, context_length, options, original_max_position_embeddings and sliding_window out to "
    "train it as it is. To extend it in another way, call unpatch_model(model) first, or give on_scaled='replace' "
    "(--on-scaled replace)"
)


def choose_extension(request: ExtensionRequest, model: ModelFacts) -> Extension | None:
    """Return the extension that a model is to get; None if it is trained as it is.

    Raises:
        InvalidRequestError: The model is extended already in another way than requested, or does not say what it was
            trained on.
        ValueError, TypeError: As ``patch_model``.
    """
    if model.description["method"] == "none" or request.on_scaled == "replace":
        return resolve(model.plain_config, request)
    _check_agreement(request, model)
    return None


def extend(rotary: RotaryModel, extension: Extension | None) -> None:
    """Give a model the extension that was chosen for it, in place of one that ``patch_model`` put into it.

    Args:
        rotary: The model; it may be on the meta device.
        extension: As ``choose_extension`` returned it for this model.
    """
    model = rotary.model
    if extension is None:
        described = describe(model)
        logger.info("training the model as it is extended: %s, factor %g", described["method"], described["factor"])
        return
    if is_patched(model):
        existing = describe(model)["method"]
        unpatch_model(model)
        if existing in method_names("instead_of_rope"):
            logger.warning(
                "the weights were made for %s instead of RoPE; %s they have to learn from the beginning",
                existing,
                extension.method.name,
            )
    install_extension(rotary, extension)


def check_extended(rotary: RotaryModel, *, adapters: bool, group: int | None) -> None:
    """Refuse an extended model that cannot be trained so, which only its modules say.

    Args:
        rotary: The model; it may be on the meta device.
        adapters: Adapters are trained.
        group: Tokens of a group of shifted sparse attention; None without it.

    Raises:
        ValueError: With the reason.
    """
    if adapters:
        refuse_adapter(rotary.model, "Train without LoRA.")  # now, not when it is saved
    if group is not None:
        check_shiftable(rotary.wrapped, group)


def _check_agreement(request: ExtensionRequest, model: ModelFacts) -> None:
    existing = model.description
    if request.model_values:
        check_model_values(request.model_values, declared_rope(model.config))
    window: str | int = request.sliding_window
    if request.preset is not None:
        window = preset_for(request.preset, model.config).window_for(model.config, window)
    wrong = {**_other_lengths(request, existing), **_other_rule(request, existing), **_other_window(window, model)}
    if wrong:
        requested_values = ", ".join(f"{name} {value}" for name, value in wrong.items())
        raise InvalidRequestError(
            f"the model is extended already: {existing['method']}, factor {existing['factor']:g}, "
            f"{existing['context_length']} tokens, options {existing['options']}; requested: {requested_values}. "
            f"{_ADVICE}."
        )
    if existing["original_max_position_embeddings"] is None:
        raise InvalidRequestError(
            f"the model is extended already ({existing['method']}, factor {existing['factor']:g}), and does not say "
            f"how many tokens it was trained on. Give {argument('original_max_position_embeddings')}, with method, "
            f"factor and {argument('on_scaled', 'replace')}."
        )


def _other_window(requested: str | int, model: ModelFacts) -> dict[str, Any]:
    """Return the requested window on every layer where the model has another; "off" agrees with none."""
    existing = window_of_all_layers(model.config)
    if requested == KEEP or (existing is None if requested == OFF else existing == int(requested)):
        return {}
    return {"sliding_window": requested}


def _other_lengths(request: ExtensionRequest, existing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested lengths that the model does not have; factors agree if they lead to the same target."""
    original, target = existing["original_max_position_embeddings"], int(existing["context_length"])
    wrong: dict[str, Any] = {}
    if request.factor is not None and not (
        request.factor == existing["factor"] if original is None else round(request.factor * original) == target
    ):
        wrong["factor"] = f"{request.factor:g}"
    if request.context_length not in (None, target):
        wrong["context_length"] = request.context_length
    if request.original_max_position_embeddings not in (None, original):
        wrong["original_max_position_embeddings"] = request.original_max_position_embeddings
    return wrong


def _other_rule(request: ExtensionRequest, existing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested method, or options, that the model does not have.

    A method that is named means its default options too, so a rule with other ones is another rule.
    """
    if request.method not in (None, existing["method"]):
        return {"method": request.method, **request.options}
    has = read_method(existing["method"], existing["factor"], existing["options"])
    wants = make_method(existing["method"], options=request.options)
    names = {*request.options, *(existing["options"] if request.method is not None else ())}
    return {name: getattr(wants, name) for name in sorted(names) if getattr(wants, name) != getattr(has, name)}
