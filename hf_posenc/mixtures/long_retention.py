"""Long pieces of the documents, on which the model is to predict what it predicted before it was trained."""

from __future__ import annotations

from typing import ClassVar

from hf_posenc.mixtures import register_kind
from hf_posenc.mixtures.retention import Retention


@register_kind
class LongRetention(Retention):
    """As ``retention``, with a block that is one piece of the documents, at positions of the run's schedule.

    What is retained is what the extended model predicted there as the run began, as the model before its extension
    reads no such text.
    """

    name: ClassVar[str] = "long_retention"
    is_short: ClassVar[bool] = False
