"""Our training step against plain Trainer's, and the longest block in a given memory (run by benchmark.py).

Both train the same random weights of a model's shape on the same blocks of one document, with the same gradient
checkpointing, precision and optimizer; Trainer is Transformers' own, with Transformers' own loss.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, Trainer, TrainerCallback, TrainingArguments

from hf_posenc.planning.training_memory import predict_training_memory
from hf_posenc.training import FinetuneConfig
from hf_posenc.training.blocks import TrainingBlocks
from hf_posenc.training.run_plan import RunPlan
from measured_training import MeasuredTraining, measure_training, train_as_finetune

Result = dict[str, Any]
MEMORY_GOAL, SPEED_GOAL = 0.5, 1.0
GRAIN = 512  # tokens; the longest block is a multiple


def train_plainly(
    model: Any, args: TrainingArguments, blocks: TrainingBlocks, plan: RunPlan, clock: TrainerCallback
) -> None:
    """Train as Transformers' Trainer does by itself, on ids and labels."""

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}

    Trainer(model=model, args=args, train_dataset=blocks, data_collator=collate, callbacks=[clock]).train()


WAYS = {"ours": train_as_finetune, "plain": train_plainly}


def settings(bf16: bool) -> FinetuneConfig:
    return FinetuneConfig("unused", gradient_checkpointing=True, bf16=bf16)


def read_config(model: str) -> PreTrainedConfig:
    """Return a model's config with float32 weights, which ours would make of them while training."""
    config = AutoConfig.from_pretrained(model)
    config.dtype = torch.float32
    return config


def benchmark_training(model: str, dtype: str, tokens: int, rounds: int) -> list[Result]:
    """Return the ratios of memory and speed."""
    bf16 = dtype == "bfloat16"
    return [memory_ratio(model, bf16, tokens), speed_ratio(model, bf16, tokens, rounds)]


def memory_ratio(model: str, bf16: bool, tokens: int) -> Result:
    """Compare the peaks of a step, each in a process of its own, and each with what was predicted."""
    peaks = {way: in_a_fresh_process(way, model, bf16, tokens)["peak"] for way in WAYS}
    return {
        "benchmark": f"training step of {tokens} tokens, memory, ours / plain",
        "ratio": peaks["ours"] / peaks["plain"],
        "goal": MEMORY_GOAL,
        "better": "lower",
        **{f"peak_mib_{way}": peak / 2**20 for way, peak in peaks.items()},
        **{f"predicted_mib_{way}": predicted(way, model, bf16, tokens) / 2**20 for way in WAYS},
    }


def speed_ratio(model: str, bf16: bool, tokens: int, rounds: int) -> Result:
    """Compare tokens a second, the two in turn, each first in every other round."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in sorted(WAYS, reverse=number % 2 == 1):
            measured = measure(way, model, bf16, tokens)
            rates[way].append(measured.tokens_per_second)
    ratios = [ours / plain for ours, plain in zip(rates["ours"], rates["plain"], strict=True)]
    return {
        "benchmark": f"training step of {tokens} tokens, tokens/s, ours / plain",
        "ratio": statistics.median(ratios),
        "goal": SPEED_GOAL,
        "better": "higher",
        "ratio_range": [min(ratios), max(ratios)],
        **{f"tokens_per_second_{way}": statistics.median(values) for way, values in rates.items()},
        "rounds": rounds,
    }


def longest_ratio(model: str, bf16: bool, memory: int, train: bool) -> Result:
    """Compare the longest blocks by the prediction; ``train`` each once too, to see what it really takes."""
    lengths = {way: longest(way, model, bf16, memory) for way in WAYS}
    requested = lengths if train else {}
    peaks = {way: in_a_fresh_process(way, model, bf16, length)["peak"] for way, length in requested.items()}
    return {
        "benchmark": f"longest block in {memory / 1e9:g} GB by prediction, ours / plain",
        "ratio": lengths["ours"] / lengths["plain"],
        "goal": 1.0,
        "better": "higher",
        **{f"longest_{way}": length for way, length in lengths.items()},
        **{f"peak_mib_{way}": peak / 2**20 for way, peak in peaks.items()},
    }


def longest(way: str, model: str, bf16: bool, memory: int) -> int:
    """Return the longest block, in steps of 512 tokens, whose predicted peak is within ``memory`` bytes."""
    low, high = 0, 1
    while predicted(way, model, bf16, high * GRAIN) <= memory:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predicted(way, model, bf16, middle * GRAIN) <= memory else (low, middle)
    if not low:
        raise SystemExit(f"{memory} bytes are not enough for a block of {GRAIN} tokens ({way}).")
    return low * GRAIN


def predicted(way: str, model: str, bf16: bool, tokens: int) -> int:
    ours = way == "ours"
    return predict_training_memory(
        read_config(model), settings(bf16).step, tokens, packed=False, chunked_loss=ours
    ).peak


def measure(way: str, model: str, bf16: bool, tokens: int) -> MeasuredTraining:
    return measure_training(read_config(model), settings(bf16), tokens, steps=2, how=WAYS[way])


def in_a_fresh_process(way: str, model: str, bf16: bool, tokens: int) -> Result:
    """Measure where nothing ran before; freed memory goes back at once, so that the peak is that of tensors."""
    command = [sys.executable, str(Path(__file__)), way, model, str(int(bf16)), str(tokens)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    measured = measure(sys.argv[1], sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]))
    print(json.dumps({"peak": measured.peak, "tokens_per_second": measured.tokens_per_second}))
