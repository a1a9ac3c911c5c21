"""A model by a name on the Hub, a folder (plain, extended, an adapter's) or a ``.gguf`` file, or without data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_posenc.checkpoint.extended import TOKENIZER_CONFIG, load_extended
from hf_posenc.checkpoint.manifest import (
    ADAPTER_CONFIG,
    CONFIG,
    MANIFEST,
    base_of_adapter,
    find_manifest,
    is_encoding,
    is_saved_by_us,
)
from hf_posenc.checkpoint.pretrained import (
    check_may_read,
    folder_with,
    is_gguf,
    load_tokenizer,
    load_weights,
    refuse_gguf_scaling,
    refuse_without_tokens,
)
from hf_posenc.checkpoint.quantised import in_4bit
from hf_posenc.errors import InvalidRequestError, MissingFileError, MissingPackageError, first_line
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.extension import mark_on, rule_is_elsewhere
from hf_posenc.patching.lengths import MARK
from hf_posenc.utils.console import without_weight_bars
from hf_posenc.utils.dtypes import (
    DtypeChoice,
    checkpoint_dtype,
    choose_dtype,
    config_dtype,
    parse_dtype,
    remember_choice,
)
from hf_posenc.utils.hub import is_path
from hf_posenc.utils.launching import own_device


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    load_in_4bit: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, in evaluation mode.

    A folder written by ``save_extended`` comes back extended, an adapter on its base model. Weights are read from
    safetensors only, and a checkpoint's own Python code is not run. Those of a ``.gguf`` file are dequantised.

    Args:
        name_or_path: What ``from_pretrained`` takes, or the path of a ``.gguf`` file.
        dtype: ``"auto"`` for what the hardware computes natively (see ``choose_dtype``; float32 for ``.gguf``),
            ``"checkpoint"`` for the checkpoint's own, or a name such as ``"bfloat16"``. A model that ``"auto"`` loads
            in float32 is saved in the checkpoint's dtype.
        device: Where to put the model; None for a GPU if there is one; ``"auto"`` spreads it over all.
        attn_implementation: ``"sdpa"``, ``"flash_attention_2"``, ``"eager"``; None lets Transformers choose.
        load_in_4bit: Quantise linear layers to NF4, nested, by bitsandbytes; they compute in ``dtype``.

    Raises:
        FileNotFoundError: The path, or the ``config.json`` in it, does not exist.
        ValueError: The Hub has no such model, it cannot be read, or a ``.gguf`` declares a scaling that
            Transformers drops, or weights are missing; or the device is unknown or not there.
        ImportError: A package that reads the model (``.gguf``, quantised) or the requested attention is not installed.
    """
    path = Path(name_or_path).expanduser()
    parse_dtype(dtype)  # a wrong name is an error before anything is read
    kwargs: dict[str, Any] = {}
    if attn_implementation is not None:
        kwargs["attn_implementation"] = attn_implementation
    if device == "auto":
        kwargs["device_map"] = "auto"
    else:
        if load_in_4bit and not isinstance(device, torch.device):
            device = own_device(device)  # it cannot be moved later
        device = to_device(device)
    check_path(path, str(name_or_path))
    try:
        source = str(path if path.exists() else name_or_path)
        choice = choose_dtype_of(source, dtype, device)
        kwargs["dtype"] = choice.dtype
        if load_in_4bit:
            if choice.checkpoint is None:
                raise InvalidRequestError(f"{source!r} holds quantised weights already: leave --load-in-4bit out.")
            kwargs |= in_4bit(choice.dtype)
            kwargs.setdefault("device_map", {"": device})
        if (weights := weights_source(source)) is not None:
            refuse_without_tokens(weights)
        with without_weight_bars():
            saved_by_us = is_saved_by_us(source)
            model = (load_extended if saved_by_us else load_weights)(source, **kwargs)
        if not saved_by_us:
            _refuse_lost_rule(source, model)
        remember_choice(RotaryModel(model).model, choice)
        tokenizer = load_tokenizer(tokenizer_source(source), model)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot load {str(name_or_path)!r}: {first_line(error)} "
            "Give a name on the Hugging Face Hub, a folder with config.json and *.safetensors, or a .gguf file."
        ) from error
    except ImportError as error:  # Transformers' own, for FlashAttention and quantised models, name what is missing
        raise MissingPackageError(f"cannot load {str(name_or_path)!r}: {str(error).strip()}") from error
    if device != "auto" and not load_in_4bit:  # which are where they were quantised
        model.to(device)  # type: ignore[arg-type]  # mypy takes Transformers' wrapper for a plain function
    model.train(False)
    return model, tokenizer


def _refuse_lost_rule(source: str, model: PreTrainedModel) -> None:
    """Raise for a model that says that it was extended by a rule that no config can hold, and has no manifest.

    Raises:
        ValueError: It would be read as the base model.
    """
    mark = mark_on(RotaryModel(model).text_config)
    if mark is not None and rule_is_elsewhere(mark):
        raise InvalidRequestError(
            f"{source!r}: its config says that it was extended by {mark['method']} to {mark['context_length']} tokens, "
            f"and {MANIFEST}, which holds the rule, is not there. Get that file too; or, if the model is not extended "
            f"any more, remove {MARK} from its {CONFIG}."
        )


def choose_dtype_of(source: str | Path, dtype: str | torch.dtype, device: str | torch.device | None) -> DtypeChoice:
    """Return the dtype in which a model of a name, folder or ``.gguf`` file computes; see ``choose_dtype``.

    Raises:
        OSError: There is no config.
        ValueError: An unknown dtype.
    """
    weights = weights_source(source)
    readable = weights is not None and not is_gguf(weights)
    return choose_dtype(dtype, checkpoint_dtype(str(weights)) if readable else None, device)


def weights_source(source: str | Path) -> str | None:
    """Return the source of the weights: of an adapter's folder the base model, None if it does not name one."""
    base = base_of_adapter(source)
    return str(source) if base is None else base or None


def to_device(device: str | torch.device | None) -> torch.device:
    """Return the device to use, tried out: a wrong one would show only after minutes of loading."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(1, device=resolved)
    # AssertionError: PyTorch without that backend. ImportError: a backend that is a package of its own.
    except (RuntimeError, AssertionError, ImportError) as error:
        there = "auto, cpu, cuda" if torch.cuda.is_available() else "auto, cpu (PyTorch sees no GPU)"
        raise InvalidRequestError(
            f"device {str(device)!r} cannot be used here. Allowed: {there}. ({first_line(error)})"
        ) from error
    return resolved


def read_config(source: str | Path) -> PreTrainedConfig:
    """Return the config of a folder, a name on the Hub or a ``.gguf`` file; no weights are read.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: There is no config, a ``.gguf`` is scaled, or the folder is that of an adapter.
    """
    path = Path(source).expanduser()
    check_path(path, str(source))
    if folder_with(source, (ADAPTER_CONFIG,)) is not None and folder_with(source, (CONFIG,)) is None:
        raise InvalidRequestError(f"{str(source)!r} is an adapter. Plan for its base model, with --lora.")
    manifest_in_folder = find_manifest(source)
    if manifest_in_folder is not None and is_encoding(manifest := manifest_in_folder[0]):
        raise InvalidRequestError(
            f"{str(source)!r} was trained with {manifest['method']} instead of RoPE, so it has nothing to extend. "
            "Give a model with RoPE."
        )
    try:
        if is_gguf(path):
            refuse_gguf_scaling(path)
            config: PreTrainedConfig = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        else:
            config = AutoConfig.from_pretrained(path if path.exists() else str(source))
    except OSError as error:
        raise InvalidRequestError(
            f"cannot read the config of {str(source)!r}: {first_line(error)} "
            "Give a name on the Hugging Face Hub, a folder with config.json, or a .gguf file."
        ) from error
    return config


def read_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer without the model: what a text is refused for is said before weights are loaded.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: There is no tokenizer.
    """
    path = Path(name_or_path).expanduser()
    check_path(path, str(name_or_path))
    try:
        return load_tokenizer(tokenizer_source(str(path if path.exists() else name_or_path)))
    except OSError as error:
        raise InvalidRequestError(
            f"the tokenizer of {str(name_or_path)!r} cannot be loaded: {first_line(error)}"
        ) from error


def meta_model(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, attention: str | None = None
) -> PreTrainedModel:
    """Return a model on the meta device, whose tensors have a shape and no data; ``dtype`` is the checkpoint's.

    ``attention`` is its ``attn_implementation``; None leaves that to the config and to Transformers.
    """
    settings = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
            copy.deepcopy(config), dtype=dtype or config_dtype(config), **settings
        )
        model.tie_weights()  # Transformers 5.0 does not on this device
    return model


def check_path(path: Path, given: str) -> None:
    """Say what is wrong with a path before Transformers asks the Hub for it."""
    if path.is_dir():
        if not (path / CONFIG).is_file() and not (path / ADAPTER_CONFIG).is_file():
            file_names = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
            raise MissingFileError(
                f"folder {given!r} has no {CONFIG}, so it is no Transformers checkpoint; it holds {file_names}."
            )
    elif path.is_file():
        if path.suffix != ".gguf":
            raise InvalidRequestError(
                f"{given!r} is a file. Give the folder it is in; only .gguf files are read alone."
            )
    elif is_path(given):
        raise MissingFileError(f"there is no {'file' if path.suffix else 'file or folder'} {given!r}.")
    elif not constants.HF_HUB_OFFLINE:
        check_may_read(given, {})


def tokenizer_source(source: str) -> str:
    """Return the source, or for an adapter saved without a tokenizer, its base model."""
    return source if folder_with(source, (TOKENIZER_CONFIG,)) is not None else weights_source(source) or source
