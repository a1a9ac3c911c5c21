"""``hf-posenc plan``."""

from __future__ import annotations

import json

from hf_posenc.cli.plan_arguments import PlanArguments
from hf_posenc.planning.planner import plan
from hf_posenc.planning.text import plan_text
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.recipes import get_recipe

# Of the training that is planned, and what goes to ``plan`` by the same name.
_SETTINGS = ("lora", "gradient_checkpointing", "bf16", "per_device_train_batch_size", "gradient_accumulation_steps")
_SHARED = (
    *("gpu_memory", "gpus", "training", "token_budget", "original_max_position_embeddings", "server", "dtype"),
    *("whole_documents", "tokens_per_second", "tflops"),
)


def run_plan(model: str, what: PlanArguments) -> str:
    """Return what the command prints.

    Raises:
        ValueError, TypeError: As ``plan``.
    """
    told = {name: getattr(what, name) for name in _SETTINGS if getattr(what, name) != getattr(PlanArguments, name)}
    run, load_in_4bit = None, False
    if what.recipe is not None:
        run, loading = (
            FinetuneConfig.from_recipe(what.recipe, output_dir="plan", **told),
            get_recipe(what.recipe).loading,
        )
        load_in_4bit = bool(loading.get("load_in_4bit"))
    elif told:
        run = FinetuneConfig("plan", **told)
    made = plan(
        model,
        what.context_length,
        run=run,
        load_in_4bit=load_in_4bit,
        measure_length=what.measure_length if what.measure else None,
        **{name: getattr(what, name) for name in _SHARED},
    )
    return json.dumps(made.as_dict(), indent=2) if what.json else plan_text(made)
