"""A few steps of the real thing on this machine, with random weights of the model's shape: speed and memory."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.checkpoint.pretrained import load_weights
from hf_posenc.checkpoint.quantised import in_4bit, keep_layout
from hf_posenc.data.packing import PackedDocuments
from hf_posenc.evaluation.memory import memory_in_use, peak_memory, reset_peak_memory
from hf_posenc.evaluation.model_facts import hash_weights
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.planning.shapes import layer_pattern, text_config, with_layers
from hf_posenc.training.base_model_facts import ModelFacts
from hf_posenc.training.blocks import PackedBlocks, TrainingBlocks
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.launch import Launch
from hf_posenc.training.lora import add_lora
from hf_posenc.training.positions import FULL, PositionSchedule
from hf_posenc.training.run_plan import RunPlan, plan_run
from hf_posenc.training.trainer import train, training_arguments
from hf_posenc.utils.console import without_weight_bars
from hf_posenc.utils.dtypes import config_dtype
from hf_posenc.utils.units import ContextLength, TokenCount

_DOCUMENTS_A_BLOCK = 3


@dataclass(frozen=True)
class MeasuredTraining:
    """What some optimizer steps took, the first one left out: it makes AdamW's states.

    Attributes:
        seq_len: Tokens of a block.
        tokens_per_step: Over all blocks of a step.
        seconds_per_step: The median.
        peak: Bytes at the peak, on Linux or a GPU, beyond what was in use before the model was made.
    """

    seq_len: int
    tokens_per_step: int
    seconds_per_step: float
    peak: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds_per_step


class Clock(TrainerCallback):
    """Takes the time of each step and lets the peak start again after the first one."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.began = 0.0
        self.seconds: list[float] = []
        self.peak = 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == 1:
            reset_peak_memory(self.model.device)
        self.began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.peak = peak_memory(self.model.device)


# A way to train: the model, Trainer's settings, the blocks, the plan, and a callback that has to see every step.
Trains = Callable[[Any, TrainingArguments, TrainingBlocks, RunPlan, TrainerCallback], None]


def train_as_finetune(
    model: Any, args: TrainingArguments, blocks: TrainingBlocks, plan: RunPlan, clock: TrainerCallback
) -> None:
    """Train as ``finetune`` does."""
    train(model, args, blocks, plan, plan.stages[0], clock)


def prepare(
    model: Any, run: FinetuneConfig, seq_len: int, steps: int, folder: str, *, packed: bool = False
) -> tuple[RunPlan, TrainingArguments, TrainingBlocks]:
    """Return the plan, Trainer's settings and the blocks of some steps on random tokens, which save nothing.

    Args:
        model: Is not extended; positions are consecutive.
        run: The settings; budget, folder and saving are not used.
        seq_len: Tokens of a block.
        steps: Optimizer steps.
        folder: For Trainer's files.
        packed: Put three documents into each block, not one.
    """
    per_step = run.per_device_train_batch_size * run.gradient_accumulation_steps
    run = dataclasses.replace(
        run,
        output_dir=folder,
        seq_len=ContextLength(seq_len),
        token_budget=TokenCount(steps * per_step * seq_len),
        context_length=ContextLength(max(seq_len, 2 * text_config(model.config).max_position_embeddings)),
        factor=None,
        position_schedule="full",
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    plan = plan_run(run, ModelFacts.of(RotaryModel(model)), Launch())
    plain = dataclasses.replace(plan.stages[0], positions=PositionSchedule(FULL, seq_len, seq_len))
    plan = dataclasses.replace(plan, stages=(plain,))
    ids = torch.randint(
        int(text_config(model.config).vocab_size),
        (plain.num_blocks * seq_len,),
        generator=torch.Generator().manual_seed(0),
    )
    documents = torch.split(ids, seq_len // _DOCUMENTS_A_BLOCK + 1) if packed else [ids]
    blocks = PackedBlocks(
        PackedDocuments(documents, seq_len, eos_token_id=None), plain.positions, plain.num_blocks, plain.seed
    )
    return plan, training_arguments(plain.trainer), blocks


def measure_training(
    config: PreTrainedConfig,
    run: FinetuneConfig,
    seq_len: int,
    *,
    steps: int = 3,
    packed: bool = False,
    load_in_4bit: bool = False,
    how: Trains = train_as_finetune,
) -> MeasuredTraining:
    """Train a model of random weights for some steps as ``finetune`` does, on a GPU where one exists.

    Args:
        config: The model's.
        run: The settings; budget, folder and saving are not used.
        seq_len: Tokens of a block.
        steps: Optimizer steps, at least 2.
        packed: Put three documents into each block, not one.
        load_in_4bit: Quantise the weights, which ``run`` trains adapters on.
        how: What trains; for comparisons.
    """
    first = with_layers(config, sum(layer_pattern(config)))
    _train(first, run, min(seq_len, 64), 2, packed, load_in_4bit, how)  # imports what training needs, and warms it up
    tidy()
    on_gpu = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if on_gpu else memory_in_use(meta_model(first).device)
    clock = _train(config, run, seq_len, steps, packed, load_in_4bit, how)
    blocks = run.per_device_train_batch_size * run.gradient_accumulation_steps
    return MeasuredTraining(seq_len, blocks * seq_len, statistics.median(clock.seconds[1:]), clock.peak - before)


def _train(
    config: PreTrainedConfig,
    run: FinetuneConfig,
    seq_len: int,
    steps: int,
    packed: bool,
    load_in_4bit: bool,
    how: Trains,
) -> Clock:
    model = random_model(config, load_in_4bit)
    hash_weights(model)  # so that all of it is in memory
    with tempfile.TemporaryDirectory() as folder:
        plan, args, blocks = prepare(model, run, seq_len, steps, folder, packed=packed)
        trained = model if plan.step.lora is None else add_lora(model, plan.step.lora)
        clock = Clock(trained)
        with redirect_stdout(io.StringIO()):  # Trainer prints the losses, of random weights
            how(trained, args, blocks, plan, clock)
    return clock


def random_model(config: PreTrainedConfig, load_in_4bit: bool = False) -> Any:
    """Return a model of random weights in the dtype of its config, made on the GPU where one exists."""
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", config_dtype(config)
    with torch.device("cpu" if load_in_4bit else device):
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    if not load_in_4bit:
        return model
    with tempfile.TemporaryDirectory() as folder, without_weight_bars():  # weights are quantised as they are loaded
        model.save_pretrained(folder)
        model = load_weights(folder, dtype=dtype, device_map={"": device}, **in_4bit(dtype))
    for parameter in model.parameters():  # what is not quantised would keep the whole file in memory
        if parameter.is_floating_point():
            parameter.data = parameter.data.clone()
    keep_layout(model)
    tidy()
    return model


def tidy() -> None:
    """Give memory that is free back to the system, and to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what importing has freed would serve the model without being counted
