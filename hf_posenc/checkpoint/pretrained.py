"""Weights and tokenizers from a name on the Hub, a folder or a ``.gguf`` file, before anything is extended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_posenc.checkpoint.standard_saving import plain_loading
from hf_posenc.errors import InvalidRequestError, MissingPackageError
from hf_posenc.families.rotary_model import RotaryModel

# llama.cpp writes Llama 3.1's and LongRoPE's divisors as tensors, not as metadata.
_SCALING_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def is_gguf(source: str | Path) -> bool:
    """Return whether a model's name is that of a ``.gguf`` file."""
    return str(source).endswith(".gguf")


def load_weights(source: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a causal language model as its checkpoint says, from safetensors or a ``.gguf`` file only.

    Args:
        source: What ``from_pretrained`` takes, or the path of a ``.gguf`` file, whose weights are dequantised.
        **kwargs: ``from_pretrained``'s.

    Raises:
        ValueError: Weights are missing or damaged, or a ``.gguf`` is scaled (see ``refuse_gguf_scaling``).
        ImportError: A ``.gguf`` file, and the package that reads it is not installed.
    """
    if is_gguf(source):
        return _load_gguf(Path(source), kwargs)
    return _from_pretrained(source, **{"use_safetensors": True, **kwargs})


@contextmanager
def expecting_keys(pattern: str) -> Iterator[None]:
    """While open, Transformers does not report weights of such names, which no class of its own has."""
    before = PreTrainedModel._keys_to_ignore_on_load_unexpected
    PreTrainedModel._keys_to_ignore_on_load_unexpected = [*(before or ()), pattern]
    try:
        yield
    finally:
        PreTrainedModel._keys_to_ignore_on_load_unexpected = before


def load_tokenizer(source: str | Path, model: PreTrainedModel | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is with a model; one that does not know its length gets that of the model, if given."""
    if not is_gguf(source):
        # The config at hand: that of a model with another encoding than RoPE, read again, would be complained of.
        return AutoTokenizer.from_pretrained(str(source), **({} if model is None else {"config": model.config}))
    path = Path(source)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if model is not None and tokenizer.model_max_length > 1e9:  # Transformers' word for "unknown"
        tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
    return tokenizer


def _from_pretrained(source: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load weights; Transformers makes up those that are missing, with a log line, which is no use here."""
    try:
        with plain_loading():
            loaded: Any = auto_class(source, kwargs).from_pretrained(source, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise InvalidRequestError(
            f"the weights of {str(source)!r} cannot be read ({error}): a file is damaged or was cut off. Get it again."
        ) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise InvalidRequestError(
            f"{str(source)!r} lacks {len(missing)} of the model's weights, such as {missing[0]}. "
            "The download or the conversion is incomplete: get it again."
        )
    return model  # type: ignore[no-any-return]  # from_pretrained is untyped


def auto_class(source: str | Path, kwargs: dict[str, Any]) -> Any:
    """Return what loads a checkpoint as the class that was saved: a classifier with its head, a vision tower with it.

    Args:
        source: What ``from_pretrained`` takes.
        kwargs: ``from_pretrained``'s; a ``config`` in them is taken instead of the checkpoint's.

    Returns:
        An auto class for models that predict tokens, else the class itself.
    """
    if "gguf_file" in kwargs:
        return AutoModelForCausalLM
    where = {key: kwargs[key] for key in ("revision", "token", "cache_dir", "subfolder") if key in kwargs}
    config = kwargs.get("config") or AutoConfig.from_pretrained(source, **where)
    named = (getattr(config, "architectures", None) or [None])[0]
    if named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return AutoModelForCausalLM
    if named in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        return AutoModelForImageTextToText
    return model_class(named) or AutoModelForCausalLM


def auto_class_of(model: PreTrainedModel) -> str:
    """Return the name of the auto class that loads a model of this class."""
    name = type(RotaryModel(model).model).__name__.removeprefix("FSDP")
    causal = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    is_multimodal = not causal and name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    return "AutoModelForImageTextToText" if is_multimodal else "AutoModelForCausalLM"


def model_class(name: str | None) -> type[PreTrainedModel] | None:
    """Return Transformers' model class of a name; None if it has none."""
    found = getattr(transformers, name, None) if name else None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def refuse_without_tokens(source: str | Path) -> None:
    """Refuse a checkpoint that predicts no tokens, before its weights are loaded.

    Raises:
        OSError: There is no config.
        ValueError: It is a classifier, a reward model, a bare decoder or the like.
    """
    if is_gguf(source):
        return
    found = auto_class(source, {})
    if found not in (AutoModelForCausalLM, AutoModelForImageTextToText):
        raise InvalidRequestError(
            f"{str(source)!r} holds a {found.__name__}, which predicts no tokens, so there is no perplexity, no text "
            "and no training on text. Give a causal language model; load_extended loads this one."
        )


def _load_gguf(path: Path, kwargs: dict[str, Any]) -> PreTrainedModel:
    refuse_gguf_scaling(path)
    if kwargs.get("dtype", "auto") == "auto":
        kwargs = {**kwargs, "dtype": torch.float32}  # the weights' scales are float16 times small integers
    if hasattr(transformers, "GgufConfig"):  # 5.0 has none: it always dequantises
        kwargs = {**kwargs, "quantization_config": transformers.GgufConfig(dequantize=True)}
    model: Any = _from_pretrained(path.parent, gguf_file=path.name, **kwargs)
    # The weights are plain tensors now; with these marks left, save_pretrained and training refuse.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.name_or_path = model.config._name_or_path = str(path)  # not the folder: adapters and results name their base
    return model  # type: ignore[no-any-return]  # from_pretrained is untyped


def gguf_rope(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what a ``.gguf`` file declares under ``rope.scaling.``, and the names of its tensors of divisors.

    Raises:
        ImportError: The gguf package is not installed.
        ValueError: It is no GGUF file.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingPackageError(
            "reading a .gguf file needs more packages: pip install 'hf_posenc[smollm2]'"
        ) from error
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise InvalidRequestError(f"{str(path)!r} is not a GGUF file: {error}") from error
    declared = {
        name.split(".rope.scaling.")[1]: field.contents()
        for name, field in reader.fields.items()
        if ".rope.scaling." in name
    }
    return declared, [tensor.name for tensor in reader.tensors if tensor.name in _SCALING_TENSORS]


def refuse_gguf_scaling(path: Path) -> None:
    """Raise if a ``.gguf`` file declares a RoPE scaling: Transformers 5.23 drops it for all but gpt-oss.

    Raises:
        ImportError: The gguf package is not installed.
        ValueError: It is scaled, or is no GGUF file.
    """
    declared, tensors = gguf_rope(path)
    scaled = declared.get("type", "none") != "none" or declared.get("factor", 1.0) not in (0.0, 1.0)
    if scaled or tensors:
        what = ", ".join([*(f"{key}={value}" for key, value in declared.items()), *tensors])
        raise InvalidRequestError(
            f"{path.name} has scaled rotary positions ({what}), which Transformers would silently drop. "
            "Use the original safetensors checkpoint instead."
        )
