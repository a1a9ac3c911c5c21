"""Position interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_posenc.methods.base import Frequencies, StaticMethod, plain_frequencies, plain_rope_parameters
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class Linear(StaticMethod):
    """Divide every frequency by ``factor``."""

    name: ClassVar[str] = "linear"
    aliases: ClassVar[tuple[str, ...]] = ("pi",)
    paper: ClassVar[str] = "Chen et al. 2023, arXiv:2306.15595, section 2.3"
    summary: ClassVar[str] = "Divides all frequencies: squeezes positions into the trained range; needs fine-tuning."
    on_disk: ClassVar[str] = "linear"
    rope_type: ClassVar[str | None] = "linear"
    rope_keys: ClassVar[frozenset[str]] = frozenset({"factor"})
    zero_shot: ClassVar[bool] = False

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        return plain_frequencies(spec) / self.factor, 1.0

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        named = plain_rope_parameters(spec) if spec.unrotated_pairs else {"rope_type": "linear"}
        return {**named, "factor": self.factor}
