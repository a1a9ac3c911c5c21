"""One door for models: a name on the Hub, a folder (plain, extended or an adapter's), or a ``.gguf`` file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.checkpoint import ADAPTER_CONFIG, MANIFEST, load_extended
from hf_posenc.pretrained import load_tokenizer, load_weights


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, in evaluation mode.

    A folder written by ``save_extended`` comes back extended. Weights are read from safetensors only, and a
    checkpoint's own Python code is not run. The weights of a ``.gguf`` file are dequantised.

    Args:
        name_or_path: What ``from_pretrained`` takes, or the path of a ``.gguf`` file.
        dtype: ``"auto"`` for the checkpoint's own (float32 for ``.gguf``), or a name such as ``"bfloat16"``.
        device: Where to put the model; None for a GPU if there is one; ``"auto"`` spreads it over all.
        attn_implementation: ``"sdpa"``, ``"flash_attention_2"``, ``"eager"``; None lets Transformers choose.

    Raises:
        FileNotFoundError: The path, or the ``config.json`` in it, does not exist.
        ValueError: The Hub has no such model, it cannot be read, or a ``.gguf`` declares a scaling that
            Transformers drops, or weights are missing; or the device is unknown or not there.
        ImportError: A package that reads the model (``.gguf``, quantised) or the attention asked for is not installed.
    """
    path = Path(name_or_path).expanduser()
    kwargs: dict[str, Any] = {"dtype": to_dtype(dtype)}
    if attn_implementation is not None:
        kwargs["attn_implementation"] = attn_implementation
    if device == "auto":
        kwargs["device_map"] = "auto"
    else:
        device = to_device(device)
    check_path(path, str(name_or_path))
    try:
        source = str(path if path.exists() else name_or_path)
        model = load_extended(path, **kwargs) if (path / MANIFEST).is_file() else load_weights(source, **kwargs)
        tokenizer = load_tokenizer(tokenizer_source(path, source), model)
    except OSError as error:
        raise ValueError(
            f"cannot load {str(name_or_path)!r}: {str(error).strip().splitlines()[0]} "
            "Give a name on the Hugging Face Hub, a folder with config.json and *.safetensors, or a .gguf file."
        ) from error
    except ImportError as error:  # Transformers' own, for FlashAttention and quantised models, name what is missing
        raise ImportError(f"cannot load {str(name_or_path)!r}: {str(error).strip()}") from error
    if device != "auto":
        model.to(device)  # type: ignore[arg-type]  # mypy takes it for an unbound method
    model.train(False)
    return model, tokenizer


def to_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return the dtype of a name; ``"auto"`` stays.

    Raises:
        ValueError: PyTorch has no floating-point type of that name.
    """
    if not isinstance(dtype, str) or dtype == "auto":
        return dtype
    resolved = getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ValueError(f"unknown dtype {dtype!r}. Known: auto, float32, bfloat16, float16.")
    return resolved


def to_device(device: str | torch.device | None) -> torch.device:
    """Return the device to use, tried out: a wrong one would show only after minutes of loading."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(1, device=resolved)
    # AssertionError: PyTorch without that backend. ImportError: a backend that is a package of its own.
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        there = "auto, cpu, cuda" if torch.cuda.is_available() else "auto, cpu (PyTorch sees no GPU)"
        raise ValueError(f"device {str(device)!r} cannot be used here. Allowed: {there}. ({reason})") from error
    return resolved


def check_path(path: Path, given: str) -> None:
    """Say what is wrong with a path before Transformers asks the Hub for it."""
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / ADAPTER_CONFIG).is_file():
            found = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
            raise FileNotFoundError(
                f"folder {given!r} has no config.json, so it is no Transformers checkpoint; it holds {found}."
            )
    elif path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{given!r} is a file. Give the folder it is in; only .gguf files are read alone.")
    elif path.suffix == ".gguf" or given[:1] in "./~" or given.count("/") > 1:
        raise FileNotFoundError(f"there is no {'file' if path.suffix else 'file or folder'} {given!r}.")


def tokenizer_source(path: Path, source: str) -> str:
    """Return the source, or for an adapter saved without a tokenizer, its base model."""
    if (path / ADAPTER_CONFIG).is_file() and not (path / "tokenizer_config.json").is_file():
        return str(json.loads((path / ADAPTER_CONFIG).read_text())["base_model_name_or_path"])
    return source
