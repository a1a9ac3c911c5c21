"""The tokens of a document, and which of them count in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
