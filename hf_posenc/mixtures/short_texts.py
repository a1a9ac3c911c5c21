"""The documents in windows of the original length, so that what the model knows of short texts is kept."""

from __future__ import annotations

from typing import ClassVar

from hf_posenc.mixtures import register_kind
from hf_posenc.mixtures.long_texts import LongTexts


@register_kind
class ShortTexts(LongTexts):
    """As ``text``, with positions that begin anew after each window: what ``short_share`` is without a mixture.

    Source: LongRoPE2 (arXiv:2502.20082, section 3.3).
    """

    name: ClassVar[str] = "short_text"
    is_short: ClassVar[bool] = True
