"""``hf-posenc plan``."""

from __future__ import annotations

import json

from hf_posenc.planning.arguments import PlanArguments
from hf_posenc.planning.planner import plan
from hf_posenc.planning.text import plan_text
from hf_posenc.training.config import FinetuneConfig


def run_plan(model: str, what: PlanArguments) -> str:
    """Return what the command prints.

    Raises:
        ValueError, TypeError: As ``plan``.
    """
    settings = ("lora", "gradient_checkpointing", "bf16", "micro_batch_size", "gradient_accumulation_steps")
    shared = ("gpu_memory", "token_budget", "original_max_position_embeddings", "server", "whole_documents", "dtype")
    made = plan(
        model,
        what.context_length,
        run=FinetuneConfig("plan", **{name: getattr(what, name) for name in settings}),
        tokens_per_second=what.tokens_per_second,
        tflops=what.tflops,
        measure_length=what.measure_length if what.measure else None,
        **{name: getattr(what, name) for name in shared},
    )
    return json.dumps(made.as_dict(), indent=2) if what.json else plan_text(made)
