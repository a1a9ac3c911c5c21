"""YaRN in stages of the query's position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_posenc.methods.base import StagedMethod, StaticMethod
from hf_posenc.methods.registry import register_method
from hf_posenc.methods.yarn import Yarn, YarnOptions


@register_method
@dataclass(frozen=True)
class DynamicYarn(YarnOptions, StagedMethod):
    """YaRN at the scale of the stage that the query is in."""

    name: ClassVar[str] = "dynamic_yarn"
    look: ClassVar[int | None] = 3
    paper: ClassVar[str] = "Peng et al. 2023, arXiv:2309.00071, sections 3.2 to 3.4; stages: hf_posenc"
    summary: ClassVar[str] = (
        "YaRN in stages, by the position of each query: exact with a KV cache, nothing lost on short texts."
    )
    formula: ClassVar[str] = (
        r"\theta'_i = \theta_i^{\mathrm{yarn}}(s_k), \qquad a = 0.1 \ln s_k + 1, \qquad s_k = \frac{e_k}{L}"
    )
    symbols: ClassVar[str] = (
        r"$\theta_i^{\mathrm{yarn}}(s_k)$ is the frequency of the method yarn at the factor $s_k$, with the same "
        r"options. Up to the original length, $\theta'_i = \theta_i$. Past it, $e_k$ is the position at which the "
        r"stage $k$ of the query ends: $L + k t$ with growth='linear' and $L (1 + t / L)^k$ with "
        r"growth='geometric', for a first stage of $t$ tokens (option stage)."
    )
    explanation: ClassVar[str] = (
        "YaRN, but only as far as needed at a query's position: up to the original length the model is "
        "left as it is, and past it each stage of tokens has the ramp and the temperature of its own end, "
        "for its queries and all keys they look at."
    )

    def at(self, factor: float) -> StaticMethod:
        return Yarn(factor, **{name: getattr(self, name) for name in YarnOptions.option_fields()})
