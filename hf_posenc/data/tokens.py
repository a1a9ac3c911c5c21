"""The tokens of a document, and which of them count in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")

IGNORED = -100  # the label that cross entropy and Transformers leave out


@dataclass(frozen=True)
class MaskedTokens:
    """A document that is whole as it is, and which of its tokens count in the loss: a chat, a prompt with its answer.

    Attributes:
        ids: int64 ``(num_tokens,)``.
        counted: bool ``(num_tokens,)``.
    """

    ids: torch.Tensor
    counted: torch.Tensor

    @classmethod
    def uniform(cls, ids: torch.Tensor, *, counted: bool) -> MaskedTokens:
        """Return tokens of which all count in the loss, or none."""
        return cls(ids, torch.full((len(ids),), counted))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> MaskedTokens:
        return MaskedTokens(self.ids[part], self.counted[part])


Tokens = torch.Tensor | MaskedTokens  # of a document; all tokens of a tensor count


def joined(parts: Sequence[MaskedTokens]) -> MaskedTokens:
    """Return parts of a document or a block, one after the other."""
    return MaskedTokens(torch.cat([part.ids for part in parts]), torch.cat([part.counted for part in parts]))


def ids_of(document: Tokens) -> torch.Tensor:
    """Return the token ids of a document."""
    return document.ids if isinstance(document, MaskedTokens) else document


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """Return at most ``count`` items, evenly spread over the sequence, in order; None returns all."""
    if count is None or count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def whole_pieces(documents: Sequence[torch.Tensor], length: int) -> list[torch.Tensor]:
    """Return documents cut into pieces of a length, without the shorter rest of each: int64 ``(length,)``."""
    return [piece for text in documents for piece in torch.split(text, length) if len(piece) == length]
