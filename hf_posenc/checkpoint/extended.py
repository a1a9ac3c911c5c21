"""Checkpoints that plain Transformers reads, in both serializations, and the manifest beside them."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_posenc.checkpoint.manifest import (
    ADAPTER_CONFIG,
    CONFIG,
    MANIFEST,
    apply_manifest,
    extension_in,
    find_manifest,
    is_encoding,
    is_saved_by_us,
    make_manifest,
    mark_from,
    mark_of,
    read_manifest,
)
from hf_posenc.checkpoint.pretrained import (
    check_may_read,
    expecting_keys,
    folder_with,
    hub_arguments,
    load_weights,
    model_class,
)
from hf_posenc.checkpoint.quantised import refuse_unsaveable
from hf_posenc.encodings.encoding_installation import MODULE, load_parameters, refuse_adapter
from hf_posenc.errors import InvalidRequestError, MissingFileError
from hf_posenc.families.discovery import is_adapter
from hf_posenc.families.family_data import FULL_ATTENTION, family_of
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.sliding_window import KEEP
from hf_posenc.methods.base import Extension
from hf_posenc.patching.api import describe, unextended_config, verify_model
from hf_posenc.patching.carrying import carry_extension, prepare_libraries
from hf_posenc.patching.extension import mark_encoding, rule_is_elsewhere
from hf_posenc.patching.lengths import MARK
from hf_posenc.utils.console import without_weight_bars
from hf_posenc.utils.dtypes import as_stored
from hf_posenc.utils.files import read_json, writable_folder, write_whole

logger = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"
# The classes of PEFT that build the base model of an adapter with a head that the base's checkpoint does not have.
_CLASSES_OF_TASKS = {
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
UNFINISHED = "model.partial"  # the folder inside a checkpoint's in which its successor is being written
# The files of an earlier checkpoint, a model's or an adapter's, that a new one must not be mixed with.
CHECKPOINT_FILES = (
    MANIFEST,
    CONFIG,
    ADAPTER_CONFIG,
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "adapter_model.safetensors",
)


def both_serializations(config: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a text config with its rotary settings as Transformers 5 and as Transformers 4 read them.

    Transformers 4 ignores ``rope_parameters``: a checkpoint saved by 5 loads there with ``rope_theta=10000`` and no
    scaling, and no warning. It reads ``rope_theta`` and ``rope_scaling`` (``rope_type``, before 4.43 ``type``).
    """
    nested = {key: dict(value) for key, value in config["rope_parameters"].items() if isinstance(value, dict)}
    full = next((label for label in nested if label in FULL_ATTENTION), "")
    parameters = {k: v for k, v in (nested[full] if full else config["rope_parameters"]).items() if k != "type"}
    family = family_of(config.get("model_type"))
    written = {**config, "rope_parameters": {**config["rope_parameters"], full: parameters} if full else parameters}
    if full and family.layer_types_in_4 is None:  # Transformers 4 does not know the family, or no scaling of it
        return written
    for key in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(key) is not None:
            written[family.names_in_4.get(key, key)] = parameters[key]
    if full and (sliding := family.layer_types_in_4):
        written[sliding] = nested["sliding_attention"]["rope_theta"]
    rope_type = parameters["rope_type"]
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    # Qwen2-VL's decoder in Transformers 4 reads mrope_section from here, whatever the rule.
    is_plain = rope_type == "default" and not any(key.startswith("mrope_") for key in scaling)
    written["rope_scaling"] = None if is_plain else {**scaling, "type": rope_type}
    if rope_type == "longrope":  # Transformers 4 looks for it here only, and else switches lists at the target
        written["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
    return written


def save_checkpoint(
    model: nn.Module,
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    *,
    tokens_trained: int | None = 0,
    base_model: str | None = None,
    fitted_on: Mapping[str, Any] | None = None,
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """Write what ``save_extended`` does, without a model card and without the Hub.

    Args:
        model, path, tokenizer, tokens_trained, base_model, fitted_on: As for ``save_extended``.
        finish: Called with the complete folder before it is moved to ``path``, to add files.

    Returns:
        The folder.

    Raises:
        RotaryMismatchError, ValueError: As for ``save_extended``.
    """
    target = writable_folder(path).absolute()
    rotary = RotaryModel(model)
    base = rotary.model
    whole = not is_adapter(model)
    refuse_unsaveable(base, whole=whole)
    if whole:
        _refuse_class(base)
    else:
        refuse_adapter(base, "Merge it (PEFT's merge_and_unload) and save the whole model.")
    manifest = make_manifest(rotary, tokens_trained=tokens_trained, base_model=base_model, fitted_on=fitted_on)
    verify_model(rotary)
    if manifest["options"].get("temperature") == "logits":
        logger.warning(
            "%s: plain Transformers will apply the temperature to the rotated part of a head only; load_extended gives "
            "this model.",
            path,
        )
    if rule_is_elsewhere(manifest):
        logger.warning(
            "%s: %s is in %s alone; load_extended applies it, Transformers without hf_posenc %s.",
            path,
            manifest["method"],
            MANIFEST,
            "refuses the checkpoint" if is_encoding(manifest) else "reads the base model",
        )
    # Moved into place when it is whole. The parent of an existing folder may be on another device, or not writable.
    partial = target / UNFINISHED if target.exists() else target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with as_stored(base), without_weight_bars():
            if whole or model is base:
                type(base).save_pretrained(base, partial)
            else:
                model.save_pretrained(str(partial))  # type: ignore[operator]  # PEFT's model; mypy takes it for a tensor
        if tokenizer is not None:
            _save_tokenizer(tokenizer, partial, manifest["context_length"])
        if whole and rotary.text_config is not base.config and not isinstance(tokenizer, ProcessorMixin):
            _copy_processor((base_model, base.name_or_path), partial)
        _write_manifest(partial, rotary, manifest, adapter=not whole)
        if finish is not None:
            finish(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _move_into(partial, target)
    return target


def write_extension(
    model: PreTrainedModel,
    folder: Path,
    *,
    adapter: bool,
    tokens_trained: int | None = None,
    base_model: str | None = None,
) -> None:
    """Write the extension of a model beside weights, or an adapter, that others have saved in a folder.

    Args:
        model: The extended model, not its wrapper.
        folder: Where it was saved.
        adapter: Whether an adapter of it was saved, not the whole.
        tokens_trained: Tokens it was fine-tuned on since; None where that is not known.
        base_model: Where the unextended model came from; None to take it from the config.

    Raises:
        RotaryMismatchError: The live model does not hold what would be written.
        ValueError: An adapter cannot hold it.
    """
    if adapter:
        refuse_adapter(model, "Merge it (PEFT's merge_and_unload) and save the whole model.")
    elif (folder / ADAPTER_CONFIG).is_file():
        logger.warning(
            "%s: an adapter was saved there before, and Transformers will put it on the model that is there now. "
            "Remove %s, or save the model into a folder of its own.",
            folder,
            ADAPTER_CONFIG,
        )
    rotary = RotaryModel(model)
    manifest = make_manifest(rotary, tokens_trained=tokens_trained, base_model=base_model)
    verify_model(rotary)
    _write_manifest(folder, rotary, manifest, adapter=adapter)
    raise_tokenizer_limit(folder)


def save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the config of a model into a folder to which only its weights were saved."""
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__.removeprefix("FSDP")], model.dtype
    config.save_pretrained(folder)


def raise_tokenizer_limit(folder: Path) -> None:
    """Set ``model_max_length`` of a tokenizer saved in a folder to the manifest's target, where it is below."""
    file, manifest = folder / TOKENIZER_CONFIG, read_manifest(folder)
    if manifest is None or not file.is_file():
        return
    settings = read_json(file)
    limit = settings.get("model_max_length")
    if limit is not None and limit < manifest["context_length"]:
        settings["model_max_length"] = manifest["context_length"]
        write_whole(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _write_manifest(folder: Path, rotary: RotaryModel, manifest: dict[str, Any], *, adapter: bool) -> None:
    """Write what there is to say of an extension into the config of a model or an adapter, and the manifest, last."""
    if adapter:
        # PEFT itself warns of a key that it does not know, which is all that those without hf_posenc see.
        file, mark = folder / ADAPTER_CONFIG, {MARK: {key: manifest[key] for key in Extension.FACTS}}
        fields = read_json(file) | mark
        write_whole(file, json.dumps(fields, indent=2, sort_keys=True) + "\n")
    elif (folder / CONFIG).is_file():  # a checkpoint of sharded training has none
        _rewrite_config(folder / CONFIG, rotary, manifest)
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _refuse_class(model: PreTrainedModel) -> None:
    """Refuse a model of a class that ``load_extended`` could not build again: one that Transformers does not have."""
    name = type(model).__name__.removeprefix("FSDP")
    if model_class(name) is not None:
        return
    known = next(cls for cls in type(model).__mro__ if model_class(cls.__name__) is cls)
    own: list[str] = []
    if known is not PreTrainedModel:
        with torch.device("meta"):
            own = sorted(model.state_dict().keys() - known(model.config).state_dict().keys())
        if not own and known.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            return  # the same weights: it is loaded as what it derives from
    beside = f", and {known.__name__} has no {own[0]}" if own else ""
    raise InvalidRequestError(
        f"load_extended could not build a {name} again: Transformers has no such class{beside}. Save it with "
        f"model.save_pretrained, which writes its extension too, and load it with {name}.from_pretrained "
        "after hf_posenc.install()."
    )


def _config_values(rotary: RotaryModel, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the text config on disk that differ from the live one's."""
    mark = mark_from(manifest)
    if not rule_is_elsewhere(manifest):
        return mark
    values = {**unextended_config(rotary), **mark}  # by which it is known that there was a manifest
    if is_encoding(manifest):
        mark_encoding(values["rope_parameters"], rotary.label, manifest["method"])
    return values


def _rewrite_config(file: Path, rotary: RotaryModel, manifest: dict[str, Any]) -> None:
    saved = read_json(file)
    config, text_config = rotary.model.config, rotary.text_config
    changed = _config_values(rotary, manifest)
    if text_config is config:
        saved = both_serializations({**saved, **changed})
    else:
        name = next(key for key in config.sub_configs if getattr(config, key) is text_config)
        saved[name] = both_serializations({**saved[name], **changed})
    write_whole(file, json.dumps(saved, indent=2, sort_keys=True) + "\n")


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase | ProcessorMixin, path: Path, length: int) -> None:
    """Save a tokenizer, or a processor with the one inside, with the target as its limit."""
    limited: Any = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
    before = limited.model_max_length
    try:
        limited.model_max_length = length
        tokenizer.save_pretrained(path)
    finally:
        limited.model_max_length = before


def _copy_processor(sources: Sequence[str | None], folder: Path) -> None:
    """Copy the settings of what turns images and sounds into inputs, from the first source that has some."""
    found = next(filter(None, (folder_with(source, _PROCESSOR_FILES) for source in sources if source)), None)
    for name in _PROCESSOR_FILES:
        if found is not None and (found / name).is_file():
            shutil.copyfile(found / name, folder / name)


def _move_into(partial: Path, target: Path) -> None:
    """Move a finished folder into place, over an earlier checkpoint; other files there are left alone.

    What makes a folder a checkpoint goes first and comes back last: one left half-moved is not taken for whole.
    """
    if not target.exists():
        partial.rename(target)
        return
    for pattern in CHECKPOINT_FILES:
        for stale in target.glob(pattern):
            stale.unlink()
    files = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda p: (p.name == MANIFEST, p.name in (CONFIG, ADAPTER_CONFIG))):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial / file, target / file)
    shutil.rmtree(partial)


def load_extended(path: str | Path, base: PreTrainedModel | None = None, **kwargs: Any) -> Any:
    """Load what ``save_extended`` wrote, verified: a model, or a base model with its adapter.

    Args:
        path: The folder, or ``OWNER/NAME`` on the Hub.
        base: The base model of an adapter, loaded already, extended or not; None loads the one the adapter names, in
            its own precision even if the adapter was trained on 4-bit weights (QLoRA): ``quantization_config``
            quantises it again.
        **kwargs: Passed on to ``from_pretrained``, such as ``dtype`` or ``device_map``; for the Hub ``revision`` and
            ``token``.

    Raises:
        FileNotFoundError: There is no manifest.
        HubAccessError: The Hub has no such repository, or it is private and the token may not read it.
        HubUnreachableError: The Hub cannot be reached, or offline mode is set, and it was not downloaded before.
        ValueError: The adapter's base is already extended in another way, or a base came with a whole model.
        RotaryMismatchError: The loaded model does not hold what the manifest says.
    """
    check_may_read(path, kwargs)
    path = local if (local := Path(path).expanduser()).exists() else path
    prepare_libraries()  # PEFT's loading extends the base of an adapter
    manifest_in_folder = find_manifest(path, kwargs)
    if (adapter := folder_with(path, (ADAPTER_CONFIG,), kwargs)) is not None:
        return _load_adapter(path, adapter, None if manifest_in_folder is None else manifest_in_folder[0], base, kwargs)
    if manifest_in_folder is None:
        raise MissingFileError(f"{path} has no {MANIFEST}: it was not written by save_extended. Use from_pretrained.")
    if base is not None:
        raise InvalidRequestError(f"{path} holds a whole model, not an adapter: it takes no base.")
    manifest, folder = manifest_in_folder
    if is_encoding(manifest):
        model = _load_encoded(path, folder, manifest, kwargs)
    else:
        model = load_weights(path, **kwargs)
        add_to_config(model, manifest)
    _check_loaded(model, manifest, path)
    return model


def add_to_config(model: PreTrainedModel, manifest: dict[str, Any]) -> None:
    """Patch a model, built as ``config.json`` says, with what of its manifest no config can say: nothing, mostly.

    What the model's own ``save_pretrained`` writes is extended too.
    """
    if rule_is_elsewhere(manifest):
        config = RotaryModel(model).text_config.__dict__
        config.pop(MARK, None)  # undone, the model is the base
        config |= {key: value for key, value in manifest["base_config"].items() if key == MARK}
        apply_manifest(model, manifest)
    elif manifest["options"].get("temperature") == "logits":  # of which config.json says as much as it can
        apply_manifest(model, {**manifest, "sliding_window": KEEP})
    else:
        carry_extension(model)


def _load_encoded(path: str | Path, folder: Path, manifest: dict[str, Any], kwargs: dict[str, Any]) -> PreTrainedModel:
    """Load a model that has another encoding than RoPE, with the parameters of the encoding."""
    config = _plain_config(folder / CONFIG, manifest["base_config"])
    with expecting_keys(rf"(^|\.){MODULE}\."):
        model = load_weights(path, **{**kwargs, "config": config})
    apply_manifest(model, manifest)
    load_parameters(model, folder)
    return model


def _plain_config(file: Path, base: dict[str, Any]) -> PreTrainedConfig:
    """Return the config of a file with the base model's RoPE, before Transformers can meet a name it does not know."""
    saved = read_json(file)
    section = next((s for s in (saved, *saved.values()) if isinstance(s, dict) and "rope_parameters" in s), saved)
    for key in ("rope_scaling", "rope_theta", MARK):
        section.pop(key, None)
    section |= base
    return AutoConfig.for_model(**saved)


_ONLY_OF_THE_ADAPTER = ("revision", "subfolder")  # its base is in a repository of its own


def _load_adapter(
    path: str | Path,
    folder: Path,
    manifest: dict[str, Any] | None,
    base: PreTrainedModel | None,
    kwargs: dict[str, Any],
) -> Any:
    """Put an adapter on its base model, which PEFT's own loading extends then, as ``standard_saving`` has it."""
    import peft
    from peft import PeftConfig, PeftModel

    where = hub_arguments(kwargs)
    settings = PeftConfig.from_pretrained(str(path), **where)
    source = settings.base_model_name_or_path
    if manifest is None and mark_of(folder / ADAPTER_CONFIG) is None:
        logger.warning("%s: the adapter does not say whether its base was extended; it is taken as it is.", path)
    elif manifest is None:
        raise InvalidRequestError(f"{path}: {ADAPTER_CONFIG} says that its base was extended, and {MANIFEST} is gone.")
    if base is None and not source:
        raise InvalidRequestError(
            f"{folder / ADAPTER_CONFIG} does not name its base model: load that and pass it as base."
        )
    task = settings.task_type
    with peft_renamed_attribute():
        if base is None and task in _CLASSES_OF_TASKS:
            if manifest is not None and task.endswith("_CLS"):
                kwargs = {"num_labels": manifest["num_labels"], **kwargs}
            model = getattr(peft, _CLASSES_OF_TASKS[task]).from_pretrained(str(path), **kwargs)
        else:
            if base is None:
                kwargs = {name: value for name, value in kwargs.items() if name not in _ONLY_OF_THE_ADAPTER}
                if settings.revision is not None and not Path(source).exists():
                    kwargs["revision"] = settings.revision
                base = (load_extended if is_saved_by_us(source) else load_weights)(source, **kwargs)
            model = PeftModel.from_pretrained(base, str(path), **where)
    if manifest is not None:
        _check_loaded(model, manifest, path)
    return model


def base_as_adapter_needs(base: Any, manifest: dict[str, Any], path: Path) -> None:
    """Extend a plain base model as the manifest of an adapter says; see that an extended one is so already.

    Args:
        base: What the adapter is about to be put on.
        manifest: Manifest of the adapter.
        path: Its folder, for messages.

    Raises:
        ValueError: The base is extended in another way, or has an encoding of its own whose parameters are needed.
        RotaryMismatchError: The base does not hold what the manifest says.
    """
    rotary = RotaryModel(base)
    if describe(rotary)["method"] == "none":
        apply_manifest(rotary.model, manifest)
        refuse_adapter(rotary.model, "Pass the model it was trained on, which holds them: base=load_extended(...).")
    _check_loaded(rotary, manifest, path)


@contextmanager
def peft_renamed_attribute() -> Iterator[None]:
    """While open, PEFT may ask Transformers for an attribute that was renamed; a user can do nothing about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def _check_loaded(model: nn.Module | RotaryModel, manifest: dict[str, Any], path: str | Path) -> None:
    rotary = RotaryModel.of(model)
    verify_model(rotary)
    held, expected = extension_in(rotary, manifest)
    differing = [key for key, value in expected.items() if held.get(key) != value]
    if differing:
        raise InvalidRequestError(
            f"{path}: the model does not carry the manifest's extension: "
            + ", ".join(f"{key} is {held.get(key)!r}, the manifest says {expected[key]!r}" for key in differing)
            + "."
        )
