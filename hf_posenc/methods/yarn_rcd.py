"""YaRN whose ramp ends at a critical pair, as LongRoPE2 compares it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Frequencies, RotatedPart, StaticMethod, plain_frequencies
from hf_posenc.methods.ntk_by_parts import beta_fast_option
from hf_posenc.methods.ntk_rcd import critical_pair_of, critical_pair_option, scale_option
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.methods.yarn import Yarn, linear_ramp, pair_of_rotations
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class YarnRcd(StaticMethod):
    """YaRN that divides by the whole scale from the critical pair on, in place of one rotation and less.

    The ramp begins where YaRN's code begins it, at ``beta_fast`` rotations rounded down to a whole pair, and at the
    latest at the pair before the critical one. The paper gives no temperature for it: it is YaRN's at the factor, not
    at the scale, since it makes up for the longer text and not for the divisors.
    """

    name: ClassVar[str] = "yarn_rcd"
    paper: ClassVar[str] = "Shang et al. 2025, arXiv:2502.20082, section 4.3"
    summary: ClassVar[str] = "YaRN that divides by the whole factor from a pair of your choice on, the critical one."
    on_disk: ClassVar[str] = "yarn (longrope for a scale other than the factor)"

    critical_pair: int | None = critical_pair_option()
    scale: float | None = scale_option()
    beta_fast: float = beta_fast_option()
    attention_factor: float | None = option(
        None, positive, "multiplies cos and sin, so logits grow by its square; default: 0.1 ln(factor) + 1"
    )

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        plain, share = plain_frequencies(spec), linear_ramp(spec, *self.ramp_pairs(spec))
        return plain / self.ramp_scale * share + plain * (1 - share), self._attention_factor()

    def ramp_pairs(self, spec: RopeSpec) -> tuple[int, int]:
        critical = critical_pair_of(spec, self.critical_pair)
        return min(max(math.floor(pair_of_rotations(spec, self.beta_fast)), 0), critical - 1), critical

    @property
    def ramp_scale(self) -> float:
        return self.factor if self.scale is None else self.scale

    def _attention_factor(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        # Transformers' yarn rounds the end of its ramp up to a whole pair: half a pair before the critical one, no
        # rounding error leads to another.
        end = critical_pair_of(spec, self.critical_pair) - 0.5
        if self.scale in (None, self.factor) and pair_of_rotations(spec, self.beta_fast) < end:
            rotations = spec.original_max_position_embeddings * spec.rope_theta ** (-2 * end / spec.rotary_dim)
            yarn = Yarn(
                self.factor,
                beta_fast=self.beta_fast,
                beta_slow=rotations / (2 * math.pi),
                attention_factor=self.attention_factor,
            )
            return yarn.rope_parameters(spec)
        return self.longrope_parameters(spec)

    def temperature_for(self, rotated: RotatedPart) -> Self:
        if rotated is RotatedPart.PART_OF_LATENT_HEADS and self.attention_factor is None:
            raise InvalidRequestError(
                "yarn_rcd on multi-head latent attention: there Transformers puts YaRN's temperature into the softmax "
                "scale, by mscale_all_dim of rope_type 'yarn', which this method does not write. Take yarn; or give "
                "attention_factor, which multiplies the rotated part of a head only (1 for no temperature)."
            )
        return super().temperature_for(rotated)
