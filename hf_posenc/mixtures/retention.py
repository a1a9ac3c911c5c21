"""Short texts on which the model is to predict what it predicted before it was extended."""

from __future__ import annotations

from typing import ClassVar

from hf_posenc.data.retained_texts import first_token
from hf_posenc.mixtures import register_kind
from hf_posenc.mixtures.base import Material
from hf_posenc.mixtures.long_retention import LongRetention


@register_kind
class Retention(LongRetention):
    """As ``long_retention``, with short texts, and with what the model predicted there before it was extended.

    Half of them are pieces of the documents, and half the model wrote itself: those are what it takes for likely.
    """

    name: ClassVar[str] = "retention"
    is_short: ClassVar[bool] = True

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        first_token(material.tokenizer)
