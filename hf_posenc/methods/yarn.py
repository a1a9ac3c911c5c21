"""YaRN: NTK-by-parts with an attention temperature."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Frequencies, Method, RotatedPart, StaticMethod, plain_frequencies
from hf_posenc.methods.ntk_by_parts import BlendInTurns, beta_fast_option, beta_slow_option, by_parts_frequencies
from hf_posenc.methods.options import option, positive
from hf_posenc.methods.registry import register_method
from hf_posenc.settings import flag, word
from hf_posenc.spec import RopeSpec


@dataclass(frozen=True)
class YarnOptions(BlendInTurns, Method):
    """The options of YaRN's frequencies, at one scale (``Yarn``) or in stages (``DynamicYarn``)."""

    ramp: str = option(
        "code",
        word("code", "paper", "harmonic"),
        "the blend of kept and divided pairs: code, linear in the pair's index; paper, linear in rotations; harmonic, "
        "PoSE's, which blends wavelengths",
    )
    beta_fast: float = beta_fast_option()
    beta_slow: float = beta_slow_option()
    truncate: bool = option(True, flag, "round the ends of the ramp outward to whole pairs, as YaRN's code does")
    attention_factor: float | None = option(
        None, positive, "multiplies cos and sin, so logits grow by its square; default: 0.1 ln(factor) + 1"
    )
    mscale: float | None = option(None, positive, "DeepSeek's pair: both given, they replace YaRN's temperature")
    mscale_all_dim: float | None = option(None, positive, "see mscale")

    def has_default_temperature(self) -> bool:
        """Return whether neither ``attention_factor`` nor DeepSeek's pair was given."""
        return self.attention_factor is None and self.mscale is None and self.mscale_all_dim is None

    def requests_temperature(self) -> bool:
        return not self.has_default_temperature() and self.attention_factor != 1


@register_method
@dataclass(frozen=True)
class Yarn(YarnOptions, StaticMethod):
    """Keep the pairs that rotate often, stretch those that hardly do, blend between, and sharpen attention.

    A pair of at least ``beta_fast`` rotations over the original length keeps its frequency; one of at most
    ``beta_slow`` has it divided by ``factor``. Three published curves differ in between (``ramp``): the authors' code,
    the paper's text (equations 17 to 20), and PoSE's (Zhu et al. 2023, arXiv:2309.10400), which blends wavelengths.
    """

    name: ClassVar[str] = "yarn"
    paper: ClassVar[str] = "Peng et al. 2023, arXiv:2309.00071, sections 3.2 and 3.4"
    summary: ClassVar[str] = (
        "NTK-by-parts with an attention temperature: the usual choice, with or without fine-tuning."
    )
    on_disk: ClassVar[str] = "yarn (longrope for ramp=paper and ramp=harmonic)"
    rope_type: ClassVar[str | None] = "yarn"
    rope_keys: ClassVar[frozenset[str]] = frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    )

    temperature: str = option(
        "rotary",
        word("rotary", "logits"),
        "what attention_factor reaches where only part of a head is rotated: rotary, that part, as published; logits, "
        "whole logits",
    )

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        return self._inv_freq(spec), self._attention_factor()

    @classmethod
    def read_options(cls, parameters: Mapping[str, Any]) -> dict[str, Any]:
        # Transformers takes 0 for not given, but for an attention factor; and null for False, in truncate alone.
        read = {k: v for k, v in super().read_options(parameters).items() if v or k == "attention_factor"}
        return read | ({"truncate": bool(parameters["truncate"])} if "truncate" in parameters else {})

    def _inv_freq(self, spec: RopeSpec) -> torch.Tensor:
        if self.ramp == "paper":
            return by_parts_frequencies(spec, self.factor, self.beta_slow, self.beta_fast)
        plain, share = plain_frequencies(spec), yarn_ramp(spec, self)
        if self.ramp == "code":
            return plain / self.factor * share + plain * (1 - share)
        return plain / (share * self.factor + (1 - share))

    def _attention_factor(self) -> float:
        """Return the factor of cos and sin: the given one, DeepSeek's quotient, or ``0.1 ln(factor) + 1``.

        Reference: arXiv:2309.00071, section 3.4, equation 22; DeepSeek-V2, arXiv:2405.04434, for the quotient.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        # Transformers' own counts the pairs of an odd rotary_dim in two ways, and rotates all of them.
        if self.ramp != "code" or spec.unrotated_pairs or spec.rotary_dim % 2:
            return self.longrope_parameters(spec)
        named = {name: value for name, value in self.changed_options().items() if name in self.rope_keys}
        return {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": spec.original_max_position_embeddings,
            **named,
        }

    @property
    def temperature_on_logits(self) -> bool:
        return self.temperature == "logits"

    @property
    def latent_temperature(self) -> float:
        if self.mscale_all_dim is None or self.factor <= 1:
            return 1.0
        return _mscale(self.factor, self.mscale_all_dim)

    def requests_temperature(self) -> bool:
        return self.temperature_on_logits or super().requests_temperature()

    def temperature_for(self, rotated: RotatedPart) -> Self:
        if rotated is RotatedPart.PART_OF_LATENT_HEADS:
            return self._for_latent_heads()
        method = super().temperature_for(rotated)
        # Where all of a head is rotated, cos and sin reach whole logits.
        return dataclasses.replace(method, temperature="rotary") if rotated is RotatedPart.WHOLE_HEADS else method

    def _for_latent_heads(self) -> Self:
        """Return the method whose temperature is in the softmax scale, if no other one was requested."""
        method = self
        if self.has_default_temperature():
            # The rotated part is a fraction of a head: this pair puts the temperature on all of it.
            method = dataclasses.replace(self, mscale=1.0, mscale_all_dim=1.0)
        if method.temperature_on_logits and method.attention_factor is not None:
            raise InvalidRequestError(
                "temperature='logits' with attention_factor: on multi-head latent attention give mscale and "
                "mscale_all_dim instead, which Transformers reads; without any of them it is the default there."
            )
        if method.ramp != "code" and method.latent_temperature != 1:
            raise InvalidRequestError(
                f"ramp={self.ramp!r} on multi-head latent attention: there Transformers puts YaRN's temperature into "
                "the softmax scale, by mscale_all_dim of rope_type 'yarn', and this ramp is written as longrope lists, "
                "which have no such key. Leave ramp at 'code'; or give attention_factor, which multiplies the rotated "
                "part of a head only (1 for no temperature)."
            )
        return dataclasses.replace(method, temperature="rotary")


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def pair_of_rotations(spec: RopeSpec, rotations: float) -> float:
    """Return the index, a fraction too, of the pair that makes so many rotations over the original length."""
    wanted = spec.original_max_position_embeddings / (rotations * 2 * math.pi)
    return spec.rotary_dim * math.log(wanted) / (2 * math.log(spec.rope_theta))


def linear_ramp(spec: RopeSpec, low: float, high: float) -> torch.Tensor:
    """Return the share of interpolation per pair: 0 up to index ``low``, 1 from ``high`` on, linear between."""
    pairs = torch.arange(spec.num_pairs, dtype=torch.float64)
    return ((pairs - low) / (high - low)).clamp(0, 1)


def yarn_ramp(spec: RopeSpec, method: YarnOptions) -> torch.Tensor:
    """Return the share of interpolation per pair, 0 (keep) to 1 (divide), linear in the pair's index."""
    low, high = pair_of_rotations(spec, method.beta_fast), pair_of_rotations(spec, method.beta_slow)
    if method.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001  # as the reference code does, to divide by something
    return linear_ramp(spec, low, high)
