"""What hf_posenc costs and saves, as ratios measured in one process on this machine.

    python scripts/benchmark.py curve     # a 64-point perplexity curve: one pass against one forward a length
    python scripts/benchmark.py patched   # a patched model against one built natively from the same config
    python scripts/benchmark.py staged    # dynamic_yarn against the unpatched model and static yarn
    python scripts/benchmark.py evaluation  # the YaRN authors' procedure, lm-eval and evaluate against perplexity
    python scripts/benchmark.py training --tokens 8192  # a training step against plain Trainer's: memory and speed
    python scripts/benchmark.py retrieval --tokens 16384  # questions that share a text against a prefill for each
    python scripts/benchmark.py longest   # the longest training block in a memory, ours and plain, as predicted
    python scripts/benchmark.py all       # but retrieval and longest

scripts/gpu_check measures what a GPU is needed for. Prints one JSON line for each ratio, then a table.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmark_evaluation import benchmark_evaluation, print_comparison
from benchmark_retrieval import benchmark_retrieval
from benchmark_staged import benchmark_staged
from benchmark_training import benchmark_training, longest_ratio
from hf_posenc import extend_config, patch_model
from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.data.reading import tokenize_text
from hf_posenc.evaluation import perplexity
from hf_posenc.utils.units import MemorySize

Result = dict[str, Any]
CURVES = ("one_pass", "pass_per_length")
CLEAR_REFS = Path("/proc/self/clear_refs")


def main() -> None:
    args = parse_arguments()
    if args.memory_of is not None:
        print(measure_memory(args))
        return
    results = []
    if args.what in ("curve", "all"):
        results.append(benchmark_curve(args))
    if args.what in ("patched", "all"):
        results += benchmark_patched(args)
    if args.what in ("staged", "all"):
        results += benchmark_staged(getattr(torch, args.dtype), args.rounds // 2, alternate, facts)
    if args.what in ("evaluation", "all"):
        results += benchmark_evaluation(args.model, args.dtype, rounds=3)
    if args.what in ("training", "all"):
        results += benchmark_training(args.model, args.dtype, args.tokens, max(2, args.rounds // 10))
    if args.what == "retrieval":
        model = load_model(args.model, dtype=args.dtype)
        results.append(benchmark_retrieval(*model, args.tokens, args.questions, args.prefills))
    if args.what == "longest":
        results.append(longest_ratio(args.model, args.dtype == "bfloat16", args.memory, args.train_longest))
    for result in results:
        print(json.dumps(result))
    print_table(results)
    if args.what in ("evaluation", "all"):
        print_comparison(results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", choices=("curve", "patched", "staged", "evaluation", "training", "retrieval", "longest", "all")
    )
    parser.add_argument("--model", default=str(tiny_model_path()), help="name, folder or .gguf; the tiny model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--points", type=int, default=64, help="lengths of the curve")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest length")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of the patched against the native model")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of one forward, training step or prompt")
    parser.add_argument("--questions", type=int, default=100, help="retrieval: of one text of --tokens")
    parser.add_argument("--prefills", type=int, default=4, help="retrieval: questions that are also put alone")
    parser.add_argument("--memory", type=MemorySize, default=MemorySize("20GB"), help="longest: what it must fit into")
    parser.add_argument("--train-longest", action="store_true", help="longest: train them too (hours on a CPU)")
    parser.add_argument("--memory-of", choices=CURVES, help=argparse.SUPPRESS)  # how the script calls itself
    return parser.parse_args()


# ---- curve ------------------------------------------------------------------------------------------------------


def benchmark_curve(args: argparse.Namespace) -> Result:
    """Compare the two ways to the same curve: seconds (median of 3 repeats), peak memory, largest difference."""
    memory = {name: memory_in_a_fresh_process(name, args) for name in CURVES}
    model, ids, lengths = curve_inputs(args)
    curve_one_pass(model, ids, lengths[:2]), curve_pass_per_length(model, ids, lengths[:2])  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in CURVES}
    curves: dict[str, list[float]] = {}
    for _ in range(3):
        for name in CURVES:
            seconds[name].append(timed(lambda name=name: curves.update({name: CURVE[name](model, ids, lengths)})))
    ratios = [slow / fast for fast, slow in zip(*seconds.values(), strict=True)]
    differences = [abs(a - b) / b for a, b in zip(*curves.values(), strict=True)]
    return {
        "benchmark": f"curve of {len(lengths)} lengths up to {lengths[-1]}",
        "ratio": statistics.median(ratios),
        "goal": 15.0,
        "better": "higher",
        **{f"seconds_{name}": statistics.median(values) for name, values in seconds.items()},
        **{f"peak_memory_mib_{name}": value / 2**20 for name, value in memory.items()},
        "max_relative_difference": max(differences),
        "max_relative_difference_goal": 1e-4,
        **facts(model),
    }


def curve_inputs(args: argparse.Namespace) -> tuple[PreTrainedModel, torch.Tensor, list[int]]:
    model, tokenizer = load_model(args.model, dtype=args.dtype)
    lengths = [args.longest * point // args.points for point in range(1, args.points + 1)]
    ids = tokenize_text(tokenizer, load_novel(HELD_OUT_NOVEL)[: 16 * args.longest])[: args.longest]
    return model, ids, lengths


def curve_one_pass(model: PreTrainedModel, ids: torch.Tensor, lengths: list[int]) -> list[float]:
    return [record.perplexity for record in perplexity(model, [ids], lengths, progress=False)]


@torch.no_grad()
def curve_pass_per_length(model: PreTrainedModel, ids: torch.Tensor, lengths: list[int]) -> list[float]:
    """One forward for each length with the logits of all its tokens, the loss taken by Transformers."""
    curve = []
    for length in lengths:
        batch = ids[None, :length].to(model.device)
        curve.append(math.exp(model(input_ids=batch, labels=batch, use_cache=False).loss.item()))
    return curve


CURVE = {"one_pass": curve_one_pass, "pass_per_length": curve_pass_per_length}


def memory_in_a_fresh_process(name: str, args: argparse.Namespace) -> int:
    """Return bytes: a process' peak cannot be measured twice, so each way to the curve has its own."""
    options = ["--model", args.model, "--dtype", args.dtype, "--points", args.points, "--longest", args.longest]
    command = [sys.executable, Path(__file__), "curve", "--memory-of", name, *options]
    output = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout
    return int(output.split()[-1])


def measure_memory(args: argparse.Namespace) -> int:
    """Return the bytes a curve needs at its peak beyond the loaded and warmed-up model."""
    model, ids, lengths = curve_inputs(args)
    CURVE[args.memory_of](model, ids, lengths[:2])
    before = reset_peak_bytes()
    CURVE[args.memory_of](model, ids, lengths)
    return peak_bytes() - before


def reset_peak_bytes() -> int:
    """Let the peak start again from what is in use now, and return that; on Linux or a GPU, else there is no such."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif CLEAR_REFS.exists():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what loading has freed would serve the curve without being counted
        CLEAR_REFS.write_text("5")  # resets VmHWM, see proc_pid_clear_refs(5)
    return peak_bytes()


def peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if CLEAR_REFS.exists():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---- patched ----------------------------------------------------------------------------------------------------


def benchmark_patched(args: argparse.Namespace) -> list[Result]:
    """Compare a model patched with yarn x4 with one that Transformers builds from the same extended config."""
    patched, native = patched_and_native(args)
    batch = torch.randint(0, native.config.vocab_size, (1, args.tokens), device=native.device)
    if not torch.equal(patched(batch).logits, native(batch).logits):
        raise SystemExit("the patched and the native model differ, so their times do not compare.")
    return [
        {
            "benchmark": f"patched / native, {name} of {args.tokens} tokens",
            **alternate(lambda step=step: step(patched, batch), lambda step=step: step(native, batch), args.rounds),
            "goal": 1.02,
            "better": "lower",
            **facts(native),
        }
        for name, step in (("forward", forward), ("training step", training_step))
    ]


def patched_and_native(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedModel]:
    config = AutoConfig.from_pretrained(args.model)
    dtype = getattr(torch, args.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    native = AutoModelForCausalLM.from_config(extend_config(config, method="yarn", factor=4), dtype=dtype)
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(native.state_dict())
    return patch_model(plain.to(device), method="yarn", factor=4), native.to(device)


@torch.no_grad()
def forward(model: PreTrainedModel, batch: torch.Tensor) -> None:
    model(input_ids=batch, use_cache=False)


def training_step(model: PreTrainedModel, batch: torch.Tensor) -> None:
    model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    model.zero_grad()


def alternate(one: Callable[[], object], other: Callable[[], object], rounds: int) -> Result:
    """Time both in turn, first one first, then the other first; the ratio is the median over the rounds."""
    for _ in range(3):  # warm up
        one(), other()
    times: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2 == 0:
            first = timed(one)
            times.append((first, timed(other)))
        else:
            first = timed(other)
            times.append((timed(one), first))
    ratios = sorted(a / b for a, b in times)
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[rounds // 4], ratios[3 * rounds // 4]],
        "seconds_patched": statistics.median(a for a, _ in times),
        "seconds_native": statistics.median(b for _, b in times),
        "rounds": rounds,
    }


# ---- shared -----------------------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def facts(model: PreTrainedModel) -> Result:
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {"parameters": model.num_parameters(), "dtype": str(model.dtype), "device": device}


def print_table(results: list[Result]) -> None:
    print(f"\n{'what':56} {'value':>8}  goal")
    for result in results:
        print_row(result["benchmark"], result["ratio"], result["better"], result["goal"])
        if "max_relative_difference" in result:
            difference, goal = result["max_relative_difference"], result["max_relative_difference_goal"]
            print_row("  largest relative difference of the curves", difference, "lower", goal)
            for name in CURVES:
                seconds, memory = result[f"seconds_{name}"], result[f"peak_memory_mib_{name}"]
                print(f"{'  ' + name.replace('_', ' '):48} {seconds:6.2f} s, {memory:.0f} MiB more at its peak")


def print_row(what: str, value: float, better: str, goal: float) -> None:
    met = value >= goal if better == "higher" else value <= goal
    sign = ">=" if better == "higher" else "<="
    print(f"{what:56} {value:8.4g}  {sign} {goal:g}: {'met' if met else 'MISSED'}")


if __name__ == "__main__":
    main()
