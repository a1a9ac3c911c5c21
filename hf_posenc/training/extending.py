"""The model a run starts from: extended as asked, or as it came where that is no contradiction, and looked at."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.attention.masks import inner_name
from hf_posenc.attention.shifted import check_shiftable
from hf_posenc.encodings.encoding_installation import refuse_adapter
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.discovery import declared_rope, unwrap
from hf_posenc.families.sliding_window import KEEP, OFF, window_of_all_layers
from hf_posenc.methods.registry import DEFAULT_METHOD, make_method, method_names
from hf_posenc.patching.api import describe, is_patched, patch_model, runs_in_attention, unpatch_model
from hf_posenc.patching.extension_config import ExtensionRequest
from hf_posenc.patching.presets import get_preset
from hf_posenc.patching.request import resolve
from hf_posenc.patching.rope_scaling import check_model_values
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.levers import check_levers
from hf_posenc.training.lora import is_adapted
from hf_posenc.training.positions import PositionSchedule, block_length, make_position_schedule

logger = logging.getLogger(__name__)

_ADVICE = (
    "Leave method, preset, factor, context_length, options, original_max_position_embeddings and sliding_window out to "
    "train it as it is. To extend it in another way, call unpatch_model(model) first, or give on_scaled='replace' "
    "(--on-scaled replace)"
)


def begin(model: PreTrainedModel, config: FinetuneConfig) -> tuple[dict[str, Any], PositionSchedule]:
    """Extend the model, and refuse all that does not go together and needs neither texts nor weights to be seen.

    Args:
        model: Patched in place; it may be on the meta device.
        config: The run, or one stage of it.

    Returns:
        What ``hf_posenc.patching.api.describe`` says of the model, and how positions run in its blocks.

    Raises:
        ValueError: With the reason.
    """
    description = extend(model, config)
    base: Any = unwrap(model)
    if config.lora or is_adapted(model):
        refuse_adapter(base, "Train without LoRA.")  # now, not when it is saved
    text_config = base.config.get_text_config(decoder=True)
    positions = make_position_schedule(config, description, window_of_all_layers(text_config))
    seq_len = block_length(config, positions)
    check_model_levers(model, config, seq_len)
    if (group := config.group(seq_len)) is not None:
        check_shiftable(model, group)
    return description, positions


def check_model_levers(model: PreTrainedModel, config: FinetuneConfig, seq_len: int | None = None) -> None:
    """Call ``check_levers`` with what a model says; ``seq_len`` is known once it is extended."""
    base: Any = unwrap(model)
    check_levers(
        config,
        attention=inner_name(base.config._attn_implementation),
        quantised=getattr(base, "is_quantized", False),
        seq_len=seq_len,
        runs_in_attention=seq_len is not None and runs_in_attention(model),
    )


def extend(model: PreTrainedModel, config: FinetuneConfig) -> dict[str, Any]:
    """Patch the model as asked; take one that is extended already as it is, unless it contradicts the request.

    Returns:
        What ``hf_posenc.patching.api.describe`` says of the model then.

    Raises:
        ValueError: The model is extended in another way than is asked for, or does not say what it was trained on.
    """
    there = describe(model)
    text_config = unwrap(model).config.get_text_config(decoder=True)
    if config.model_values:
        check_model_values(config.model_values, declared_rope(text_config))
    if is_patched(model) and config.on_scaled == "replace":  # what load_extended put in
        unpatch_model(model)
        if there["method"] in method_names("instead_of_rope"):
            logger.warning(
                "the weights were made for %s in the place of RoPE; %s they have to learn from the beginning",
                there["method"],
                config.method or DEFAULT_METHOD,
            )
    if there["method"] == "none" or config.on_scaled == "replace":
        patch_model(
            model,
            config.method,
            config.factor,
            context_length=config.context_length,
            original_max_position_embeddings=config.original_max_position_embeddings,
            preset=config.preset,
            sliding_window=config.sliding_window,
            on_scaled=config.on_scaled,
            **config.options,
        )
        return describe(model)
    _check_agreement(there, text_config, config)
    logger.info("training the model as it is extended: %s, factor %g", there["method"], there["factor"])
    return there


def _check_agreement(there: dict[str, Any], model_config: PreTrainedConfig, config: FinetuneConfig) -> None:
    if config.preset is None:
        wrong = {**_other_lengths(there, config), **_other_rule(there, config)}
        window: str | int = config.sliding_window
    else:
        asked = resolve(model_config, ExtensionRequest(preset=config.preset, on_scaled="replace"))
        wrong = {name: value for name, value in asked.describe().items() if value != there[name]}
        window = get_preset(config.preset).window_for(model_config, config.sliding_window)
    wrong |= _other_window(model_config, window)
    if wrong:
        raise InvalidRequestError(
            f"the model is extended already: {there['method']}, factor {there['factor']:g}, {there['context_length']} "
            f"tokens, options {there['options']}; asked for: {', '.join(f'{k} {v}' for k, v in wrong.items())}. "
            f"{_ADVICE}."
        )
    if there["original_max_position_embeddings"] is None:
        raise InvalidRequestError(
            f"the model is extended already ({there['method']}, factor {there['factor']:g}), and does not say how many "
            f"tokens it was trained on. Give {argument('original_max_position_embeddings')}, with method, factor and "
            f"{argument('on_scaled', 'replace')}."
        )


def _other_window(model_config: PreTrainedConfig, asked: str | int) -> dict[str, Any]:
    """Return the window on every layer that was asked for and is not there; "off" agrees with none."""
    there = window_of_all_layers(model_config)
    if asked == KEEP or (there is None if asked == OFF else there == int(asked)):
        return {}
    return {"sliding_window": asked}


def _other_lengths(there: dict[str, Any], config: FinetuneConfig) -> dict[str, Any]:
    """Return the lengths that were asked for and are not there; factors agree if they lead to the same target."""
    original = there["original_max_position_embeddings"]
    wrong: dict[str, Any] = {}
    if config.factor is not None and not (
        config.factor == there["factor"] if original is None else round(config.factor * original) == _target(there)
    ):
        wrong["factor"] = f"{config.factor:g}"
    if config.context_length is not None and config.context_length != _target(there):
        wrong["context_length"] = config.context_length
    asked = config.original_max_position_embeddings
    if asked is not None and asked != original:
        wrong["original_max_position_embeddings"] = asked
    return wrong


def _target(there: dict[str, Any]) -> int:
    return int(there["context_length"])


def _other_rule(there: dict[str, Any], config: FinetuneConfig) -> dict[str, Any]:
    """Return method, or options, that were asked for and are not there.

    A method that is named stands for its default options too, so a rule with other ones is not taken for it.
    """
    if config.method not in (None, there["method"]):
        return {"method": config.method, **config.options}
    has = make_method(there["method"], there["factor"], there["options"])
    asks = make_method(there["method"], there["factor"], config.options)
    names = {*config.options, *(there["options"] if config.method is not None else ())}
    return {name: getattr(asks, name) for name in sorted(names) if getattr(asks, name) != getattr(has, name)}
