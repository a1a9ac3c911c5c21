"""``patch_model`` and its undoing, and the check that the live modules hold what the closed form says."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

from hf_posenc.attention.installation import check_attention, install_attention
from hf_posenc.attention.interface import count_layers
from hf_posenc.encodings.encoding_installation import InstalledEncoding, check_encoding, install_encoding
from hf_posenc.errors import (
    AlreadyExtendedError,
    HfPosencError,
    InvalidRequestError,
    InvalidTypeError,
    RotaryMismatchError,
    RotaryOutputError,
)
from hf_posenc.families.refusals import Refusal
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.rotary_module import (
    SavedRotary,
    holds_what_is_built,
    instantiate,
    read_rotary,
    restore_rotary,
    write_rotary,
    zero_other_layer_types,
)
from hf_posenc.families.sliding_window import KEEP
from hf_posenc.methods.base import Extension, Unscaled
from hf_posenc.patching.carrying import carries_extension, carry_extension, drop_extension
from hf_posenc.patching.config_writing import warn_about_layer_types, warn_about_limits, write_config
from hf_posenc.patching.extension import (
    declared_scaling,
    describe_config,
    describe_rule,
    mark_encoding,
    mark_on,
    other_layer_types,
    plain_spec,
    rule_in_config,
    with_layer_types,
)
from hf_posenc.patching.extension_config import ExtensionRequest
from hf_posenc.patching.lengths import MARK
from hf_posenc.patching.record import CONFIG_VALUES, PatchRecord, restore_config
from hf_posenc.patching.request import resolve
from hf_posenc.patching.softmax_scale import (
    attention_factor_of,
    expected_scale,
    instantiate_scale,
    latent_attentions,
    live_scale,
    partial_attentions,
)
from hf_posenc.patching.verification import (
    RotaryCheck,
    Verification,
    check_described,
    check_rotary,
    check_scale,
    extension_words,
)
from hf_posenc.utils.console import quiet

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=nn.Module)

# How far a cast to bfloat16 before patching can have rounded the frequencies of an otherwise right model.
_BF16_ROUNDING = 2.0**-8


def patch_model(
    model: ModelT,
    method: str | None = None,
    factor: float | None = None,
    *,
    context_length: int | None = None,
    original_max_position_embeddings: int | None = None,
    preset: str | None = None,
    rope_scaling: Mapping[str, Any] | str | None = None,
    sliding_window: str | int = KEEP,
    on_scaled: str = "refuse",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> ModelT:
    """Extend a loaded model: swap its rotary frequencies, in place, verified and undoable.

    Works on any device or several, quantised or not, before or after ``torch.compile`` or PEFT. The model gets a
    config of its own, so another model built from the same config object is not touched. A KV cache filled before the
    call holds keys at the old frequencies: drop it (a method that runs in attention takes it as it is). A
    ``generation_config.max_length`` of at least the original length is raised to the target; a smaller one stays. A
    line of the log, at INFO, says what was done.

    Args:
        model: A Transformers model with a rotary embedding, or one wrapped by PEFT or ``torch.compile``.
        method: A name or alias of ``available_methods()``; None is ``yarn``, or what ``preset`` or ``rope_scaling``
            says.
        factor: Target length / original length, >= 1; rounded so that the target is a whole number of tokens. If
            neither it nor ``context_length`` is given, 4, and 1 for an encoding that takes the place of RoPE.
        context_length: The target in tokens, instead of ``factor``.
        original_max_position_embeddings: Tokens the model was trained on; None to read it from the config.
        preset: A name of ``hf-posenc list presets``, instead of all the above: how a published checkpoint is extended.
        rope_scaling: A dictionary as Transformers, vLLM, LLaMA-Factory and Axolotl take it, instead of method, factor,
            original length and options: ``{"rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32768}``; JSON too. Their ``dynamic`` is ``scope="sequence"`` here. What
            it repeats of the model, such as ``rope_theta``, must be as the model has it.
        sliding_window: What becomes of a window that every layer has (Mistral 0.1, Phi-3): ``"keep"``, ``"off"`` or a
            number of tokens.
        on_scaled: ``"replace"`` to put the rule in place of one the checkpoint already has (Llama 3.1, Yarn-...);
            lengths still count from the original length.
        tokenizer: Its ``model_max_length`` is set to the target, and put back by ``unpatch_model``; saved with the
            model it gets the target in any case.
        **options: The method's own, such as ``beta_fast`` or ``rope_theta``.

    Returns:
        The model that was given.

    Raises:
        TypeError: Not a Transformers model, or an option the method does not take.
        ValueError: A bad value, an already patched or scaled model, an unsupported family. Nothing was changed.
        RotaryMismatchError: The live frequencies are not what the config says, before or after patching.
    """
    rotary = RotaryModel(model)
    tokenizer = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
    if tokenizer is not None and not hasattr(tokenizer, "model_max_length"):
        raise InvalidTypeError(f"tokenizer must be a tokenizer or a processor, got {type(tokenizer).__name__}.")
    _refuse_patched(rotary)
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
    install_extension(rotary, resolve(rotary.text_config, request), tokenizer)
    return model


def _refuse_patched(rotary: RotaryModel) -> None:
    if rotary.record is not None:
        current = rotary.extension.describe()
        raise AlreadyExtendedError(
            f"model is already patched ({current['method']}, factor {current['factor']:g}). "
            "Call unpatch_model(model) first; factors do not multiply.",
            current["method"],
            current["factor"],
        )


def install_extension(
    rotary: RotaryModel, extension: Extension, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Put an extension into a model that has none in place: what ``patch_model`` does once it is decided.

    Args:
        rotary: The model.
        extension: As ``hf_posenc.patching.request.resolve`` returns it for the model's text config.
        tokenizer: Its ``model_max_length`` is set to the target.

    Raises:
        ValueError: The family or the attention cannot run the method. Nothing was changed.
        RotaryMismatchError: The live frequencies are not what the config says, before or after.
    """
    text_config = rotary.text_config
    modules = rotary.rotary_modules
    rotation = None
    if extension.method.is_encoding:
        check_encoding(rotary, extension)
    elif extension.method.needs_hf_posenc:
        rotation = check_attention(rotary, extension)
    _verify(rotary, rtol=_BF16_ROUNDING)  # a model that is already wrong would be undone to something wrong
    new_config = copy.deepcopy(text_config)
    write_config(new_config, extension)
    values = {name: instantiate(module, new_config) for name, module in modules.items()}
    for saved in values.values() if extension.method.is_encoding else ():
        zero_other_layer_types(saved, rotary.label)
    attentions, scales = _new_scales(rotary, extension, new_config, values)
    warn_about_limits(new_config, extension)
    if not extension.method.is_encoding:  # which takes the place of RoPE in every layer
        warn_about_layer_types(text_config, new_config)

    _own_configs(rotary.wrapped)
    record = PatchRecord(
        extension,
        {name: _undoable(module, text_config) for name, module in modules.items()},
        {name: live_scale(module) for name, module in attentions.items()},
        _read_configs(rotary),
        carried_before=carries_extension(rotary.model),
    )
    for config in rotary.text_configs:
        write_config(config, extension)
        if extension.method.is_encoding:  # which save_pretrained alone must not lose
            mark_encoding(config.rope_parameters, rotary.label, extension.method.name)
    words = extension_words(extension.describe())
    for name, module in modules.items():
        write_rotary(module, values[name], words)
    for name, module in attentions.items():
        module.__dict__["scaling"] = scales[name]
    rotary.record = record
    carry_extension(rotary.model)
    try:
        if extension.method.is_encoding:
            record.installed = install_encoding(rotary, extension)
        elif rotation is not None:
            record.installed = install_attention(rotary, extension, next(iter(values.values())), rotation)
        verified = _verify(rotary, rtol=None)
    except HfPosencError:
        unpatch_model(rotary.wrapped)
        raise
    except Exception as error:  # whatever a family's own forward trips over
        unpatch_model(rotary.wrapped)
        raise InvalidRequestError(
            f"Transformers cannot run {type(rotary.model).__name__} with this rule ({type(error).__name__}: {error}). "
            f"Take another method for model_type {text_config.model_type!r}."
        ) from error
    limit = "the tokenizer's limit is not changed"
    if tokenizer is not None:
        record.tokenizer = (tokenizer, tokenizer.model_max_length)
        tokenizer.model_max_length = extension.context_length
        limit = f"the tokenizer's limit is {extension.context_length}"
    _raise_generation_limit(rotary, extension)
    logger.info("%s; %s", verified, limit)


def unpatch_model(model: ModelT) -> ModelT:
    """Put every tensor and config value that ``patch_model`` changed back, bit for bit.

    Raises:
        ValueError: The model is not patched.
    """
    rotary = RotaryModel(model)
    record: PatchRecord | None = rotary.record
    if record is None:
        raise InvalidRequestError(
            "model is not patched: there is nothing to undo. A checkpoint saved extended stays extended."
        )
    if record.installed is not None:
        record.installed.remove(rotary)
    for name, module in rotary.rotary_modules.items():
        restore_rotary(module, record.rotary[name])
    for name, scale in record.scales.items():
        rotary.model.get_submodule(name).__dict__["scaling"] = scale
    for config, values in zip(rotary.text_configs, record.config_values, strict=True):
        restore_config(config, values)
    if record.tokenizer is not None:
        tokenizer, limit = record.tokenizer
        tokenizer.model_max_length = limit
    if record.generation_max_length is not None:
        rotary.model.generation_config.max_length = record.generation_max_length
    if not record.carried_before:
        drop_extension(rotary.model)
    rotary.record = None
    return model


@contextmanager
def patched(model: ModelT, method: str | None = None, factor: float | None = None, **kwargs: Any) -> Iterator[ModelT]:
    """Patch for the length of a ``with`` block; keywords as ``patch_model``'s."""
    patch_model(model, method, factor, **kwargs)
    try:
        yield model
    finally:
        unpatch_model(model)


def patch_as_described(model: nn.Module, facts: Mapping[str, Any], sliding_window: str | int = KEEP) -> None:
    """Patch a model as what ``describe`` returned of another says; the others are arguments of ``patch_model``."""
    patch_model(
        model,
        facts["method"],
        context_length=facts["context_length"],
        original_max_position_embeddings=facts["original_max_position_embeddings"],
        sliding_window=sliding_window,
        on_scaled="replace",
        **facts["options"],
    )


@contextmanager
def unpatched(model: ModelT) -> Iterator[ModelT]:
    """Take an extension out for the length of a ``with`` block, and put the same one in again.

    Short texts are then read as before, bit for bit, where the extension changed no weights; of an adapter, also enter
    PEFT's ``model.disable_adapter()``. Do not carry a KV cache into the block or out of it: its keys have one rule.

    Args:
        model: A patched model, or an adapter from ``load_extended``; changed in place.

    Yields:
        The same model.

    Raises:
        ValueError: The model is not patched, or was saved with a static method and loaded so.
    """
    rotary = RotaryModel(model)
    record: PatchRecord | None = rotary.record
    marks = [getattr(config, MARK, None) for config in rotary.text_configs]  # they know the base model's name
    unpatch_model(model)
    assert record is not None  # unpatch_model has refused that
    try:
        yield model
    finally:
        tokenizer = None if record.tokenizer is None else record.tokenizer[0]
        with warnings.catch_warnings(), quiet(__name__):  # all was said when it was patched first
            warnings.simplefilter("ignore")
            _refuse_patched(rotary)
            install_extension(rotary, record.extension, tokenizer)
        for config, mark in zip(rotary.text_configs, marks, strict=True):
            setattr(config, MARK, mark)
        if isinstance(record.installed, InstalledEncoding):  # which may have learned something
            rotary.record.installed.encoding.load_state_dict(record.installed.encoding.state_dict())


def verify_model(model: nn.Module | RotaryModel) -> Verification:
    """Do what the public ``verify_model`` (hf_posenc.checkpoint.manifest) does of a model alone, without a checkpoint.

    Raises:
        RotaryMismatchError: They differ; the message says where and by how much.
        ExtensionMissingError: The config says that the model was extended, by a rule that the model does not run.
        ValueError: The family is not supported.
    """
    rotary = RotaryModel.of(model)
    mark = mark_on(rotary.text_config)
    if mark is not None and not is_patched(rotary):
        expected = {key: mark[key] for key in Extension.FACTS}
        check_described(describe(rotary), expected, "its config", str(rotary.model.name_or_path))
    return _verify(rotary, rtol=None)


def _verify(rotary: RotaryModel, rtol: float | None) -> Verification:
    model, record, layers = rotary.model, rotary.record, 0
    if record is not None and record.installed is not None:
        if (problem := record.installed.problem(rotary)) is not None:
            raise RotaryMismatchError(f"{record.extension.method.name} is no longer in place: {problem}.")
        layers = count_layers(model, record.installed.applied_by)
    extension = extension_of(rotary)
    if extension is not None and extension.method.is_encoding:
        return Verification(extension.describe(), (), layers)
    spec = extension.spec if extension is not None else plain_spec(rotary.text_config)
    # Under a method that runs in attention queries and keys come rotated by the model's own frequencies.
    method = extension.method if extension is not None and not layers else Unscaled()
    checks: list[RotaryCheck] = []
    for name, module in rotary.rotary_modules.items():
        if not module._buffers[f"{rotary.prefix}inv_freq"].is_meta:  # type: ignore[union-attr]  # rotary modules have one
            with _unless_built_so(rotary, module):
                checks.append(check_rotary(rotary, name, spec, method, rtol))
                for label, rule in other_layer_types(rotary.text_config).items():
                    if f"{label}_inv_freq" in module._buffers:  # else no layer is of this type
                        checks.append(check_rotary(rotary, name, rule.spec, rule.method, rtol, label))
    for name, module in latent_attentions(rotary).items():
        with _unless_built_so(rotary, module):
            check_scale(name, live_scale(module), expected_scale(module, method))
    if extension is not None and extension.method.temperature_on_logits:
        factor = attention_factor_of(extension)
        for name, scale in record.scales.items() if record is not None else ():
            check_scale(name, live_scale(model.get_submodule(name)), scale * factor**2)
    return Verification(describe(rotary), tuple(checks), layers)


@contextmanager
def _unless_built_so(rotary: RotaryModel, module: nn.Module) -> Iterator[None]:
    """Refuse the family where a module differs from the closed form, but not from what Transformers itself builds."""
    try:
        yield
    except RotaryOutputError:  # which says that the module itself is unusual
        raise
    except RotaryMismatchError as error:
        if rotary.record is None and mark_on(
            rotary.text_config
        ):  # the closed form is the note's, not the config's rule
            raise
        if "scaling" in vars(module):  # an attention module
            built = math.isclose(instantiate_scale(module, rotary.text_config), live_scale(module), rel_tol=1e-6)
        else:
            built = holds_what_is_built(module, rotary.text_config)
        if not built:
            raise
        values = {"difference": str(error).split(". ")[0]}
        raise Refusal(rotary.model_type, "unknown_frequencies", values).error() from error


def is_patched(model: nn.Module | RotaryModel) -> bool:
    """Return whether ``unpatch_model`` has something to undo: ``patch_model`` extended it, here or while loading."""
    return RotaryModel.of(model).record is not None


def extension_of(model: nn.Module | RotaryModel) -> Extension | None:
    """Return the extension that a model was patched with or that its config declares; None for a plain model."""
    rotary = RotaryModel.of(model)
    return rotary.extension or declared_scaling(rotary.text_config)


def rule_of(model: nn.Module | RotaryModel) -> Extension | None:
    """Return the rule that a model was patched with, else that of its config; see ``rule_in_config``."""
    rotary = RotaryModel.of(model)
    return rotary.extension or rule_in_config(rotary.text_config)


def unextended_config(rotary: RotaryModel) -> dict[str, Any]:
    """Return the values of a patched model's text config before ``patch_model``; what it did not have is absent."""
    values: dict[str, Any] = copy.deepcopy(rotary.record.config_values[0])
    return {name: values[name] for name in CONFIG_VALUES if name in values}


def describe(source: nn.Module | RotaryModel | PreTrainedConfig) -> dict[str, Any]:
    """Return method, factor, options, original and target length; method ``"none"`` for what is not extended.

    Where layers besides those of full attention are scaled, as their config says, ``other_layer_types`` has the same
    facts of each such layer type.

    Args:
        source: A model, wrapped or not; or a config.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(source, PreTrainedConfig):  # of a patched model, maybe, whose rule no config can hold
        text_config = source.get_text_config(decoder=True)
        mark = mark_on(text_config)
        if not mark:
            return describe_config(source)
        return with_layer_types({key: mark[key] for key in Extension.FACTS}, text_config)
    rotary = RotaryModel.of(source)
    return describe_rule(rule_of(rotary), rotary.text_config)


def _new_scales(
    rotary: RotaryModel, extension: Extension, config: PreTrainedConfig, values: dict[str, SavedRotary]
) -> tuple[dict[str, nn.Module], dict[str, float]]:
    """Return the attention modules whose softmax scale changes, and their scales.

    A temperature that goes there is taken out of ``values``, what the rotary modules will hold.
    """
    if not extension.method.temperature_on_logits:
        latent = latent_attentions(rotary)
        return latent, {name: instantiate_scale(module, config) for name, module in latent.items()}
    attentions, factor = partial_attentions(rotary), attention_factor_of(extension)
    for saved in values.values():
        saved.attributes[f"{rotary.prefix}attention_scaling"] = 1.0
    return attentions, {name: live_scale(module) * factor**2 for name, module in attentions.items()}


def _raise_generation_limit(rotary: RotaryModel, extension: Extension) -> None:
    """Raise ``generation_config.max_length`` to the target if it is the limit of the model before it was extended.

    ``generate`` refuses a prompt of that many tokens. A number below the original length limits the output, as somebody
    wanted it, and stays.
    """
    generation: Any = getattr(rotary.model, "generation_config", None)
    limit = getattr(generation, "max_length", None)
    if limit is not None and extension.spec.original_max_position_embeddings <= limit < extension.context_length:
        rotary.record.generation_max_length = limit
        generation.max_length = extension.context_length


def _undoable(module: nn.Module, config: PreTrainedConfig) -> SavedRotary:
    """Return the state to undo to; of a module without data (meta device), what Transformers will fill in."""
    is_meta = any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())
    return instantiate(module, config) if is_meta else read_rotary(module)


def _own_configs(model: nn.Module) -> None:
    """Give the model copies of its config objects, which other models may share."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            module.__dict__["config"] = copy.deepcopy(config, memo)


def _read_configs(rotary: RotaryModel) -> list[dict[str, Any]]:
    return [
        {name: copy.deepcopy(config.__dict__[name]) for name in CONFIG_VALUES if name in config.__dict__}
        for config in rotary.text_configs
    ]
