"""The description of a method that replaces RoPE: words, numbers on a model, and a map of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_posenc.errors import InvalidRequestError
from hf_posenc.spec import RopeSpec

# Values, float64, at int64 distances of the same shape.
OfDistance = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that an encoding is made for and explained with.

    Attributes:
        num_heads: Number of query heads of a layer.
        hidden_size: Features of a token.
        head_dim: Features of a head.
        length: Tokens the model reads.
        target: Tokens that the model is to read.
        spec: Its rotary embedding; None if it has none.
        no_rope: Why it has none.
        initializer_range: Standard deviation that its parameters are drawn with.
    """

    num_heads: int
    hidden_size: int
    head_dim: int
    length: int
    target: int
    spec: RopeSpec | None = None
    no_rope: str = "the model has no rotary embedding."
    initializer_range: float = 0.02

    @property
    def rope(self) -> RopeSpec:
        """Its rotary embedding.

        Raises:
            ValueError: It has none.
        """
        if self.spec is None:
            raise InvalidRequestError(self.no_rope)
        return self.spec

    @property
    def some_heads(self) -> list[int]:
        """The first head, one in the middle and the last, each once."""
        return sorted({0, (self.num_heads - 1) // 2, self.num_heads - 1})


@dataclass(frozen=True)
class Numbers:
    """The numbers of an encoding on a model.

    Attributes:
        sentences: In order.
        heads: Headings of a table; empty for none.
        rows: Rows of that table.
    """

    sentences: Sequence[str]
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class PositionMap:
    """The result of an encoding for a query and a key, for heat maps of queries by keys.

    Attributes:
        title: Names the encoding.
        rows: For each row of maps its name (of a single one empty) and what it shows, where that depends on the
            distance alone.
        bar: What the colours mean.
        limits: The values of the first and the last colour.
        caption: What is to be seen.
        of_positions: Where it depends on the positions themselves: from int64 positions ``(n,)`` to float64 ``(n, n)``,
            nan where there is nothing; ``rows`` are empty then.
        num_positions: How many positions there are; None if there is no end.
    """

    title: str
    rows: Sequence[tuple[str, OfDistance]]
    bar: str
    limits: tuple[float, float]
    caption: str
    of_positions: Callable[[torch.Tensor], torch.Tensor] | None = None
    num_positions: int | None = None


class InPlaceOfRope:
    """Part of a method that takes the place of a model's RoPE."""

    instead_of_rope: ClassVar[bool] = True

    def numbers(self, model: ModelShape) -> Numbers | None:
        """Return its numbers on a model of this shape; None if it has none of its own."""
        return None

    def position_map(self, model: ModelShape) -> PositionMap | None:
        """Return the values that heat maps of it show; None if it has no heat map."""
        return None
