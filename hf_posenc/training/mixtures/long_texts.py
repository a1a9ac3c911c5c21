"""The documents as they are, packed into blocks."""

from __future__ import annotations

import itertools
from typing import ClassVar

from hf_posenc.training.mixtures import register_kind
from hf_posenc.training.mixtures.base import Kind
from hf_posenc.training.packing import MaskedTokens


@register_kind
class LongTexts(Kind):
    """What a run without ``task_mix`` is trained on: no block comes twice before all came once."""

    name: ClassVar[str] = "text"

    def block(self, index: int) -> list[MaskedTokens]:
        packed = self.material.packed
        passes, at = divmod(index, len(packed))
        order = list(range(len(packed)))
        self.material.rng(f"{self.name} pass", passes).shuffle(order)
        tokens, pieces = packed.tokens(order[at]), packed.pieces(order[at])
        ends = list(itertools.accumulate(pieces))
        return [tokens[end - length : end] for end, length in zip(ends, pieces, strict=True)]
