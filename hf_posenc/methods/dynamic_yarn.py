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
    paper: ClassVar[str] = "Peng et al. 2023, arXiv:2309.00071, sections 3.2 to 3.4; stages: hf_posenc"
    summary: ClassVar[str] = (
        "YaRN in stages, by the position of each query: exact with a KV cache, nothing lost on short texts."
    )

    def at(self, factor: float) -> StaticMethod:
        return Yarn(factor, **{name: getattr(self, name) for name in YarnOptions.option_fields()})
