"""Long pieces of the documents, on which the model is to predict what it predicted before it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from hf_posenc.data.retained_texts import RetainedTexts
from hf_posenc.data.tokens import MaskedTokens
from hf_posenc.mixtures import register_kind
from hf_posenc.mixtures.base import Kind


@register_kind
class LongRetention(Kind):
    """Pieces of the documents as long as a block; the loss is the divergence from what was predicted there before.

    What is to be retained is what the extended model predicts as the run begins, because the model before its extension
    reads no such text. No token is a target. The loss is that of learning without forgetting (Li and Hoiem 2016,
    arXiv:1606.09282, section 3).
    """

    name: ClassVar[str] = "long_retention"
    needs_retained_texts: ClassVar[bool] = True

    def block(self, index: int) -> list[MaskedTokens]:
        return [MaskedTokens.uniform(self._texts.ids[row, :size], counted=True) for row, size in self._rows(index)]

    def targets(self, index: int) -> Mapping[str, torch.Tensor]:
        """Return what was predicted, and the positions that it was predicted at, in place of those of the schedule."""
        texts, rows = self._texts, self._rows(index)
        return {
            name: torch.cat([getattr(texts, name)[row, :size] for row, size in rows])
            for name in ("position_ids", "likely_ids", "likely_log_probs")
        }

    @property
    def _texts(self) -> RetainedTexts:
        return self.material.retained_texts[self.name]  # without them blocks can only be counted

    def _rows(self, index: int) -> list[tuple[int, int]]:
        """Return the texts of a block, and how many tokens of each; none comes twice before all came once."""
        count, length = self._texts.ids.shape
        sizes = [length] * (self.material.seq_len // length)
        if rest := self.material.seq_len % length:
            sizes.append(rest)
        first = index * len(sizes)
        return [(self.material.in_turn(self.name, at, count), size) for at, size in enumerate(sizes, first)]
