"""NTK-aware scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Frequencies, StaticMethod, geometric_frequencies, plain_rope_parameters
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec


def ntk_theta(spec: RopeSpec, factor: float) -> float:
    """Return the base that stretches the slowest rotated pair by exactly ``factor`` and the fastest by 1."""
    if spec.rotated_pairs < 2:
        raise InvalidRequestError("NTK scaling needs at least two pairs of features that rotate (rotary_dim >= 4).")
    return spec.rope_theta * math.pow(factor, spec.rotary_dim / (2 * (spec.rotated_pairs - 1)))


@register_method
@dataclass(frozen=True)
class Ntk(StaticMethod):
    """Raise the base so that the slowest pair is interpolated by ``factor`` and the fastest is kept."""

    name: ClassVar[str] = "ntk"
    paper: ClassVar[str] = "bloc97 2023; Peng et al. 2023, arXiv:2309.00071, section 3.1"
    summary: ClassVar[str] = "Raises the base: keeps fast pairs, stretches slow ones; useful without fine-tuning."
    on_disk: ClassVar[str] = "default"

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        return geometric_frequencies(spec, ntk_theta(spec, self.factor)), 1.0

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        return {**plain_rope_parameters(spec), "rope_theta": ntk_theta(spec, self.factor)}
