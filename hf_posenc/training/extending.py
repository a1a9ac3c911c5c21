"""The model a run starts from: extended as its settings say, and the checks that need no texts and no weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.attention.inner import inner_name
from hf_posenc.attention.shifted import check_shiftable
from hf_posenc.checkpoint.extended import add_to_config
from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.checkpoint.manifest import base_of_adapter, find_manifest, is_encoding
from hf_posenc.checkpoint.pretrained import auto_class, is_gguf
from hf_posenc.encodings.encoding_installation import refuse_adapter
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.discovery import declared_rope
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.sliding_window import KEEP, OFF, window_of_all_layers
from hf_posenc.families.unmasked_layers import unmasked_layers
from hf_posenc.methods.registry import DEFAULT_METHOD, make_method, method_names, read_method
from hf_posenc.patching.api import describe, is_patched, needs_hf_posenc, patch_model, unpatch_model
from hf_posenc.patching.extension_config import ExtensionRequest
from hf_posenc.patching.presets import get_preset
from hf_posenc.patching.request import resolve
from hf_posenc.patching.rope_scaling import check_model_values
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.lora import is_adapted
from hf_posenc.training.positions import PositionSchedule, block_length, make_position_schedule
from hf_posenc.training.recipes import fit_recipe
from hf_posenc.training.setting_checks import check_combination
from hf_posenc.training.stages import settings_of_stages
from hf_posenc.training.texts import Documents, prepare_texts
from hf_posenc.utils.console import quiet

logger = logging.getLogger(__name__)

_ADVICE = (
    "Leave method, preset, factor, context_length, options, original_max_position_embeddings and sliding_window out to "
    "train it as it is. To extend it in another way, call unpatch_model(model) first, or give on_scaled='replace' "
    "(--on-scaled replace)"
)


def begin(rotary: RotaryModel, config: FinetuneConfig) -> tuple[dict[str, Any], PositionSchedule]:
    """Extend the model, and refuse all that does not go together and needs neither texts nor weights to be seen.

    Args:
        rotary: The model, patched in place; it may be on the meta device.
        config: The run, or one stage of it.

    Returns:
        What ``hf_posenc.patching.api.describe`` says of the model, and how positions run in its blocks.

    Raises:
        ValueError: With the reason.
    """
    description = extend(rotary, config)
    if config.lora or is_adapted(rotary.wrapped):
        refuse_adapter(rotary.model, "Train without LoRA.")  # now, not when it is saved
    positions = make_position_schedule(config, description, window_of_all_layers(rotary.text_config))
    seq_len = block_length(config, positions)
    check_with_model(rotary, config, seq_len)
    per_step = config.tokens_per_step(seq_len)
    if config.token_budget < per_step:
        raise InvalidRequestError(
            f"{argument('token_budget')} {config.token_budget} is less than one step, {per_step} tokens. Give it more, "
            f"or lower {argument('gradient_accumulation_steps')}, {argument('per_device_train_batch_size')} or "
            f"{argument('seq_len')}."
        )
    if (group := config.group(seq_len)) is not None:
        check_shiftable(rotary.wrapped, group)
    return description, positions


def check_with_model(rotary: RotaryModel, config: FinetuneConfig, seq_len: int | None = None) -> None:
    """Call ``check_combination`` with what a model says; ``seq_len`` is known once it is extended."""
    check_combination(
        config,
        attention=inner_name(str(rotary.model.config._attn_implementation)),
        quantised=getattr(rotary.model, "is_quantized", False),
        seq_len=seq_len,
        needs_hf_posenc=seq_len is not None and needs_hf_posenc(rotary.model),
        unmasked=unmasked_layers(rotary),
    )


def extend(rotary: RotaryModel, config: FinetuneConfig) -> dict[str, Any]:
    """Patch the model as the run says; take one that is extended already as it is, unless it contradicts the run.

    Returns:
        What ``hf_posenc.patching.api.describe`` says of the model then.

    Raises:
        ValueError: The model is extended in another way than the run says, or does not say what it was trained on.
    """
    model = rotary.model
    existing = describe(model)
    if config.model_values:
        check_model_values(config.model_values, declared_rope(rotary.text_config))
    if is_patched(model) and config.on_scaled == "replace":  # what load_extended put in
        unpatch_model(model)
        if existing["method"] in method_names("instead_of_rope"):
            logger.warning(
                "the weights were made for %s instead of RoPE; %s they have to learn from the beginning",
                existing["method"],
                config.method or DEFAULT_METHOD,
            )
    if existing["method"] == "none" or config.on_scaled == "replace":
        patch_model(
            rotary.wrapped,
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
    _check_agreement(existing, rotary.text_config, config)
    logger.info("training the model as it is extended: %s, factor %g", existing["method"], existing["factor"])
    return existing


def _check_agreement(existing: dict[str, Any], model_config: PreTrainedConfig, config: FinetuneConfig) -> None:
    if config.preset is None:
        wrong = {**_other_lengths(existing, config), **_other_rule(existing, config)}
        window: str | int = config.sliding_window
    else:
        requested = resolve(model_config, ExtensionRequest(preset=config.preset, on_scaled="replace"))
        wrong = {name: value for name, value in requested.describe().items() if value != existing[name]}
        window = get_preset(config.preset).window_for(model_config, config.sliding_window)
    wrong |= _other_window(model_config, window)
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


def _other_window(model_config: PreTrainedConfig, requested: str | int) -> dict[str, Any]:
    """Return the requested window on every layer where the model has another; "off" agrees with none."""
    existing = window_of_all_layers(model_config)
    if requested == KEEP or (existing is None if requested == OFF else existing == int(requested)):
        return {}
    return {"sliding_window": requested}


def _other_lengths(existing: dict[str, Any], config: FinetuneConfig) -> dict[str, Any]:
    """Return the requested lengths that the model does not have; factors agree if they lead to the same target."""
    original, target = existing["original_max_position_embeddings"], int(existing["context_length"])
    wrong: dict[str, Any] = {}
    if config.factor is not None and not (
        config.factor == existing["factor"] if original is None else round(config.factor * original) == target
    ):
        wrong["factor"] = f"{config.factor:g}"
    if config.context_length not in (None, target):
        wrong["context_length"] = config.context_length
    if config.original_max_position_embeddings not in (None, original):
        wrong["original_max_position_embeddings"] = config.original_max_position_embeddings
    return wrong


def _other_rule(existing: dict[str, Any], config: FinetuneConfig) -> dict[str, Any]:
    """Return the requested method, or options, that the model does not have.

    A method that is named means its default options too, so a rule with other ones is not taken for it.
    """
    if config.method not in (None, existing["method"]):
        return {"method": config.method, **config.options}
    has = read_method(existing["method"], existing["factor"], existing["options"])
    wants = make_method(existing["method"], options=config.options)
    names = {*config.options, *(existing["options"] if config.method is not None else ())}
    return {name: getattr(wants, name) for name in sorted(names) if getattr(wants, name) != getattr(has, name)}


def dry_run(
    name: str,
    config: FinetuneConfig,
    *,
    attention: str | None = None,
    texts: tuple[PreTrainedTokenizerBase, Documents] | None = None,
) -> None:
    """Extend a model without weights as a run will, and each stage of it, and check that its lengths go together.

    Of a ``.gguf`` file, an adapter, a model that reads images or has another encoding than RoPE nothing is said before
    it is loaded; nor where no model can be built from a config, which loading it says.

    Args:
        name: Of the model on the Hub, or its folder.
        config: The run.
        attention: ``attn_implementation``; None leaves it to Transformers.
        texts: The tokenizer and the documents, to make blocks of them too; None leaves that to the run.

    Raises:
        ValueError: As ``finetune`` would raise once the weights are loaded.
    """
    path = Path(name).expanduser()
    if is_gguf(name) or base_of_adapter(name) is not None:
        return
    found = find_manifest(name)
    manifest = None if found is None else found[0]
    if manifest is not None and is_encoding(manifest):
        return
    with quiet("hf_posenc", level=logging.ERROR):  # the run itself will say it all
        model = _build(str(path) if path.exists() else name, attention)
        if model is None:
            return
        if manifest is not None:
            add_to_config(model, manifest)
        _go_through(RotaryModel(model), config, texts)


def _go_through(
    rotary: RotaryModel, config: FinetuneConfig, texts: tuple[PreTrainedTokenizerBase, Documents] | None
) -> None:
    config = fit_recipe(rotary, config)
    check_with_model(rotary, config)
    for one in [config] if config.stages is None else settings_of_stages(rotary, config):
        _, positions = begin(rotary, one)
        if texts is not None:
            tokenizer, documents = texts
            prepare_texts(rotary, tokenizer, documents, None, one, positions)
        if config.stages is not None and is_patched(rotary.model):
            unpatch_model(rotary.model)


def _build(source: str, attention: str | None) -> PreTrainedModel | None:
    try:
        config = AutoConfig.from_pretrained(source)
        other = auto_class(source, {"config": config}) is not AutoModelForCausalLM
        return None if other else meta_model(config, attention=attention)
    except (OSError, ImportError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return None
