"""NTK-aware scaling by a critical pair, as LongRoPE2 compares it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Frequencies, StaticMethod, plain_frequencies, plain_rope_parameters
from hf_posenc.methods.options import option, pair
from hf_posenc.methods.registry import register_method
from hf_posenc.methods.yarn import pair_of_rotations
from hf_posenc.settings import number, word
from hf_posenc.spec import RopeSpec


def critical_pair_option() -> Any:
    """Return the option by which a method knows the first pair that is divided by the whole scale."""
    return option(
        None,
        pair,
        "index, from 0, of the pair that is divided by the whole scale; default: the last pair that makes more than "
        "one rotation over the original length",
    )


def scale_option() -> Any:
    """Return the option by which the critical pair is divided."""
    return option(
        None, number(at_least=1), "what the frequency of the critical pair is divided by; default: the factor"
    )


def critical_pair_of(spec: RopeSpec, given: int | None) -> int:
    """Return the critical pair of a model: the given one, or the one that theory says, among the pairs that rotate.

    In theory it is ``ceil(rotary_dim / 2 * log_base(original / 2 pi)) - 1``, from 0; the paper's equation 7 counts
    pairs from 1.

    Raises:
        ValueError: The model has no such pair.

    Reference: Shang et al. 2025, arXiv:2502.20082, section 2.1, equation 7.
    """
    last = spec.rotated_pairs - 1
    if last < 1:
        raise InvalidRequestError("a critical pair needs at least two pairs of features that rotate (rotary_dim >= 4).")
    if given is None:
        return min(max(math.ceil(pair_of_rotations(spec, 1.0)) - 1, 1), last)
    if given > last:
        raise InvalidRequestError(
            f"critical_pair must be at most {last}, the slowest pair of this model that rotates (pairs are counted "
            f"from 0), got {given}."
        )
    return given


@register_method
@dataclass(frozen=True)
class NtkRcd(StaticMethod):
    """Raise the base so that the critical pair, in place of the slowest one, is divided by the scale.

    A pair up to the critical one has the divisor ``scale ** (i / critical_pair)``. By default the divisors go on
    rising after it, because the paper's NTK is a change of the base (section 2.3, after Liu et al. 2023,
    arXiv:2310.05209). With ``beyond_critical="constant"`` they stay at the scale: the lists from which LongRoPE2's
    search begins (algorithm 1). The list that it found for Llama-3-8B (8k to 128k; ``examples/longrope2`` of
    microsoft/nnscaler) is this rule with ``critical_pair=33, scale=21.81`` up to pair 33; after it, the divisors of
    that list rise slowly, from 21.87 to 26.05, which neither choice does.
    """

    name: ClassVar[str] = "ntk_rcd"
    paper: ClassVar[str] = "Shang et al. 2025, arXiv:2502.20082, sections 2.3 and 4.3"
    summary: ClassVar[str] = (
        "Raises the base until a pair of your choice, the critical one, is divided by the whole factor."
    )
    on_disk: ClassVar[str] = "default (longrope for beyond_critical=constant)"

    critical_pair: int | None = critical_pair_option()
    scale: float | None = scale_option()
    beyond_critical: str = option(
        "rising",
        word("rising", "constant"),
        "the divisors after the critical pair: rising, as by a larger base; constant, the scale",
    )

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        share = torch.arange(spec.num_pairs, dtype=torch.float64) / critical_pair_of(spec, self.critical_pair)
        if self.beyond_critical == "constant":
            share = share.clamp(max=1)
        return plain_frequencies(spec) / self._scale**share, 1.0

    @property
    def _scale(self) -> float:
        return self.factor if self.scale is None else self.scale

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        if self.beyond_critical == "constant":
            return self.longrope_parameters(spec)
        exponent = spec.rotary_dim / (2 * critical_pair_of(spec, self.critical_pair))
        return {**plain_rope_parameters(spec), "rope_theta": spec.rope_theta * self._scale**exponent}
