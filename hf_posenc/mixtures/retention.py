"""Short texts on which the model is to predict what it predicted before it was extended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from hf_posenc.data.retained_texts import RetainedTexts, first_token
from hf_posenc.data.tokens import MaskedTokens
from hf_posenc.mixtures import register_kind
from hf_posenc.mixtures.base import Kind, Material


@register_kind
class Retention(Kind):
    """Short texts, under the extension; the loss is the divergence from what the model predicted there before.

    Half of them are pieces of the documents, and half the model wrote itself: those are what it takes for likely. No
    token is a target. The loss is that of learning without forgetting (Li and Hoiem 2016, arXiv:1606.09282, section 3).
    """

    name: ClassVar[str] = "retention"
    is_short: ClassVar[bool] = True
    needs_retained_texts: ClassVar[bool] = True

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        first_token(material.tokenizer)

    def block(self, index: int) -> list[MaskedTokens]:
        return [
            MaskedTokens(ids, torch.ones_like(ids, dtype=torch.bool))
            for ids in (self._texts.ids[row, :size] for row, size in self._rows(index))
        ]

    @property
    def _texts(self) -> RetainedTexts:
        return self.material.retained_texts[self.name]  # without them blocks can only be counted

    def targets(self, index: int) -> Mapping[str, torch.Tensor]:
        texts, rows = self._texts, self._rows(index)
        return {
            name: torch.cat([getattr(texts, name)[row, :size] for row, size in rows])
            for name in ("position_ids", "likely_ids", "likely_log_probs")
        }

    def _rows(self, index: int) -> list[tuple[int, int]]:
        """Return the texts of a block, and how many tokens of each; none comes twice before all came once."""
        count, length = self._texts.ids.shape
        sizes = [length] * (self.material.seq_len // length)
        if rest := self.material.seq_len % length:
            sizes.append(rest)
        first = index * len(sizes)
        return [(self.material.in_turn(self.name, at, count), size) for at, size in enumerate(sizes, first)]
