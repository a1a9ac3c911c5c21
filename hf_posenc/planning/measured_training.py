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
    IntervalStrategy,
    PreTrainedConfig,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.checkpoint.pretrained import load_weights
from hf_posenc.checkpoint.quantised import in_4bit, keep_layout
from hf_posenc.evaluation.memory import memory_in_use, peak_memory, reset_peak_memory
from hf_posenc.evaluation.model_facts import hash_weights
from hf_posenc.planning.shapes import layer_repeat, text_config, with_layers
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.lora import add_lora
from hf_posenc.training.packing import PackedDataset
from hf_posenc.training.trainer import train, training_arguments
from hf_posenc.utils.console import without_weight_bars
from hf_posenc.utils.dtypes import config_dtype
from hf_posenc.utils.units import TokenCount

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


class _Clock(TrainerCallback):
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
            reset_peak_memory(self.model)
        self.began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.peak = peak_memory(self.model)


# A way to train: the model, Trainer's settings, the blocks, the run, and a callback that has to see it.
Trains = Callable[[Any, TrainingArguments, PackedDataset, FinetuneConfig, TrainerCallback], None]


def train_as_finetune(
    model: Any, args: TrainingArguments, data: PackedDataset, run: FinetuneConfig, clock: TrainerCallback
) -> None:
    """Train as ``finetune`` does."""
    train(model, args, data, run, clock, None, "")


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
    first = with_layers(config, layer_repeat(config))
    _train(first, run, min(seq_len, 64), 2, packed, load_in_4bit, how)  # imports what training needs, and warms it up
    _tidy()
    on_gpu = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if on_gpu else memory_in_use(meta_model(first))
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
) -> _Clock:
    model = _random_model(config, load_in_4bit)
    hash_weights(model)  # so that all of it is in memory
    with tempfile.TemporaryDirectory() as folder:
        blocks = steps * run.per_device_train_batch_size * run.gradient_accumulation_steps
        run = dataclasses.replace(
            run,
            output_dir=folder,
            token_budget=TokenCount(blocks * seq_len),
            report_to="none",
            check_first_loss=False,  # random weights guess, so their losses say nothing
        )
        data = random_blocks(int(text_config(config).vocab_size), seq_len, blocks, packed)
        args = training_arguments(model, run, data)
        args.save_strategy, args.disable_tqdm = IntervalStrategy.NO, True
        trained = add_lora(model, run) if run.lora else model
        clock = _Clock(trained)
        with redirect_stdout(io.StringIO()):  # Trainer prints the losses, of random weights
            how(trained, args, data, run, clock)
    return clock


def _random_model(config: PreTrainedConfig, load_in_4bit: bool) -> Any:
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", config_dtype(config)
    model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    if not load_in_4bit:
        return model.to(device)
    with tempfile.TemporaryDirectory() as folder, without_weight_bars():  # weights are quantised as they are loaded
        model.save_pretrained(folder)
        model = load_weights(folder, dtype=dtype, device_map={"": device}, **in_4bit(dtype))
    for parameter in model.parameters():  # what is not quantised would keep the whole file in memory
        if parameter.is_floating_point():
            parameter.data = parameter.data.clone()
    keep_layout(model)
    _tidy()
    return model


def random_blocks(vocab_size: int, seq_len: int, blocks: int, packed: bool) -> PackedDataset:
    """Return blocks of random tokens: each one document, or more where ``packed``."""
    ids = torch.randint(vocab_size, (blocks * seq_len,), generator=torch.Generator().manual_seed(0))
    documents = torch.split(ids, seq_len // _DOCUMENTS_A_BLOCK + 1) if packed else [ids]
    return PackedDataset(documents, seq_len, eos_token_id=None)


def _tidy() -> None:
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what importing has freed would serve the model without being counted
