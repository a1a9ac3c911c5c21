"""What a model is, from its config alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_posenc.checkpoint.hub_files import folder_with
from hf_posenc.checkpoint.loading import check_path
from hf_posenc.checkpoint.manifest import ADAPTER_CONFIG, CONFIG, find_manifest, is_encoding, read_manifest
from hf_posenc.checkpoint.pretrained import is_gguf, refuse_gguf_scaling
from hf_posenc.errors import InvalidRequestError
from hf_posenc.families.discovery import head_dim_of
from hf_posenc.patching.extension import describe_config
from hf_posenc.patching.presets import known_checkpoint
from hf_posenc.planning.shapes import (
    fill_with_fake,
    layer_repeat,
    meta_model,
    traced_repeats,
    with_layers,
    without_data,
)
from hf_posenc.utils.dtypes import config_dtype

_WINDOWED = ("sliding_attention", "chunked_attention")
_ATTENDING = ("full_attention", *_WINDOWED)


@dataclass(frozen=True)
class ModelFacts:
    """What a plan needs to know of a model.

    Attributes:
        name: As it was given.
        model_type: The family.
        parameters: All of them.
        weight_bytes: Of the weights, in ``dtype``.
        matrix_parameters: Those that multiply each token: not the embedding, of experts those a token sees.
        head_parameters: Those of them that make logits.
        num_layers, hidden_size, num_heads, num_kv_heads, head_dim, vocab_size: Of the text model.
        windows: For each layer that attends, the tokens it looks back; None for all.
        original: Tokens it was trained on before it was scaled; None if nothing says.
        reads: Tokens it reads as it is: what it was trained on, or where its scaling goes.
        method: The scaling it has, ``"none"`` for none.
        factor: Of that scaling.
        dtype: What they are loaded in: the checkpoint's, or another that the plan counts with.
    """

    name: str
    model_type: str
    parameters: int
    weight_bytes: int
    matrix_parameters: int
    head_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int | None, ...]
    original: int | None
    reads: int
    method: str
    factor: float
    dtype: str


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
    found = find_manifest(source)
    if found is not None and is_encoding(manifest := found[0]):
        raise InvalidRequestError(
            f"{str(source)!r} was trained with {manifest['method']} in place of RoPE: there is nothing to extend. "
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
            f"cannot read the config of {str(source)!r}: {str(error).strip().splitlines()[0]} "
            "Give a name on the Hugging Face Hub, a folder with config.json, or a .gguf file."
        ) from error
    return config


def model_facts(config: PreTrainedConfig, name: str, original: int | None = None) -> ModelFacts:
    """Read a config, and count on a model without data.

    Args:
        config: The model's, as ``read_config`` returns it.
        name: As it was given: a folder's manifest, or what is known of a published checkpoint, comes before the config.
        original: Tokens it was trained on, where the caller knows better.
    """
    text = config.get_text_config(decoder=True)
    model = meta_model(config)
    there = read_manifest(Path(name).expanduser()) or describe_config(config)
    known = known_checkpoint(name)
    trained = known.trained_length if known is not None else there["original_max_position_embeddings"]
    start = original or trained
    heads = int(text.num_attention_heads)
    head = text.vocab_size * text.hidden_size
    return ModelFacts(
        name=name,
        model_type=str(text.model_type),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        matrix_parameters=_matrix_parameters(model),
        head_parameters=int(head),
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        num_heads=heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=head_dim_of(text),
        vocab_size=int(text.vocab_size),
        windows=_windows(text),
        original=start,
        reads=int(there["context_length"] if there["method"] != "none" or start is None else start),
        method=str(there["method"]),
        factor=float(there["factor"]),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _matrix_parameters(model: PreTrainedModel) -> int:
    """Count what each token is multiplied by: matrices; of experts, the share that one token is sent to."""
    text = model.config.get_text_config(decoder=True)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    counted = 0.0
    for name, parameter in model.named_parameters():
        tied = head is not None and parameter is head.weight
        if parameter.dim() >= 2 and (tied or parameter is not embedding.weight):
            counted += parameter.numel() * (_share_of_experts(text) if ".experts." in name else 1.0)
    return round(counted)


def _share_of_experts(text: PreTrainedConfig) -> float:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((getattr(text, name) for name in names if getattr(text, name, None)), 1)
    return min((getattr(text, "num_experts_per_tok", None) or experts) / experts, 1.0)


def _windows(text: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return the tokens each attending layer looks back; None for all."""
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    types = getattr(text, "layer_types", None)
    if not types:
        return (window or None,) * int(text.num_hidden_layers)
    return tuple(window if kind in _WINDOWED else None for kind in types if kind in _ATTENDING)


@dataclass(frozen=True)
class KvCache:
    """Bytes of the cache of one sequence.

    Attributes:
        fixed: Of layers whose window is full, and of states that do not grow.
        per_token: Of all other layers, for each token.
    """

    fixed: float
    per_token: float

    def at(self, num_tokens: int) -> int:
        """Return the bytes for a length, from the longest window on."""
        return round(self.fixed + self.per_token * num_tokens)


def kv_cache(config: PreTrainedConfig, num_tokens: int) -> KvCache:
    """Return what Transformers' own cache of one sequence takes, in the config's dtype.

    The cache is filled by a model without data, so windows, latent attention and layers that keep no keys count as
    they are. Of deep models a few layers are run (``traced_repeats``).
    """
    layers, repeat = int(config.get_text_config(decoder=True).num_hidden_layers), layer_repeat(config)
    if layers <= 3 * repeat:
        return _cache(config, num_tokens)
    traced = traced_repeats(repeat)
    few, more = (_cache(with_layers(config, times * repeat), num_tokens) for times in traced)
    times = layers / repeat - traced[0]
    return KvCache(
        few.fixed + times * (more.fixed - few.fixed), few.per_token + times * (more.per_token - few.per_token)
    )


@torch.no_grad()
def _cache(config: PreTrainedConfig, num_tokens: int) -> KvCache:
    model = meta_model(config, torch.bfloat16)  # which all experts can do; the dtype counts afterwards
    model.train(False)
    with without_data(config):
        fill_with_fake(model)
        cache = DynamicCache(config=config.get_text_config(decoder=True))
        ids = torch.zeros(1, num_tokens, dtype=torch.int64)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    held = (value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor))
    shapes, number = [tensor.shape for tensor in held if tensor.dim() > 2], config_dtype(config).itemsize
    grows = [shape for shape in shapes if shape[-2] == num_tokens]
    fixed = [shape for shape in shapes if shape[-2] != num_tokens]
    return KvCache(number * sum(map(math.prod, fixed)), number * sum(map(math.prod, grows)) / num_tokens)
