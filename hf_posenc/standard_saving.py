"""Saving and loading by the functions of Transformers, PEFT and accelerate: they carry a model's extension.

Trainer, TRL, ``push_to_hub`` and PEFT save a model without asking us. While a model is patched, its own
``save_pretrained`` therefore writes what ``save_extended`` would. Where there is no model of ours to hang that on (an
adapter's wrapper, which comes later; a model about to be loaded; a tokenizer), the library's own function is wrapped
once, as soon as the library is imported; it does what it always did for whatever we have nothing to do with.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_posenc.import_hooks import when_imported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# What a config, a model's or an adapter's, says of its extension to those who have only it.
MARK = "context_extension"
_SAVE = "save_pretrained"
_NO_ERRORS_FOR = ("missing_entries", "connection_errors", "gated_repo")
_plain: ContextVar[bool] = ContextVar("plain_loading", default=False)


def install() -> None:
    """Wrap the functions of the libraries, those that are imported and those that will be."""
    when_imported("transformers.modeling_utils", _wrap_model_loading)
    when_imported("transformers.configuration_utils", _wrap_config_of_no_family)
    when_imported("transformers.tokenization_utils_base", _wrap_tokenizer_saving)
    when_imported("peft.peft_model", _wrap_adapters)
    when_imported("peft.config", _wrap_adapter_config)
    when_imported("transformers.integrations.peft", _wrap_adapters_of_transformers)
    when_imported("accelerate.accelerator", _wrap_accelerator)


def carry_extension(model: PreTrainedModel) -> None:
    """Make a patched model's own ``save_pretrained`` write the extension too, until ``drop_extension``."""
    model.__dict__[_SAVE] = functools.partial(_save_carrying, model)


def drop_extension(model: PreTrainedModel) -> None:
    """Undo ``carry_extension``."""
    model.__dict__.pop(_SAVE, None)


@contextmanager
def plain_loading() -> Iterator[None]:
    """While open, ``from_pretrained`` loads what is in ``config.json`` and nothing else, as without hf_posenc."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


# ---- saving ----


def _save_carrying(model: PreTrainedModel, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Save a patched model as its class does, then write its extension beside the weights."""
    save = getattr(type(model), _SAVE)
    bound = inspect.signature(save).bind(model, save_directory, *args, **kwargs)
    pushed = bound.arguments.pop("push_to_hub", False)  # after the extension is there
    result = save(*bound.args, **bound.kwargs)
    writes = bound.arguments.get("is_main_process", True)
    if hasattr(model, "should_save_on_this_rank"):  # newer Transformers: of tensor parallel ranks one writes
        writes = model.should_save_on_this_rank(writes)
    if writes:
        _write_beside(model, model, Path(save_directory))
        if pushed:
            _push(model, save_directory, bound)
    return result


def _push(model: PreTrainedModel, folder: str | os.PathLike[str], bound: inspect.BoundArguments) -> None:
    more = dict(bound.arguments.get("kwargs", {}))
    where = more.pop("repo_id", Path(folder).name)
    model.push_to_hub(where, token=bound.arguments.get("token"), **more)


def _write_beside(wrapped: Any, base: PreTrainedModel, folder: Path) -> None:
    """Write the extension of ``base`` into the folder that ``wrapped`` was saved to; say what to do if that fails."""
    from hf_posenc.checkpoint import write_extension

    try:
        write_extension(base, folder)
    except Exception as error:  # the weights are saved by now, and losing them would be worse
        what = "the model" if wrapped is base else "the adapter"
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
        from hf_posenc.manifest import MANIFEST

        if (Path(save_directory) / MANIFEST).is_file():
            from hf_posenc.checkpoint import raise_tokenizer_limit

            try:
                raise_tokenizer_limit(Path(save_directory))
            except ValueError as error:  # a damaged manifest: the tokenizer is saved all the same
                logger.warning("%s The tokenizer's limit is left as it was.", error)
        return result

    _wrap(module.PreTrainedTokenizerBase, _SAVE, save)


def _wrap_accelerator(module: ModuleType) -> None:
    def save_model(original: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(accelerator, model, *args, **kwargs)
        base = _patched_inside(model)
        folder = Path(args[0] if args else kwargs["save_directory"])
        if base is None or not accelerator.is_main_process or not folder.is_dir():
            return result
        if hasattr(accelerator.unwrap_model(model), "peft_config"):
            logger.warning(
                "%s: accelerate saved the weights of a PEFT model without its extension. Save the adapter with "
                "hf_posenc.save_extended(model, ...).",
                folder,
            )
            return result
        from hf_posenc.checkpoint import save_config

        save_config(base, folder)
        _write_beside(base, base, folder)
        return result

    _wrap(module.Accelerator, "save_model", save_model)


# ---- adapters ----


def _wrap_adapters(module: ModuleType) -> None:
    def save(original: Callable[..., Any], model: Any, save_directory: str, *args: Any, **kwargs: Any) -> Any:
        result = original(model, save_directory, *args, **kwargs)
        base = _patched_inside(model)
        bound = inspect.signature(original).bind(model, save_directory, *args, **kwargs)
        if base is not None and bound.arguments.get("is_main_process", True):
            for name in bound.arguments.get("selected_adapters") or list(model.peft_config):
                folder = Path(save_directory)
                _write_beside(model, base, folder if name == "default" else folder / name)
        return result

    def load(original: Callable[..., Any], cls: Any, model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        _extend_for_adapter(model, model_id, kwargs)
        return original(cls, model, model_id, *args, **kwargs)

    def add(original: Callable[..., Any], model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        _extend_for_adapter(model, model_id, kwargs)
        return original(model, model_id, *args, **kwargs)

    _wrap(module.PeftModel, _SAVE, save)
    _wrap(module.PeftModel, "from_pretrained", load)
    _wrap(module.PeftModel, "load_adapter", add)


def _wrap_adapters_of_transformers(module: ModuleType) -> None:
    def add(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("peft_model_id")
        if source is not None:
            _extend_for_adapter(model, source, kwargs)
        return original(model, *args, **kwargs)

    _wrap(module.PeftAdapterMixin, "load_adapter", add)


def _extend_for_adapter(model: Any, source: Any, kwargs: dict[str, Any]) -> None:
    """Extend the base that an adapter is about to be put on, as the adapter's manifest says.

    Raises:
        ValueError: It is extended in another way.
    """
    found = None if _plain.get() else _find_manifest(source, kwargs)
    if found is None:
        return
    from hf_posenc.checkpoint import base_as_adapter_needs

    was = _patched_inside(model) is not None
    base_as_adapter_needs(model, *found)
    if not was and _patched_inside(model) is not None:
        _say_put_in(*found)


def _say_put_in(manifest: dict[str, Any], folder: Path) -> None:
    from hf_posenc.manifest import MANIFEST

    method, length = manifest["method"], manifest["context_length"]
    logger.warning("%s: %s to %d tokens, which %s says, was put in.", folder, method, length, MANIFEST)


def _wrap_adapter_config(module: ModuleType) -> None:
    def load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():  # of the key that is there for us
            warnings.filterwarnings("ignore", rf"Unexpected keyword arguments \['{MARK}'\]")
            return original(*args, **kwargs)

    _wrap(module.PeftConfigMixin, "from_pretrained", load)


def _patched_inside(model: Any) -> PreTrainedModel | None:
    from hf_posenc.families import unwrap
    from hf_posenc.patching import is_patched

    try:
        base = unwrap(model)
    except TypeError:  # not a Transformers model
        return None
    return base if is_patched(base) else None


# ---- loading ----


def _wrap_model_loading(module: ModuleType) -> None:
    def load(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        loaded = original(cls, *args, **kwargs)  # an adapter goes through load_adapter in it
        found = None if source is None or _plain.get() else _find_manifest(source, kwargs)
        if found is not None:
            _apply(loaded[0] if isinstance(loaded, tuple) else loaded, *found)
        return loaded

    _wrap(module.PreTrainedModel, "from_pretrained", load)


def _wrap_config_of_no_family(module: ModuleType) -> None:
    """Let Trainer resume: it reads a checkpoint's config as one of no family, which fails on both serializations."""

    def read(original: Callable[..., Any], cls: Any, json_file: Any) -> Any:
        if cls is module.PreTrainedConfig:
            values = cls._dict_from_json_file(json_file)
            if "rope_parameters" in values and "rope_scaling" in values:
                return cls(**{key: value for key, value in values.items() if key not in ("rope_scaling", "rope_theta")})
        return original(cls, json_file)

    _wrap(module.PreTrainedConfig, "from_json_file", read)


def _apply(model: PreTrainedModel, manifest: dict[str, Any], folder: Path) -> None:
    """Patch a model that plain Transformers loaded with what only its manifest says."""
    from hf_posenc.checkpoint import add_to_config
    from hf_posenc.manifest import MANIFEST
    from hf_posenc.patching import is_patched

    if is_patched(model):  # by its adapter
        return
    try:
        add_to_config(model, manifest)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        # Transformers has loaded the weights, which someone may want as they are.
        what = str(manifest.get("method"))
        logger.warning("%s: %s, which %s says, was NOT put in: %s", folder, what, MANIFEST, error)
        return
    if is_patched(model):
        _say_put_in(manifest, folder)


def _find_manifest(source: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Path] | None:
    """Return the manifest beside a checkpoint and its folder, local or on the Hub; None if there is none."""
    from hf_posenc.manifest import MANIFEST, read_manifest

    folder = Path(str(source)).expanduser() / (kwargs.get("subfolder") or "")
    if not Path(str(source)).expanduser().is_dir():
        from transformers.utils.hub import cached_file

        where = {
            key: kwargs[key]
            for key in ("revision", "token", "cache_dir", "subfolder", "local_files_only")
            if kwargs.get(key)
        }
        quietly = {f"_raise_exceptions_for_{what}": False for what in _NO_ERRORS_FOR}
        try:
            found = cached_file(str(source), MANIFEST, **where, **quietly)
        except (OSError, ValueError):  # no name on the Hub
            found = None
        if found is None:
            return None
        folder = Path(found).parent
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        logger.warning("%s. If the checkpoint needs it, it is read as another model.", str(error).rstrip("."))
        return None
    return None if manifest is None else (manifest, folder)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put ``around(original, *args, **kwargs)`` in the place of a method or class method."""
    there = owner.__dict__[name]
    original = there.__func__ if isinstance(there, classmethod) else there

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, classmethod(wrapper) if isinstance(there, classmethod) else wrapper)
