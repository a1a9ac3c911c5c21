"""NTK-by-parts, as the YaRN paper's text defines it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_posenc.methods.base import Frequencies, StaticMethod, plain_frequencies
from hf_posenc.methods.options import check_order, option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.spec import RopeSpec


def beta_fast_option() -> Any:
    """Return the option by which pairs that rotate often are kept."""
    return option(32.0, positive, "rotations over the original length from which a pair keeps its frequency")


def beta_slow_option() -> Any:
    """Return the option by which pairs that hardly rotate are divided."""
    return option(1.0, positive, "rotations up to which a pair's frequency is divided by the factor")


class BlendInTurns:
    """A method with these two options, between which kept and divided pairs are blended."""

    beta_fast: float
    beta_slow: float

    @property
    def ramp_turns(self) -> tuple[float, float] | None:
        return self.beta_slow, self.beta_fast

    def check_options(self) -> None:
        check_order("beta_slow", self.beta_slow, "beta_fast", self.beta_fast)


def by_parts_frequencies(spec: RopeSpec, factor: float, slow: float, fast: float) -> torch.Tensor:
    """Keep pairs of at least ``fast`` rotations, divide pairs of at most ``slow``, blend linearly in rotations between.

    Rotations are the full rotations of a pair over the original length. Where ``slow`` and ``fast`` are equal nothing
    is blended: a step.
    """
    plain = plain_frequencies(spec)
    rotations = spec.original_max_position_embeddings * plain / (2 * math.pi)
    keep = ((rotations - slow) / (fast - slow)).clamp(0, 1) if fast > slow else (rotations >= slow).double()
    return keep * plain + (1 - keep) * plain / factor


def llama3_parameters(spec: RopeSpec, factor: float, slow: float, fast: float) -> dict[str, Any]:
    """Return the rule as Transformers' ``llama3``, which is the paper's NTK-by-parts under another name."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": slow,
        "high_freq_factor": fast,
        "original_max_position_embeddings": spec.original_max_position_embeddings,
    }


@register_method
@dataclass(frozen=True)
class NtkByParts(BlendInTurns, StaticMethod):
    """Keep the pairs that rotate often, divide those that hardly rotate, blend by the number of rotations.

    The paper's ramp, without a temperature; equations 17 to 20.
    """

    name: ClassVar[str] = "ntk_by_parts"
    paper: ClassVar[str] = "Peng et al. 2023, arXiv:2309.00071, section 3.2"
    summary: ClassVar[str] = "Keeps pairs that rotate often, divides those that hardly do, blends by rotations between."
    on_disk: ClassVar[str] = "llama3"

    beta_fast: float = beta_fast_option()
    beta_slow: float = beta_slow_option()

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        return by_parts_frequencies(spec, self.factor, self.beta_slow, self.beta_fast), 1.0

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        if spec.unrotated_pairs:
            return self.longrope_parameters(spec)
        return llama3_parameters(spec, self.factor, self.beta_slow, self.beta_fast)
