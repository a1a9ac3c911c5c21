"""A trained vector for each position, added to the embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Encoding
from hf_posenc.methods.encodings.modules import AddedToEmbeddings
from hf_posenc.methods.explained import ModelShape, Numbers, PositionMap
from hf_posenc.methods.registry import register_method


class LearnedTable(AddedToEmbeddings):
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
            raise InvalidRequestError(
                f"position {last} is past the end of the learned table, which has {self.table.num_embeddings}: such a "
                "model cannot read on. Give it a shorter text, or train one with a longer context_length."
            )
        added: torch.Tensor = self.table(positions.to(self.table.weight.device))
        return added.to(like.device, like.dtype)


@register_method
@dataclass(frozen=True)
class Learned(Encoding):
    """Add a trained vector for each position to the embeddings."""

    name: ClassVar[str] = "learned"
    paper: ClassVar[str] = "Gehring et al. 2017, arXiv:1705.03122, section 3.1; Radford et al. 2019 (GPT-2)"
    summary: ClassVar[str] = (
        "Adds a trained vector for each position, and ends where the table does; for training from scratch."
    )
    has_parameters: ClassVar[bool] = True

    def module(self, model: ModelShape) -> nn.Module:
        return LearnedTable(model.target, model.hidden_size, model.initializer_range)

    def numbers(self, model: ModelShape) -> Numbers:
        rows, missing = model.length, max(model.target - model.length, 0)
        return Numbers(
            [
                f"A table of {rows:,} rows of {model.hidden_size:,} features: {rows * model.hidden_size:,} numbers are "
                "trained.",
                f"Of the {model.target:,} positions to be read, {missing:,} have no row."
                if missing
                else "Every position has a row.",
            ]
        )

    def position_map(self, model: ModelShape) -> PositionMap:
        rows = model.length
        return PositionMap(
            "Learned positions",
            [],
            "cosine of two rows",
            (-1.0, 1.0),
            f"The cosine of the rows of two positions in a table of {rows:,} rows as it is initialised: no two are "
            "alike, and what becomes of it is up to the training. One pair of positions a cell. Positions "
            "past the last row have none, and the map is empty.",
            partial(_untrained_cosines, rows=rows),
            rows,
        )


def _untrained_cosines(positions: torch.Tensor, rows: int, width: int = 64) -> torch.Tensor:
    """Return the cosines of the rows of positions in an untrained table; nan where there is no row."""
    table = torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    directions = torch.nn.functional.normalize(table, dim=-1)[positions.clamp(max=rows - 1)]
    has_row = positions < rows
    return torch.where(has_row[:, None] & has_row, directions @ directions.T, torch.nan)
