"""Adjusted base frequency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Frequencies, StaticMethod, geometric_frequencies, plain_rope_parameters
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class Abf(StaticMethod):
    """Use a given, larger base."""

    name: ClassVar[str] = "abf"
    paper: ClassVar[str] = "Xiong et al. 2023, arXiv:2309.16039, section 2.1"
    summary: ClassVar[str] = "Replaces the base by a larger one of your choice; needs fine-tuning."
    needs_options: ClassVar[bool] = True
    example_options: ClassVar[Mapping[str, Any]] = {"rope_theta": 500_000}
    on_disk: ClassVar[str] = "default"
    zero_shot: ClassVar[bool] = False

    rope_theta: float | None = option(None, positive, "the new base, larger than the model's")

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        if self.rope_theta is None:
            raise InvalidRequestError("method 'abf' needs the new base: rope_theta=500000, for example.")
        if self.rope_theta <= spec.rope_theta:
            raise InvalidRequestError(
                f"rope_theta must be larger than the model's {spec.rope_theta:g} to slow the pairs down, "
                f"got {self.rope_theta:g}."
            )
        return geometric_frequencies(spec, self.rope_theta), 1.0

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        return {**plain_rope_parameters(spec), "rope_theta": self.rope_theta}
