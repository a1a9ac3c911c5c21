"""The positional encodings as modules: what is added to embeddings, what is added to logits, what turns pairs."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_posenc.encodings.formulas import (
    alibi_slopes,
    rotate_complex,
    rotate_real,
    sinusoidal_table,
    t5_buckets,
    xpos_decay,
)
from hf_posenc.patching.extension import Extension, head_dim_of
from hf_posenc.spec import RopeScaling, RopeSpec

# What a key itself may come to, as a logarithm, besides the factor of xPos.
_HEADROOM = 5.0


class AddedToEmbeddings(nn.Module, abc.ABC):
    """Enters a model once, before the first layer: positions are absolute, and keys in a cache hold them."""

    @abc.abstractmethod
    def forward(self, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return what is added to ``like``, ``(rows, length, width)``, for int64 positions ``(rows, length)``."""


class AddedToLogits(nn.Module, abc.ABC):
    """A bias on each logit, by how far the key stands from the query: the same in every layer."""

    @abc.abstractmethod
    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the bias, ``(rows, heads, num_queries, num_keys)``, for int64 positions ``(rows, num_...)``."""


class TurnsPairs(nn.Module, abc.ABC):
    """Turns queries and keys in every layer; the cache holds keys as the layer made them."""

    @abc.abstractmethod
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys, ``(batch, heads, length, head_dim)``, turned by positions ``(rows, length)``."""


class Sinusoidal(AddedToEmbeddings):
    """Sines and cosines of wavelengths from 2 pi to 10,000 * 2 pi tokens.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    def __init__(self, width: int, scale: float) -> None:
        """Make one.

        Args:
            width: Features of the embeddings.
            scale: What multiplies the table. In the paper embeddings have variance 1, and those of a Llama 0.02 ** 2:
                unscaled, the table would drown them.
        """
        super().__init__()
        sinusoidal_table(torch.zeros(1), width)  # raises on an odd width
        self.width, self.scale = width, scale

    def forward(self, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        table = self.scale * sinusoidal_table(positions.to(like.device), self.width)
        return table.to(like.dtype)


class Learned(AddedToEmbeddings):
    """A trained vector for each position, and none past the last.

    Reference: Gehring et al. 2017, arXiv:1705.03122, section 3.1; as in GPT-2.
    """

    def __init__(self, length: int, width: int, std: float) -> None:
        """Make one for positions below ``length``, drawn with standard deviation ``std``."""
        super().__init__()
        self.table = nn.Embedding(length, width)
        nn.init.normal_(self.table.weight, std=std)

    def forward(self, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        last = int(positions.max())
        if last >= self.table.num_embeddings:
            raise ValueError(
                f"position {last} is past the end of the learned table, which has {self.table.num_embeddings}: such a "
                "model cannot read on. Give it a shorter text, or train one with a longer context_length."
            )
        added: torch.Tensor = self.table(positions.to(self.table.weight.device))
        return added.to(like.device, like.dtype)


class Alibi(AddedToLogits):
    """A constant times the distance, off each logit, another constant in each head.

    Reference: Press et al. 2021, arXiv:2108.12409, section 3.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(num_heads).float()  # no buffer, which .to(bfloat16) would round

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        distance = (queries[:, :, None] - keys[:, None, :])[:, None]
        return -self.slopes.to(distance.device)[:, None, None] * distance


class DistanceTable(AddedToLogits):
    """A trained bias for each head and each class of distances."""

    def __init__(
        self, num_heads: int, num_classes: int, classify: Callable[[torch.Tensor], torch.Tensor], std: float
    ) -> None:
        """Make one.

        Args:
            num_heads: Of the queries.
            num_classes: Rows of the table.
            classify: From key position minus query position to a row.
            std: Of the normal distribution it is drawn from.
        """
        super().__init__()
        self.classify = classify
        self.table = nn.Embedding(num_classes, num_heads)
        nn.init.normal_(self.table.weight, std=std)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        relative = keys[:, None, :] - queries[:, :, None]
        rows: torch.Tensor = self.table(self.classify(relative).to(self.table.weight.device))
        return rows.permute(0, 3, 1, 2)


class Rope(TurnsPairs):
    """Pairs of features turned by position times frequency, in either layout.

    Reference: Su et al. 2021, arXiv:2104.09864, section 3.
    """

    def __init__(self, spec: RopeSpec, scaling: RopeScaling, head_dim: int) -> None:
        """Make one of a rule's options; what it leaves open is the model's own."""
        super().__init__()
        share = scaling.partial_rotary_factor
        self.width = spec.rotary_dim if share is None else int(head_dim * share)
        if self.width % 2 or not 0 < self.width <= head_dim:
            raise ValueError(
                f"{self.width} of {head_dim} features of a head would turn: it must be an even number of them. Give "
                "partial_rotary_factor."
            )
        self.interleaved = scaling.interleaved
        self.rotate = rotate_complex if scaling.computation == "complex" else rotate_real
        base = scaling.rope_theta or spec.rope_theta
        self.inv_freq = base ** (-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)

    def turn(self, states: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
        """Return states turned by positions ``(rows, length)``; pair by pair times ``factors``, if given."""
        angles = positions.to(states.device, torch.float64)[:, None, :, None] * self.inv_freq.to(states.device)
        turned = self.rotate(states[..., : self.width].float(), angles.float(), interleaved=self.interleaved)
        if factors is not None:
            each = factors.repeat_interleave(2, -1) if self.interleaved else torch.cat((factors, factors), dim=-1)
            turned = turned * each.to(turned.dtype)
        turned = turned.to(states.dtype)
        return turned if self.width == states.shape[-1] else torch.cat((turned, states[..., self.width :]), dim=-1)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.turn(query, queries), self.turn(key, keys)


class Xpos(Rope):
    """RoPE whose pairs also shrink with distance, the fast ones most: ``decay ** (distance / scale_base)``.

    Queries are multiplied by ``decay ** (p / scale_base)`` and keys by its inverse, p counted from the middle of the
    queries: no factor is larger than half their number makes it, and those of earlier keys are below 1.

    Reference: Sun et al. 2022, arXiv:2212.10554, section 3.2 and algorithm 1.
    """

    def __init__(self, spec: RopeSpec, scaling: RopeScaling, head_dim: int) -> None:
        super().__init__(spec, scaling, head_dim)
        self.decay = xpos_decay(self.width // 2)
        self.scale_base = scaling.scale_base

    def _factors(self, positions: torch.Tensor, middle: torch.Tensor, sign: int) -> torch.Tensor:
        powers = (positions - middle).double()[:, None, :, None] / self.scale_base
        return self.decay.to(positions.device) ** (sign * powers)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = queries.to(query.device), keys.to(query.device)
        middle = (queries.amin(-1, keepdim=True) + queries.amax(-1, keepdim=True)) // 2
        largest = float((queries.amax(-1) - middle[:, 0]).max()) / self.scale_base * -float(self.decay[0].log())
        if largest > math.log(torch.finfo(query.dtype).max) - _HEADROOM:
            raise ValueError(
                f"xpos over {queries.shape[-1]} tokens at once needs larger numbers than {query.dtype} has. Feed the "
                "text in parts, with a KV cache, or patch with a larger scale_base."
            )
        query = self.turn(query, queries, self._factors(queries, middle, 1))
        return query, self.turn(key, keys, self._factors(keys, middle, -1))


def make_encoding(config: PreTrainedConfig, extension: Extension) -> AddedToEmbeddings | AddedToLogits | TurnsPairs:
    """Return the encoding that an extension asks for, with parameters drawn anew.

    Args:
        config: The text config of the model.
        extension: The rule.
    """
    scaling, heads = extension.scaling, int(config.num_attention_heads)
    std = float(getattr(config, "initializer_range", 0.02))
    match scaling.method:
        case "sinusoidal":
            return Sinusoidal(config.hidden_size, scaling.embedding_scale or std)
        case "learned":
            return Learned(extension.context_length, config.hidden_size, std)
        case "alibi":
            return Alibi(heads)
        case "relative_bias":
            farthest = scaling.max_distance  # as Shaw et al. 2018, arXiv:1803.02155, section 3.2, clip it
            return DistanceTable(heads, farthest + 1, partial(_clipped_distance, farthest=farthest), std)
        case "t5_bias":
            classify = partial(
                t5_buckets,
                bidirectional=scaling.bidirectional,
                num_buckets=scaling.num_buckets,
                max_distance=scaling.max_distance,
            )
            return DistanceTable(heads, scaling.num_buckets, classify, std)
        case "rope":
            return Rope(extension.spec, scaling, head_dim_of(config))
        case "xpos":
            return Xpos(extension.spec, scaling, head_dim_of(config))
    raise ValueError(f"{scaling.method!r} is not an encoding.")


def _clipped_distance(relative: torch.Tensor, farthest: int) -> torch.Tensor:
    return (-relative).clamp(0, farthest)
