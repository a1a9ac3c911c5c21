"""One door for models: a name on the Hub, a folder (plain, extended or an adapter's), or a ``.gguf`` file."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.checkpoint import ADAPTER_CONFIG, load_extended
from hf_posenc.launching import own_device
from hf_posenc.manifest import MANIFEST
from hf_posenc.pretrained import is_gguf, load_tokenizer, load_weights


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    load_in_4bit: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, in evaluation mode.

    A folder written by ``save_extended`` comes back extended. Weights are read from safetensors only, and a
    checkpoint's own Python code is not run. The weights of a ``.gguf`` file are dequantised.

    Args:
        name_or_path: What ``from_pretrained`` takes, or the path of a ``.gguf`` file.
        dtype: ``"auto"`` for the checkpoint's own (float32 for ``.gguf``), or a name such as ``"bfloat16"``.
        device: Where to put the model; None for a GPU if there is one; ``"auto"`` spreads it over all.
        attn_implementation: ``"sdpa"``, ``"flash_attention_2"``, ``"eager"``; None lets Transformers choose.
        load_in_4bit: Quantise linear layers to NF4, nested, by bitsandbytes; they compute in ``dtype``.

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
        if load_in_4bit and not isinstance(device, torch.device):
            device = own_device(device)  # it cannot be moved later
        device = to_device(device)
    check_path(path, str(name_or_path))
    try:
        source = str(path if path.exists() else name_or_path)
        if load_in_4bit:
            kwargs |= _in_4bit(path, source, kwargs["dtype"])
            kwargs.setdefault("device_map", {"": device})
        model = load_extended(path, **kwargs) if (path / MANIFEST).is_file() else load_weights(source, **kwargs)
        tokenizer = load_tokenizer(tokenizer_source(path, source), model)
    except OSError as error:
        raise ValueError(
            f"cannot load {str(name_or_path)!r}: {str(error).strip().splitlines()[0]} "
            "Give a name on the Hugging Face Hub, a folder with config.json and *.safetensors, or a .gguf file."
        ) from error
    except ImportError as error:  # Transformers' own, for FlashAttention and quantised models, name what is missing
        raise ImportError(f"cannot load {str(name_or_path)!r}: {str(error).strip()}") from error
    if device != "auto" and not load_in_4bit:  # which are where they were quantised
        model.to(device)  # type: ignore[arg-type]  # mypy takes it for an unbound method
    model.train(False)
    return model, tokenizer


def check_4bit(name_or_path: str | Path, lora: bool) -> None:
    """Refuse what 4-bit weights cannot be, before texts are read and weights are loaded.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: No adapters are to be trained, or the model is a ``.gguf`` file.
    """
    if find_spec("bitsandbytes") is None:
        raise ImportError("--load-in-4bit needs a package that is not installed: pip install bitsandbytes")
    if not lora:
        raise ValueError("--load-in-4bit: weights in 4 bits cannot be trained. Train adapters on them: add --lora.")
    if is_gguf(name_or_path):
        raise ValueError("--load-in-4bit: a .gguf file is dequantised when it is loaded. Give a checkpoint's folder.")


def _in_4bit(path: Path, source: str, dtype: str | torch.dtype) -> dict[str, Any]:
    """Return what ``from_pretrained`` is told to quantise as QLoRA does (arXiv:2305.14314, section 3)."""
    base = source
    if (path / ADAPTER_CONFIG).is_file():
        base = str(json.loads((path / ADAPTER_CONFIG).read_text())["base_model_name_or_path"])
    config = AutoConfig.from_pretrained(base)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{base!r} holds quantised weights already: leave --load-in-4bit out.")
    compute = dtype if isinstance(dtype, torch.dtype) else config.get_text_config().dtype or torch.float32
    settings = BitsAndBytesConfig(  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    return {"quantization_config": settings}


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
