"""One door for models: a name on the Hub, a folder (plain, extended or an adapter's), or a ``.gguf`` file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.checkpoint import ADAPTER_CONFIG, MANIFEST, load_extended

# llama.cpp writes Llama 3.1's and LongRoPE's divisors as tensors, not as metadata.
_SCALING_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


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
            Transformers drops, or weights are missing.
        ImportError: A ``.gguf`` file, and the package that reads it is not installed.
    """
    path = Path(name_or_path).expanduser()
    kwargs: dict[str, Any] = {"dtype": _dtype(dtype)}
    if attn_implementation is not None:
        kwargs["attn_implementation"] = attn_implementation
    if device == "auto":
        kwargs["device_map"] = "auto"
    elif device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _check_path(path, str(name_or_path))
    try:
        if path.is_file():
            model, tokenizer = _load_gguf(path, kwargs)
        elif path.is_dir():
            model, tokenizer = _load_folder(path, kwargs)
        else:
            model = _from_pretrained(str(name_or_path), use_safetensors=True, **kwargs)
            tokenizer = AutoTokenizer.from_pretrained(str(name_or_path))
    except OSError as error:
        raise ValueError(
            f"cannot load {str(name_or_path)!r}: {str(error).strip().splitlines()[0]} "
            "Give a name on the Hugging Face Hub, a folder with config.json and *.safetensors, or a .gguf file."
        ) from error
    if device != "auto":
        model.to(device)  # type: ignore[arg-type]  # mypy takes it for an unbound method
    model.train(False)
    return model, tokenizer


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if not isinstance(dtype, str) or dtype == "auto":
        return dtype
    resolved = getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ValueError(f"unknown dtype {dtype!r}. Known: auto, float32, bfloat16, float16.")
    return resolved


def _check_path(path: Path, given: str) -> None:
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


def _from_pretrained(source: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load weights; Transformers makes up those that are missing, with a log line, which is no use here."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **kwargs)
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{str(source)!r} lacks {len(missing)} of the model's weights, such as {missing[0]}. "
            "The download or the conversion is incomplete: get it again."
        )
    return model  # type: ignore[no-any-return]


def _load_folder(path: Path, kwargs: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if (path / MANIFEST).is_file():
        model = load_extended(path, **kwargs)
    else:
        model = _from_pretrained(path, use_safetensors=True, **kwargs)
    return model, AutoTokenizer.from_pretrained(_tokenizer_source(path))


def _tokenizer_source(path: Path) -> str:
    """Return the folder, or for an adapter saved without a tokenizer, its base model."""
    if (path / ADAPTER_CONFIG).is_file() and not (path / "tokenizer_config.json").is_file():
        return str(json.loads((path / ADAPTER_CONFIG).read_text())["base_model_name_or_path"])
    return str(path)


def _load_gguf(path: Path, kwargs: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    refuse_gguf_scaling(path)
    from transformers import GgufConfig

    if kwargs["dtype"] == "auto":
        kwargs = {**kwargs, "dtype": torch.float32}  # the weights' scales are float16 times small integers
    kwargs = {**kwargs, "quantization_config": GgufConfig(dequantize=True)}
    model: Any = _from_pretrained(path.parent, gguf_file=path.name, **kwargs)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # The weights are plain tensors now; with these marks left, save_pretrained and training refuse.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if tokenizer.model_max_length > 1e9:  # Transformers' word for "unknown"
        tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
    return model, tokenizer


def refuse_gguf_scaling(path: Path) -> None:
    """Raise if a ``.gguf`` file declares a RoPE scaling: Transformers 5.23 drops it for all but gpt-oss.

    Raises:
        ImportError: The gguf package is not installed.
        ValueError: It is scaled, or is no GGUF file.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError("reading a .gguf file needs more packages: pip install 'hf_posenc[smollm2]'") from error
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{str(path)!r} is not a GGUF file: {error}") from error
    declared = {
        name.split(".rope.scaling.")[1]: field.contents()
        for name, field in reader.fields.items()
        if ".rope.scaling." in name
    }
    scaled = declared.get("type", "none") != "none" or declared.get("factor", 1.0) not in (0.0, 1.0)
    tensors = [tensor.name for tensor in reader.tensors if tensor.name in _SCALING_TENSORS]
    if scaled or tensors:
        what = ", ".join([*(f"{key}={value}" for key, value in declared.items()), *tensors])
        raise ValueError(
            f"{path.name} has scaled rotary positions ({what}), which Transformers would silently drop. "
            "Use the original safetensors checkpoint instead."
        )
