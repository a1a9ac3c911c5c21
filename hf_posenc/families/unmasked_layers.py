"""Layers through which a token sees others whatever the attention mask says: recurrent layers, convolutions, ..."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hf_posenc.families.family_data import MASKED_ATTENTION
from hf_posenc.families.rotary_model import RotaryModel

if TYPE_CHECKING:
    from torch import nn


def unmasked_layers(rotary: RotaryModel) -> dict[str, int]:
    """Return the number of layers, by kind, in which no mask can keep packed documents apart.

    By structure, whatever the weights are: the layer types that the config names, and of layers without such a name,
    or with that of attention, those that hold a convolution (Falcon-H1 of Transformers 5.0 names no types).

    Args:
        rotary: The model; it may be on the meta device.

    Returns:
        Such as ``{"linear_attention": 18}``; empty where every layer is attention with a mask.
    """
    from torch import nn  # which `--help` would wait for

    types = getattr(rotary.text_config, "layer_types", None) or ()
    layers = Counter(layer_type for layer_type in types if layer_type not in MASKED_ATTENTION)
    if not layers:
        convolved = [any(isinstance(part, nn.Conv1d) for part in layer.modules()) for layer in _decoder_layers(rotary)]
        layers = Counter({"convolution": sum(convolved)})
    return {kind: number for kind, number in layers.items() if number}


def in_words(unmasked: Mapping[str, int]) -> str:
    """Return the result of ``unmasked_layers`` as the subject of a sentence: "18 of its layers (linear_attention)"."""
    return f"{sum(unmasked.values())} of its layers ({', '.join(unmasked)})"


def _decoder_layers(rotary: RotaryModel) -> Iterator[nn.Module]:
    """Yield the layers of the decoder that reads text, not those of a vision or audio tower."""
    from torch import nn

    for module in rotary.model.modules():
        layers = module._modules.get("layers")
        if isinstance(layers, nn.ModuleList) and type(getattr(module, "config", None)) is type(rotary.text_config):
            yield from layers
