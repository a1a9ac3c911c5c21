"""The numbers that are fitted: a divisor for each slow pair of features, and one temperature."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hf_posenc.methods.base import Frequencies, plain_frequencies
from hf_posenc.spec import RopeSpec


def rotations_in_training(spec: RopeSpec) -> torch.Tensor:
    """Return the rotations of each rotated pair over the original length, float64 ``(rotated_pairs,)``, falling."""
    return spec.original_max_position_embeddings * plain_frequencies(spec)[: spec.rotated_pairs] / (2 * math.pi)


class RuleParameters(nn.Module):
    """A static rule whose divisors and temperature can be differentiated.

    The fitted parameters are logarithms, so that a step changes a divisor in proportion.

    Attributes:
        spec: What the model was trained with.
        first: Index of the first pair that is fitted; faster ones keep a divisor of 1.
    """

    def __init__(
        self,
        spec: RopeSpec,
        start: Frequencies,
        *,
        keep_rotations: float,
        lowest: torch.Tensor | None = None,
        monotone: bool = False,
        temperature: bool = True,
    ) -> None:
        """Begin at a rule.

        Args:
            spec: What the model was trained with.
            start: The rule to begin at: its frequencies and attention factor.
            keep_rotations: A pair that makes at least this many rotations over the original length is not fitted.
            lowest: Lower bound of each pair's divisor, ``(rotated_pairs,)``; None for none.
            monotone: A pair's divisor is never below that of the pair before it.
            temperature: Whether the attention factor is fitted; if not, it is 1.
        """
        super().__init__()
        self.spec, self.monotone = spec, monotone
        self.first = int((rotations_in_training(spec) >= keep_rotations).sum())
        self.log_divisors = nn.Parameter(torch.zeros(spec.rotated_pairs - self.first))
        self.log_factor = nn.Parameter(torch.zeros(()), requires_grad=temperature)
        self.lowest = None if lowest is None else lowest[self.first :].log().float()
        self.register_buffer("plain", plain_frequencies(spec).float(), persistent=False)
        self.begin_at(start)

    @torch.no_grad()
    def begin_at(self, start: Frequencies) -> None:
        """Take the divisors and, where it is fitted, the temperature of a rule."""
        inv_freq, attention_factor = start
        divisors = (plain_frequencies(self.spec) / inv_freq)[self.first : self.spec.rotated_pairs]
        self.log_divisors.copy_(divisors.log())
        if self.log_factor.requires_grad:
            self.log_factor.fill_(math.log(attention_factor))
        self.project()

    @torch.no_grad()
    def project(self) -> None:
        """Bring the divisors back within their bounds, after a step of the optimizer."""
        values: Any = self.log_divisors.data
        if self.lowest is not None:
            values = torch.maximum(values, self.lowest.to(values.device))
        if self.monotone and len(values):
            values = values.clamp(min=0).cummax(0).values
        self.log_divisors.data.copy_(values)

    def inv_freq(self) -> torch.Tensor:
        """Return float32 ``(num_pairs,)`` in radians per token, differentiable."""
        kept = self.log_divisors.new_zeros(self.first)
        rest = self.log_divisors.new_zeros(self.spec.unrotated_pairs)
        plain: torch.Tensor = self.get_buffer("plain")
        return plain * torch.cat((kept, -self.log_divisors, rest)).exp()

    def attention_factor(self) -> torch.Tensor:
        """Return the factor of cos and sin, differentiable."""
        return self.log_factor.exp()

    def roughness(self) -> torch.Tensor:
        """Return the mean squared second difference of the logarithms of neighbouring divisors."""
        values = torch.cat((self.log_divisors.new_zeros(2), self.log_divisors))
        return values.diff(n=2).square().mean()

    def numbers(self) -> tuple[tuple[float, ...], float]:
        """Return what each rotated pair's frequency is divided by now, and what multiplies cos and sin."""
        divisors = (1.0,) * self.first + tuple(self.log_divisors.double().exp().tolist())
        return divisors, float(self.attention_factor().detach())
