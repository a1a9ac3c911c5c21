"""Positions added to the embeddings: hooks that say the position of each token, and add its vector before layer 0."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.attention.layout import text_positions
from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.encodings.modules import AddedToEmbeddings


class AbsolutePositions:
    """The data that the hooks of a model with absolute positions share."""

    def __init__(self, encoding: AddedToEmbeddings) -> None:
        self.encoding = encoding
        self.times: int | None = None  # a probe's count of how often the first layer ran

    def number(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Number the tokens where the caller does not: from the row's first that is not padding, on after the cache.

        A forward pre-hook of the decoder. Transformers would count padding too, which RoPE does not mind.
        """
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        given = kwargs.get("position_ids", args[2] if len(args) > 2 else None)
        if given is not None or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return args, kwargs
        embedded = kwargs.get("inputs_embeds")
        of: Any = embedded if embedded is not None else kwargs.get("input_ids", args[0] if args else None)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return args, {**kwargs, "position_ids": positions[:, -of.shape[1] :]}

    def add(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Add the encoding to what enters the first layer; a forward pre-hook of it."""
        positions = kwargs.get("position_ids")
        if positions is None:
            raise InvalidRequestError(
                f"{type(layer).__name__} gets no positions of its tokens (position_ids): a learned or sinusoidal "
                "encoding cannot be added. Take 'alibi' or another that does without."
            )
        if positions.dim() == 3:
            positions = text_positions(positions)
        if self.times is not None:  # else a compiled forward would be made anew at each
            self.times += 1
        states = args[0] if args else kwargs["hidden_states"]
        states = states + self.encoding(positions, states)
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})


def first_layer(model: PreTrainedModel, attention: str) -> nn.Module:
    """Return the decoder layer that holds the first attention module.

    Args:
        model: The model.
        attention: The name of that module, such as ``model.layers.0.self_attn``.

    Raises:
        ValueError: The name has no number in it.
    """
    match = re.match(r"(.*?\.\d+)(\.|$)", attention)
    if match is None:
        raise InvalidRequestError(
            f"{type(model).__name__} has no numbered layers: what comes before the first is not known."
        )
    return model.get_submodule(match[1])
