"""Dynamic NTK: in stages of the query's position, or as Transformers has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_posenc.errors import InvalidRequestError
from hf_posenc.methods.base import Frequencies, StagedMethod, StaticMethod, geometric_frequencies
from hf_posenc.methods.ntk import Ntk
from hf_posenc.methods.options import option
from hf_posenc.methods.registry import register_method
from hf_posenc.settings import word
from hf_posenc.spec import RopeSpec


@register_method
@dataclass(frozen=True)
class DynamicNtk(StagedMethod):
    """NTK at the scale of the stage that the query is in; with ``scope="sequence"`` one scale for a whole forward.

    The second is Transformers' rule (emozilla 2023; ``_compute_dynamic_ntk_parameters``): the base is chosen from the
    length of the forward, so results change with the KV cache. Its ``factor`` enters as Transformers has it; 1 gives
    the formula of the YaRN paper's appendix.
    """

    name: ClassVar[str] = "dynamic"
    aliases: ClassVar[tuple[str, ...]] = ("dynamic_ntk",)
    paper: ClassVar[str] = "emozilla 2023; Peng et al. 2023, arXiv:2309.00071, section 3.3; stages: hf_posenc"
    summary: ClassVar[str] = (
        "NTK in stages, by the position of each query: exact with a KV cache, nothing lost on short texts."
    )
    on_disk: ClassVar[str] = "the manifest only (dynamic for scope=sequence)"
    rope_type: ClassVar[str | None] = "dynamic"
    rope_keys: ClassVar[frozenset[str]] = frozenset({"factor"})

    scope: str = option(
        "query",
        word("query", "sequence"),
        "query: a scale for each query by its position; sequence: Transformers' rule, one scale for a whole forward",
    )

    @property
    def needs_hf_posenc(self) -> bool:
        return self.scope == "query"

    @property
    def declares_target(self) -> bool:
        return self.scope == "query"

    @property
    def caution(self) -> str | None:
        if self.scope == "query":
            return None
        return (
            "dynamic with scope='sequence' picks one scale per forward: results change with the KV cache, with "
            "batch-mates and with what ran before."
        )

    def at(self, factor: float) -> StaticMethod:
        return Ntk(factor)

    def frequencies(self, spec: RopeSpec, seq_len: int | None = None) -> Frequencies:
        """Return Transformers' rule for a forward of ``seq_len`` tokens; up to the original length the plain one."""
        original = spec.original_max_position_embeddings
        length = max(seq_len or original, original)
        stretch = self.factor * length / original - (self.factor - 1)
        if spec.rotary_dim <= 2:
            raise InvalidRequestError("NTK scaling needs at least two pairs of features that rotate (rotary_dim >= 4).")
        # Of an odd rotary_dim this is not quite ntk_theta.
        theta = spec.rope_theta * math.pow(stretch, spec.rotary_dim / (spec.rotary_dim - 2))
        return geometric_frequencies(spec, theta), 1.0

    def rope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        if self.needs_hf_posenc:
            return super().rope_parameters(spec)
        if spec.unrotated_pairs:
            raise InvalidRequestError(
                "Transformers' dynamic rule rotates every pair of a head, and in this model some never do (rope_type "
                "'proportional'). Take 'ntk' or 'yarn'."
            )
        return {"rope_type": "dynamic", "factor": self.factor}

    def longrope_parameters(self, spec: RopeSpec) -> dict[str, Any]:
        raise InvalidRequestError(
            "Transformers' dynamic rule depends on the length of each forward, and this model can be extended by lists "
            "of divisors alone (longrope). Take dynamic without scope, dynamic_yarn, or a static method such as 'yarn'."
        )

    @classmethod
    def read_options(cls, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().read_options(parameters), "scope": "sequence"}
