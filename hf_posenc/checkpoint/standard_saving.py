"""Saving and loading by the functions of Transformers, PEFT, accelerate and TRL: they carry a model's extension.

Trainer, TRL, ``push_to_hub`` and PEFT save a model by its ``save_pretrained``. While a model is patched, this function
of the model therefore writes what ``save_extended`` would. An adapter's wrapper, a model that is being loaded and a
tokenizer are not patched models, so ``install`` wraps the functions of the libraries that save and load them. For
models without an extension, the wrapped functions do what they did before.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_posenc.checkpoint.plain_loading import is_plain_loading
from hf_posenc.families.discovery import is_adapter
from hf_posenc.patching.carrying import SAVE, carries_extension, save_patched_models_by
from hf_posenc.utils.import_hooks import when_imported, wrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_UPLOAD = "_upload_modified_files"
_installing = threading.RLock()


def install() -> None:
    """Make Transformers, PEFT, accelerate and TRL save and load extended models with their extension, in this process.

    The first ``patch_model`` or ``load_extended`` of a process calls this function. Call it yourself if
    ``from_pretrained`` should load a model whose method Transformers cannot express before that. ``import hf_posenc``
    alone changes no other library.

    Further calls change nothing, except that functions of a library that was imported again are wrapped again. A
    function that cannot be wrapped is named in the log.
    """
    with _installing:
        when_imported("transformers.modeling_utils", _wrap_model_loading)
        when_imported("transformers.configuration_utils", _wrap_config_of_no_family)
        when_imported("transformers.tokenization_utils_base", _wrap_tokenizer_saving)
        when_imported("peft.peft_model", _wrap_adapters)
        when_imported("peft.config", _wrap_adapter_config)
        when_imported("transformers.integrations.peft", _wrap_adapters_of_transformers)
        when_imported("accelerate.accelerator", _wrap_accelerator)
        when_imported("trl.trainer.utils", _wrap_reference_models)


# ---- saving ----


def _save_carrying(model: PreTrainedModel, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Save a patched model as its class does, then write its extension beside the weights."""
    save = getattr(type(model), SAVE)
    bound = inspect.signature(save).bind(model, save_directory, *args, **kwargs)
    writes = bound.arguments.get("is_main_process", True)
    if hasattr(model, "should_save_on_this_rank"):  # newer Transformers: of tensor parallel ranks one writes
        writes = model.should_save_on_this_rank(writes)
    write = functools.partial(_write_beside, model, adapter=is_adapter(model))
    with _before_upload(model, write):
        result = save(*bound.args, **bound.kwargs)
    if writes:
        write(Path(save_directory))
    return result


@contextmanager
def _before_upload(model: PreTrainedModel, write: Callable[[Path], None]) -> Iterator[None]:
    """While open, ``save_pretrained(push_to_hub=True)`` uploads what ``write`` put into the folder, too."""
    upload = model._upload_modified_files

    def write_first(working_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        write(Path(working_dir))
        return upload(working_dir, *args, **kwargs)

    model.__dict__[_UPLOAD] = write_first
    try:
        yield
    finally:
        del model.__dict__[_UPLOAD]


def _write_beside(base: PreTrainedModel, folder: Path, *, adapter: bool) -> None:
    """Write the extension into the folder that a model or its adapter was saved to; say what to do if that fails."""
    from hf_posenc.checkpoint.extended import write_extension

    try:
        write_extension(base, folder, adapter=adapter)
    except Exception as error:  # the weights are saved by now, and losing them would be worse
        what = "the adapter" if adapter else "the model"
        logger.warning(
            "%s: %s was saved WITHOUT its extension (%s). Save it again with hf_posenc.save_extended(model, %r).",
            folder,
            what,
            error,
            str(folder),
        )


def _wrap_tokenizer_saving(module: ModuleType) -> None:
    def save(original: Callable[..., Any], tokenizer: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tokenizer, save_directory, *args, **kwargs)
        from hf_posenc.checkpoint.manifest import MANIFEST

        if (Path(save_directory) / MANIFEST).is_file():
            from hf_posenc.checkpoint.extended import raise_tokenizer_limit

            try:
                raise_tokenizer_limit(Path(save_directory))
            except ValueError as error:  # a damaged manifest: the tokenizer is saved all the same
                logger.warning("%s The tokenizer's limit is left as it was.", error)
        return result

    wrap(module.PreTrainedTokenizerBase, SAVE, save)


def _wrap_accelerator(module: ModuleType) -> None:
    def save_model(original: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(accelerator, model, *args, **kwargs)
        base = _carrying_inside(model)
        folder = Path(args[0] if args else kwargs["save_directory"])
        if base is None or not accelerator.is_main_process or not folder.is_dir():
            return result
        if is_adapter(accelerator.unwrap_model(model)):
            logger.warning(
                "%s: accelerate saved the weights of a PEFT model without its extension. Save the adapter with "
                "hf_posenc.save_extended(model, ...).",
                folder,
            )
            return result
        from hf_posenc.checkpoint.extended import save_config

        save_config(base, folder)
        _write_beside(base, folder, adapter=False)
        return result

    wrap(module.Accelerator, "save_model", save_model)


# ---- adapters ----


def _wrap_adapters(module: ModuleType) -> None:
    def save(original: Callable[..., Any], model: Any, save_directory: str, *args: Any, **kwargs: Any) -> Any:
        result = original(model, save_directory, *args, **kwargs)
        base = _carrying_inside(model)
        bound = inspect.signature(original).bind(model, save_directory, *args, **kwargs)
        if base is not None and bound.arguments.get("is_main_process", True):
            for name in bound.arguments.get("selected_adapters") or list(model.peft_config):
                folder = Path(save_directory)
                _write_beside(base, folder if name == "default" else folder / name, adapter=True)
        return result

    def load(original: Callable[..., Any], cls: Any, model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        _extend_for_adapter(model, model_id, kwargs)  # an encoding must be there before PEFT wraps the model
        return original(cls, model, model_id, *args, **kwargs)  # which calls load_adapter

    def add(original: Callable[..., Any], model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        _extend_for_adapter(model, model_id, kwargs)
        return original(model, model_id, *args, **kwargs)

    wrap(module.PeftModel, SAVE, save)
    wrap(module.PeftModel, "from_pretrained", load)
    wrap(module.PeftModel, "load_adapter", add)


def _wrap_adapters_of_transformers(module: ModuleType) -> None:
    def add(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("peft_model_id")
        if source is not None:
            _extend_for_adapter(model, source, kwargs)
        return original(model, *args, **kwargs)

    wrap(module.PeftAdapterMixin, "load_adapter", add)


def _extend_for_adapter(model: Any, source: Any, kwargs: dict[str, Any]) -> None:
    """Extend the base that an adapter is about to be put on, as the adapter's manifest says.

    Raises:
        ValueError: It is extended in another way.
    """
    if is_plain_loading():
        return
    base = _carrying_inside(model)
    manifest_in_folder = _find_manifest(source, kwargs) if _names_extension(source, kwargs) else None
    if manifest_in_folder is not None:
        from hf_posenc.checkpoint.extended import base_as_adapter_needs

        base_as_adapter_needs(model, *manifest_in_folder)
        if base is None:
            _say_applied(*manifest_in_folder)
    elif base is not None:
        from hf_posenc.patching.api import describe

        logger.warning(
            "%s: the adapter does not say that its base was extended in training, and is put on one that is (%s).",
            source,
            describe(base)["method"],
        )


def _names_extension(adapter: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an adapter is in a folder of this machine, or its file on the Hub says that it was extended.

    So an adapter on the Hub without an extension costs no request for other files than PEFT asks for.
    """
    from hf_posenc.checkpoint.pretrained import ADAPTER_CONFIG, folder_with
    from hf_posenc.patching.lengths import MARK
    from hf_posenc.utils.files import read_json

    folder = folder_with(str(adapter), (ADAPTER_CONFIG,), kwargs)
    if Path(adapter).expanduser().exists() or folder is None:
        return folder is not None
    return MARK in read_json(folder / ADAPTER_CONFIG)


def _say_applied(manifest: dict[str, Any], folder: Path) -> None:
    from hf_posenc.checkpoint.manifest import MANIFEST

    method, length = manifest["method"], manifest["context_length"]
    logger.warning("%s: %s to %d tokens, which %s says, was applied.", folder, method, length, MANIFEST)


def _wrap_adapter_config(module: ModuleType) -> None:
    def load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from hf_posenc.patching.lengths import MARK

        with warnings.catch_warnings():  # of the key that is there for us
            warnings.filterwarnings("ignore", rf"Unexpected keyword arguments \['{MARK}'\]")
            return original(*args, **kwargs)

    wrap(module.PeftConfigMixin, "from_pretrained", load)


def _carrying_inside(model: Any) -> PreTrainedModel | None:
    """Return the model inside wrappers if its extension is to be saved with it."""
    from hf_posenc.families.rotary_model import RotaryModel

    try:
        base = RotaryModel(model).model
    except TypeError:  # not a Transformers model
        return None
    return base if carries_extension(base) else None


# ---- loading ----


def _wrap_model_loading(module: ModuleType) -> None:
    def load(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        loaded = original(cls, *args, **kwargs)  # an adapter goes through load_adapter in it
        if source is not None and not is_plain_loading():
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            manifest_in_folder = _find_manifest(source, kwargs) if _may_have_manifest(model, source) else None
            if manifest_in_folder is not None:
                _apply(model, *manifest_in_folder)
            else:
                _warn_if_lost(model, source)
        return loaded

    wrap(module.PreTrainedModel, "from_pretrained", load)


def _may_have_manifest(model: PreTrainedModel, source: Any) -> bool:
    """Return whether a model came from a folder of this machine, or its config says that it was extended.

    So a model on the Hub without an extension costs no request.
    """
    from hf_posenc.families.rotary_model import RotaryModel
    from hf_posenc.patching.extension import mark_on

    return Path(source).expanduser().is_dir() or mark_on(RotaryModel(model).text_config) is not None


def _wrap_config_of_no_family(module: ModuleType) -> None:
    """Let Trainer resume: it reads a checkpoint's config as one of no family, which fails on both serializations."""

    def read(original: Callable[..., Any], cls: Any, json_file: Any) -> Any:
        if cls is module.PreTrainedConfig:
            values = cls._dict_from_json_file(json_file)
            if "rope_parameters" in values and "rope_scaling" in values:
                return cls(**{key: value for key, value in values.items() if key not in ("rope_scaling", "rope_theta")})
        return original(cls, json_file)

    wrap(module.PreTrainedConfig, "from_json_file", read)


def _apply(model: PreTrainedModel, manifest: dict[str, Any], folder: Path) -> None:
    """Patch a model that plain Transformers loaded with what only its manifest says."""
    from hf_posenc.checkpoint.extended import add_to_config
    from hf_posenc.checkpoint.manifest import MANIFEST
    from hf_posenc.patching.api import is_patched

    if is_patched(model):  # by its adapter
        return
    try:
        add_to_config(model, manifest)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        # Transformers has loaded the weights, which someone may want as they are.
        what = str(manifest.get("method"))
        logger.warning("%s: %s, which %s says, was NOT applied: %s", folder, what, MANIFEST, error)
        return
    if is_patched(model):
        _say_applied(manifest, folder)


def _warn_if_lost(model: PreTrainedModel, source: Any) -> None:
    """Warn of a model that only says that it was extended, by a rule that no config can hold."""
    from hf_posenc.checkpoint.manifest import MANIFEST
    from hf_posenc.families.rotary_model import RotaryModel
    from hf_posenc.patching.extension import mark_on, rule_is_elsewhere

    mark = mark_on(RotaryModel(model).text_config)
    try:
        lost = mark is not None and rule_is_elsewhere(mark)
    except ValueError as error:
        logger.warning("%s: %s It is read as the rest of its config says.", source, error)
        return
    if mark is not None and lost:
        logger.warning(
            "%s: its config says that it was extended by %s to %d tokens, and %s, which holds the rule, is not there. "
            "It is read as the base model; if it is to be extended, call patch_model.",
            source,
            mark["method"],
            mark["context_length"],
            MANIFEST,
        )


# ---- reference models ----


def _wrap_reference_models(module: ModuleType) -> None:
    """Let TRL's DPO, KTO, GRPO and RLOO compare a model with one that is extended as it is.

    They load the reference by the name in the model's config: ``create_model_from_path(get_config_model_id(config))``.
    """

    def name_of(original: Callable[..., Any], config: Any) -> Any:
        name = original(config)
        return _NameWithConfig(name, config) if isinstance(name, str) else name

    def create(original: Callable[..., Any], model_id: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model_id, _NameWithConfig):
            return original(model_id, *args, **kwargs)
        from hf_posenc.attention.inner import inner_name

        if isinstance(kwargs.get("attn_implementation"), str):
            kwargs["attn_implementation"] = inner_name(kwargs["attn_implementation"])
        model = original(str(model_id), *args, **kwargs)
        _extend_as(model, model_id.config)
        return model

    if {"get_config_model_id", "create_model_from_path"} <= vars(module).keys():
        wrap(module, "get_config_model_id", name_of)
        wrap(module, "create_model_from_path", create)


class _NameWithConfig(str):
    """The name of a model, and the config that it was read from."""

    __slots__ = ("config",)
    config: Any

    def __new__(cls, name: str, config: Any) -> _NameWithConfig:
        made = super().__new__(cls, name)
        made.config = config
        return made


def _extend_as(model: PreTrainedModel, config: Any) -> None:
    """Extend a model as the config of another, live one says."""
    from hf_posenc.families.rotary_model import RotaryModel
    from hf_posenc.families.sliding_window import KEEP, OFF
    from hf_posenc.methods.base import Extension
    from hf_posenc.patching.api import describe, is_patched, patch_as_described, unpatch_model
    from hf_posenc.patching.extension import mark_on

    rotary, text_config = RotaryModel(model), config.get_text_config(decoder=True)
    mark = mark_on(text_config)
    if mark is None or all(describe(rotary)[key] == mark[key] for key in Extension.FACTS):
        return
    if is_patched(rotary):
        unpatch_model(model)
    own = getattr(rotary.text_config, "sliding_window", None)
    window = getattr(text_config, "sliding_window", None)
    patch_as_described(model, mark, KEEP if window == own else window or OFF)


def _find_manifest(source: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Path] | None:
    """Return the manifest beside a checkpoint and its folder; None if there is none, or none that can be read."""
    from hf_posenc.checkpoint.manifest import find_manifest

    try:
        return find_manifest(str(source), kwargs)
    except ValueError as error:
        logger.warning("%s. If the checkpoint needs it, it is read as another model.", str(error).rstrip("."))
        return None


save_patched_models_by(_save_carrying, install)
