"""The plan of a run on a model, as ``finetune`` makes it in one process."""

from __future__ import annotations

from typing import Any

from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import describe
from hf_posenc.training import FinetuneConfig
from hf_posenc.training.base_model_facts import ModelFacts
from hf_posenc.training.extending import choose_extension, extend
from hf_posenc.training.launch import Launch
from hf_posenc.training.run_plan import RunPlan, plan_run


def plan_for(config: FinetuneConfig, model: Any) -> RunPlan:
    return plan_run(config, ModelFacts.of(RotaryModel(model)), Launch())


def extended_by(config: FinetuneConfig, model: Any) -> dict[str, Any]:
    """Extend a model as a run does, and return what ``describe`` says of it."""
    rotary = RotaryModel(model)
    extend(rotary, choose_extension(config.request(), ModelFacts.of(rotary)))
    return describe(model)
