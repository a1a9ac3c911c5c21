"""``hf-posenc plan``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_posenc.cli.shared_arguments import MODEL, parse
from hf_posenc.utils.units import ContextLength, MemorySize, TokenCount

# Of the training that is planned, and what goes to ``plan`` by the same name.
_SETTINGS = (
    *("lora", "gradient_checkpointing", "packing", "bf16"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
)
_SHARED = (
    *("gpu_memory", "gpus", "training", "token_budget", "original_max_position_embeddings", "server", "dtype"),
    *("tokens_per_second", "tflops", "sliding_window"),
)


@dataclass
class PlanArguments:
    """How far, with which memory, and how fast."""

    HELP_COMMON: ClassVar[tuple[str, ...]] = (
        *("context_length", "gpu_memory", "gpus", "training", "token_budget", "server", "recipe", "lora"),
        *("gradient_checkpointing", "json"),
    )

    context_length: ContextLength = field(metadata={"help": "tokens the model is to read (128k = 131072)"})
    gpu_memory: MemorySize | None = field(
        default=None, metadata={"help": "memory of one GPU, such as 24GB: also show what fits, and the longest text"}
    )
    gpus: int = field(default=1, metadata={"help": "number of GPUs with that memory"})
    training: bool = field(
        default=False,
        metadata={
            "help": "also plan training: what fits, and the finetune command for each way; implied by any flag that "
            "is about training"
        },
    )
    token_budget: TokenCount | None = field(
        default=None, metadata={"help": "tokens to train on (1M); without it, the answer includes whether to train"}
    )
    original_max_position_embeddings: ContextLength | None = field(
        default=None, metadata={"help": "tokens the model was trained on; default: the value in its config"}
    )
    server: bool = field(default=False, metadata={"help": "consider only static methods, which servers can run"})
    sliding_window: str = field(
        default="keep",
        metadata={"help": "sliding window of a model that has one in every layer: keep, off or a number of tokens"},
    )
    recipe: str | None = field(
        default=None,
        metadata={"help": "a recipe from `hf-posenc list recipes`; other flags override its values"},
    )
    lora: bool = field(default=False, metadata={"help": "train only adapters, the embedding and the norms"})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "recompute each layer in the backward pass"})
    dtype: str = field(
        default="auto",
        metadata={
            "help": "dtype of the weights; auto: the checkpoint's own with --gpu-memory, else what this machine "
            "computes natively, as in eval and finetune"
        },
    )
    bf16: bool | None = field(
        default=None, metadata={"help": "compute in bfloat16; default: true if the weights are in half precision"}
    )
    per_device_train_batch_size: int | None = field(
        default=None, metadata={"help": "blocks in one forward pass; default: as in finetune"}
    )
    gradient_accumulation_steps: int | None = field(
        default=None, metadata={"help": "forward passes per optimizer step; default: as in finetune"}
    )
    packing: bool = field(
        default=True,
        metadata={"help": "false: each training block is one document, and attention needs no mask of block x block"},
    )
    tokens_per_second: float | None = field(
        default=None, metadata={"help": "measured training speed at the planned length, to compute the hours"}
    )
    tflops: float | None = field(
        default=None,
        metadata={
            "help": "sustained speed of the device in TFLOPS (10^12 operations per second), to compute the hours"
        },
    )
    json: bool = field(default=False, metadata={"help": "print JSON instead of a table"})


def plan(argv: Sequence[str]) -> None:
    """Predict memory and time of a context length, and suggest method, recipe and settings; reads the config only.

    Examples:
        hf-posenc plan MODEL --context-length 128k --gpu-memory 24GB
        hf-posenc plan MODEL --context-length 32k --gpu-memory 24GB --training
    """
    positional = {"model": f"{MODEL['model']}; its weights are not read"}
    given, what = parse("plan", plan.__doc__, argv, (PlanArguments,), positional, defaults=_of_recipe)
    from hf_posenc.planning.planner import plan as make_plan
    from hf_posenc.planning.text import plan_text
    from hf_posenc.training.config import FinetuneConfig

    settings = {name: getattr(what, name) for name in _SETTINGS}
    run = None
    if what.recipe is not None:
        set_ones = {name: value for name, value in settings.items() if value is not None}
        run = FinetuneConfig.from_recipe(what.recipe, output_dir="plan", **set_ones)
    elif changed := {name: value for name, value in settings.items() if value != getattr(PlanArguments, name)}:
        run = FinetuneConfig("plan", **changed)
    made = make_plan(given.model, what.context_length, run=run, **{name: getattr(what, name) for name in _SHARED})
    print(json.dumps(made.as_dict(), indent=2) if what.json else plan_text(made))


def _of_recipe(flags: argparse.Namespace) -> dict[str, Any]:
    """Return what the recipe, if one is given, sets of the flags."""
    from hf_posenc.training.recipes import recipe_values

    name = getattr(flags, "recipe", None)
    values = {} if name is None else recipe_values(name, {})
    return {name: values[name] for name in _SETTINGS if name in values}
