"""Llama 3.1's frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_posenc.methods.base import Frequencies, StaticMethod
from hf_posenc.methods.ntk_by_parts import by_parts_frequencies, llama3_parameters
from hf_posenc.methods.options import check_order, option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class Llama3(StaticMethod):
    """NTK-by-parts between ``low_freq_factor`` and ``high_freq_factor`` rotations.

    Also Transformers' ``_compute_llama3_parameters``.
    """

    name: ClassVar[str] = "llama3"
    paper: ClassVar[str] = "Llama Team 2024, arXiv:2407.21783, section 3.4.2"
    summary: ClassVar[str] = "Llama 3.1's frequencies: NTK-by-parts between 1 and 4 rotations."
    on_disk: ClassVar[str] = "llama3"
    rope_type: ClassVar[str | None] = "llama3"
    rope_keys: ClassVar[frozenset[str]] = frozenset({"factor", "low_freq_factor", "high_freq_factor"})

    low_freq_factor: float = option(1.0, positive, "rotations up to which a pair's frequency is divided by the factor")
    high_freq_factor: float = option(4.0, positive, "rotations from which a pair keeps its frequency")

    @property
    def ramp_turns(self) -> tuple[float, float] | None:
        return self.low_freq_factor, self.high_freq_factor

    def check_options(self) -> None:
        check_order("low_freq_factor", self.low_freq_factor, "high_freq_factor", self.high_freq_factor)

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        # Published low_freq_factor may be the larger: Transformers then divides below it, and keeps the others.
        high = max(self.low_freq_factor, self.high_freq_factor)
        return by_parts_frequencies(spec, self.factor, self.low_freq_factor, high), 1.0

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        if spec.unrotated_pairs:
            return self.longrope_parameters(spec)
        return llama3_parameters(spec, self.factor, self.low_freq_factor, self.high_freq_factor)
