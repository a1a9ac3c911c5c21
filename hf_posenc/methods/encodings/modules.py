"""Encodings as modules: what is added to embeddings, what is added to logits, what rotates pairs."""

from __future__ import annotations

import abc
from collections.abc import Callable

import torch
from torch import nn


class AddedToEmbeddings(nn.Module, abc.ABC):
    """Enters a model once, before the first layer: positions are absolute, and keys in a cache hold them."""

    @abc.abstractmethod
    def forward(self, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the encoding to add to ``like``, ``(rows, length, width)``, for int64 positions ``(rows, length)``."""


class AddedToLogits(nn.Module, abc.ABC):
    """A bias on each logit, by how far the key is from the query: the same in every layer."""

    @abc.abstractmethod
    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the bias, ``(rows, heads, num_queries, num_keys)``, for int64 positions ``(rows, num_...)``."""


class RotatesPairs(nn.Module, abc.ABC):
    """Rotates queries and keys in every layer; the cache holds keys as the layer made them."""

    @abc.abstractmethod
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys, ``(batch, heads, length, head_dim)``, rotated by positions ``(rows, length)``."""


class DistanceTable(AddedToLogits):
    """A trained bias for each head and each class of distances."""

    def __init__(
        self, num_heads: int, num_classes: int, classify: Callable[[torch.Tensor], torch.Tensor], std: float
    ) -> None:
        """Make one.

        Args:
            num_heads: Number of query heads.
            num_classes: Rows of the table.
            classify: From key position minus query position to a row.
            std: Standard deviation of the normal distribution it is drawn from.
        """
        super().__init__()
        self.classify = classify
        self.table = nn.Embedding(num_classes, num_heads)
        nn.init.normal_(self.table.weight, std=std)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        relative = keys[:, None, :] - queries[:, :, None]
        rows: torch.Tensor = self.table(self.classify(relative).to(self.table.weight.device))
        return rows.permute(0, 3, 1, 2)
