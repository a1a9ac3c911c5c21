"""The costs of ``hf-posenc fit`` with its default settings, from the config alone."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from hf_posenc.attention.installation import check_attention
from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.errors import HfPosencError
from hf_posenc.evaluation.memory import shape_of
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.fitting.adapter import projections
from hf_posenc.fitting.config import FitConfig
from hf_posenc.fitting.cost import fit_cost, teacher_extension
from hf_posenc.planning.architecture import Architecture
from hf_posenc.planning.flops import BACKWARD_ATTENTION, attention_forward
from hf_posenc.utils.units import ContextLength


@dataclass(frozen=True)
class PlannedFit:
    """The costs of fitting a rule on one device.

    Attributes:
        memory: Bytes at the peak, the weights included.
        adapted_memory: That of low-rank changes of the weights instead, on one text; None where they are refused.
        disk: Bytes of the recordings.
        teacher_flops: Operations of the teacher's pass over a text.
        step_flops: Operations of all steps.
        measuring_flops: Operations of measuring the fitted rule and those it is compared with on a held-out text.
    """

    memory: int
    adapted_memory: int | None
    disk: int
    teacher_flops: float
    step_flops: float
    measuring_flops: float

    @property
    def flops(self) -> float:
        """Operations in all."""
        return self.teacher_flops + self.step_flops + self.measuring_flops

    def as_dict(self) -> dict[str, Any]:
        """Return everything, JSON-able."""
        return {**asdict(self), "flops": self.flops}


def predict_fit(config: PreTrainedConfig, facts: Architecture, target: int) -> PlannedFit | None:
    """Predict a fit on one text, with one held out.

    Args:
        config: The model's, with the dtype it is loaded in.
        facts: What it is.
        target: The target length, in tokens, past the original one.

    Returns:
        What it takes; None where ``fit`` refuses the model: it is extended already, or its family is not supported.
    """
    original = None if facts.original is None else ContextLength(facts.original)
    settings = FitConfig(context_length=ContextLength(target), original_max_position_embeddings=original)
    model = meta_model(config)
    rotary = RotaryModel(model)
    try:
        teacher = teacher_extension(rotary, settings)
        assert teacher is not None  # the default teacher is a method
        check_attention(rotary, teacher)
    except HfPosencError:
        return None
    shape = shape_of(model)
    given: dict[str, Any] = {"texts": settings.max_texts, "original": original or target, "teacher": teacher}
    cost = fit_cost(shape, settings, **given)
    adapted = None
    with suppress(HfPosencError):
        projections(rotary)
        adapted = fit_cost(shape, replace(settings, adapt_options={}), **given).peak
    attention = target * sum(attention_forward(facts, window, None, target) for window in facts.windows)
    one_pass = 2.0 * facts.matrix_parameters * target + attention
    of_query = 4.0 * facts.num_heads * facts.head_dim * target * (1 + BACKWARD_ATTENTION)
    steps = settings.steps * min(settings.layers, facts.num_layers) * settings.queries * of_query
    # The fitted rule and all of these but the unextended model, which reads less; and two for the hidden numbers.
    rows = len(settings.compare) + 2
    return PlannedFit(cost.peak, adapted, cost.disk, one_pass * settings.max_texts, steps, one_pass * rows)
