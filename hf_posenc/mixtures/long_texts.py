"""The documents as they are, packed into blocks."""

from __future__ import annotations

from typing import ClassVar

from hf_posenc.data.tokens import MaskedTokens
from hf_posenc.mixtures import register_kind
from hf_posenc.mixtures.base import Kind


@register_kind
class LongTexts(Kind):
    """The training data of a run without ``task_mix``: no block comes twice before all came once."""

    name: ClassVar[str] = "text"

    def block(self, index: int) -> list[MaskedTokens]:
        packed = self.material.packed
        return packed.pieces(self.material.in_turn(self.name, index, len(packed)))
