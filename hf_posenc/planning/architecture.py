"""The facts of a model, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.families.discovery import head_dim_of
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.unmasked_layers import unmasked_layers
from hf_posenc.patching.extension import describe_config
from hf_posenc.planning.shapes import text_config
from hf_posenc.training.lora import attention_modules

_WINDOWED = ("sliding_attention", "chunked_attention")
_ATTENDING = ("full_attention", *_WINDOWED)


@dataclass(frozen=True)
class Architecture:
    """The facts of a model that a plan needs.

    Attributes:
        name: As it was given.
        model_type: The family.
        parameters: All of them.
        weight_bytes: Bytes of the weights, in ``dtype``.
        matrix_parameters: Those that multiply each token: not the embedding, of experts those a token sees.
        head_parameters: Those of them that make logits.
        attention_parameters: Those of them inside attention modules.
        num_layers, hidden_size, num_heads, num_kv_heads, head_dim, vocab_size: Sizes of the text model.
        windows: For each layer that attends, the tokens it looks back; None for all.
        original: Tokens it was trained on before it was scaled; None if nothing says.
        reads: Tokens it reads as it is: what it was trained on, or where its scaling goes.
        method: The scaling it has, ``"none"`` for none.
        factor: Factor of that scaling.
        dtype: What they are loaded in: the checkpoint's, or another that the plan counts with.
        unmasked: Layers that no mask keeps packed documents apart in, by kind (``unmasked_layers``).
    """

    name: str
    model_type: str
    parameters: int
    weight_bytes: int
    matrix_parameters: int
    head_parameters: int
    attention_parameters: int
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
    unmasked: Mapping[str, int]


def read_architecture(config: PreTrainedConfig, name: str, original: int | None = None) -> Architecture:
    """Read a config, and count on a model without data.

    Args:
        config: The model's, as ``read_config`` returns it.
        name: As it was given; a folder's manifest comes before the config.
        original: Tokens it was trained on, where the caller knows better.
    """
    text, model = text_config(config), meta_model(config)
    declared = declared_extension(config, name)
    original = original or declared["original_max_position_embeddings"]
    heads = int(text.num_attention_heads)
    return Architecture(
        name=name,
        model_type=str(text.model_type),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        matrix_parameters=_matrix_parameters(model, text),
        attention_parameters=sum(p.numel() for part in attention_modules(model) for p in part.parameters()),
        head_parameters=int(text.vocab_size * text.hidden_size),
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        num_heads=heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=head_dim_of(text),
        vocab_size=int(text.vocab_size),
        windows=_windows(text),
        original=original,
        reads=int(tokens_read(declared, original) or 0),
        method=str(declared["method"]),
        factor=float(declared["factor"]),
        dtype=str(model.dtype).removeprefix("torch."),
        unmasked=unmasked_layers(RotaryModel(model)),
    )


def declared_extension(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    """Return method, factor and lengths of a model, as ``describe`` has them; a folder's manifest comes first."""
    return read_manifest(Path(name).expanduser()) or describe_config(config)


def tokens_read(declared: Mapping[str, Any], original: int | None) -> int | None:
    """Return the tokens that a model reads as it is; None if nothing says.

    Args:
        declared: As ``declared_extension`` returns it.
        original: Tokens it was trained on.
    """
    length: int | None = declared["context_length"]
    return length if declared["method"] != "none" or original is None else original


def _matrix_parameters(model: PreTrainedModel, text: PreTrainedConfig) -> int:
    """Count what each token is multiplied by: matrices; of experts, the share that one token is sent to."""
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
    return tuple(window if layer_type in _WINDOWED else None for layer_type in types if layer_type in _ATTENDING)
