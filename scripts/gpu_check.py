"""What hf_posenc does and costs on one GPU, the most important first (run by scripts/gpu_check).

Each step says how long it takes on an H100; one that no longer fits into the time is left out, and named. The records
are written after each step, so that a run that is cut off counts as far as it came.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import statistics
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # also where hf_posenc is not installed


def missing_packages() -> list[str]:
    """Return what hf_posenc and its tests need and this Python does not have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = []
    for requirement in (*project["dependencies"], "peft", "pytest"):
        name = re.split(r"[^\w.-]", requirement)[0]
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    return missing


if missing := missing_packages():
    sys.exit(f"gpu_check needs packages that {sys.executable} does not have: pip install {' '.join(missing)}")

import torch  # noqa: E402
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, PreTrainedModel  # noqa: E402
from transformers.utils import is_flash_attn_2_available  # noqa: E402
from transformers.utils.import_utils import is_liger_kernel_available  # noqa: E402

from benchmark import timed  # noqa: E402
from benchmark_retrieval import benchmark_retrieval  # noqa: E402
from benchmark_training import WAYS  # noqa: E402
from hf_posenc import FitConfig, fit_method, patch_model, perplexity  # noqa: E402
from hf_posenc.assets import tiny_model_path  # noqa: E402
from hf_posenc.planning.training_memory import predict_training_memory  # noqa: E402
from hf_posenc.training import FinetuneConfig  # noqa: E402
from hf_posenc.utils.files import write_whole  # noqa: E402
from measured_training import measure_training, random_model, tidy  # noqa: E402

Result = dict[str, Any]
NATIVE = "native"
FACTOR = 4
DECODED = 32  # tokens


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        small: A model of 1.5 billion weights (the shape of Qwen2.5-1.5B).
        large: One of 8 billion (Llama-3.1-8B).
        lengths: Tokens of the two prefills; the models were trained on a quarter of them.
        block: Tokens of a training block whose speed is measured.
        questions: Put to one text.
        rounds: How often each time is taken.
        methods: Compared with native attention; the last one not with the large model, nor at the longer length.
    """

    small: LlamaConfig
    large: LlamaConfig
    lengths: tuple[int, int] = (32768, 131072)
    block: int = 16384
    questions: int = 100
    rounds: int = 5
    methods: tuple[str, ...] = ("yarn", "dynamic_yarn", "dca", "rerope")


def shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        dtype="bfloat16",
    )


GPU = Sizes(shape(1536, 8960, 28, 12, 2, 151936), shape(4096, 14336, 32, 32, 8, 128256))
TINY = Sizes(
    shape(64, 128, 2, 4, 2, 2048), shape(64, 128, 4, 4, 2, 2048), (256, 512), 128, 3, 1, ("yarn", "dca", "rerope")
)


# ---- models and times ----


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def variants(model: PreTrainedModel, length: int, methods: tuple[str, ...]) -> dict[str, PreTrainedModel]:
    """Return the model as it is, and extended to ``length`` by each method; all share their weights."""
    made = {}
    for name in (NATIVE, *methods):
        made[name] = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        made[name].config.max_position_embeddings = length // FACTOR
        if name != NATIVE:
            patch_model(made[name], name, FACTOR)
    return made


def interleaved(works: dict[str, Callable[[], object]], rounds: int) -> Result:
    """Take the times of all works in turn; return their medians, and the median ratio of each to the first."""
    for work in works.values():  # kernels are compiled, and memory is there
        timed(work)
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        for name in sorted(works, reverse=number % 2 == 1):
            times[name].append(timed(works[name]))
    first, *others = works

    def ratio(name: str, to: str) -> float:
        return statistics.median(ours / theirs for ours, theirs in zip(times[name], times[to], strict=True))

    result: Result = {"seconds": {name: statistics.median(values) for name, values in times.items()}}
    result[f"ratio to {first}"] = {name: ratio(name, first) for name in others}
    if "yarn" in works:
        result["ratio to yarn"] = {name: ratio(name, "yarn") for name in others if name != "yarn"}
    return {**result, "rounds": rounds}


@contextmanager
def free_memory() -> Iterator[None]:
    """Give memory back before and afterwards."""
    tidy()
    try:
        yield
    finally:
        tidy()


# ---- the steps ----


def run_tests(sizes: Sizes, limit: float) -> Result:
    """Run a sample of tests/gpu in which each function meets each value of each of its parameters."""
    command = [sys.executable, str(Path(__file__)), "--tests", str(limit)]
    # What is not installed may be on the path that this process was started with.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    if sizes is TINY:
        environment |= {"HF_POSENC_TEST_DEVICE": "cpu", "HF_POSENC_GPU_CHECK_TINY": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    *output, last = done.stdout.strip().splitlines() or [""]
    print("\n".join(output[-40:]))
    if not last.startswith("{"):
        raise RuntimeError(f"the tests did not run: {done.stdout[-2000:]}")
    return dict(json.loads(last))


class Sample:
    """A plugin of pytest that selects tests, stops in time, and counts."""

    # In full: each method in each dtype, each method under each attention implementation.
    FULL = ("test_logits_are_those_of_float64", "test_each_attention_implementation")

    def __init__(self, limit: float, tiny: bool) -> None:
        self.ends, self.tiny = time.monotonic() + limit, tiny
        self.counts: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
        self.failed: list[str] = []
        self.selected = self.collected = 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        met: set[Any] = set()
        first, later = [], []
        for item in items:
            parameters = item.callspec.params if hasattr(item, "callspec") else {"": None}
            values = {(item.function.__name__, name, str(value)) for name, value in parameters.items()}
            if item.function.__name__ in self.FULL:
                first.append(item)
            elif values - met:
                later.append(item)
                met |= values
        self.collected = len(items)
        items[:] = [*first, *later][: 3 if self.tiny else None]
        self.selected = len(items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.counts[report.outcome] += 1
            if report.failed:
                self.failed.append(report.nodeid)

    def pytest_runtest_setup(self, item: Any) -> None:
        if time.monotonic() > self.ends:
            item.session.shouldstop = "no time is left"


def sampled_tests(limit: float) -> None:
    """Run the tests in this process and print their counts as the last line."""
    import pytest

    sample = Sample(limit, "HF_POSENC_GPU_CHECK_TINY" in os.environ)
    # Warnings of other versions of PyTorch than the pinned one are no failures.
    pytest.main(["tests/gpu", "-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider"], plugins=[sample])
    kept = {"tests_in_all": sample.collected, "selected": sample.selected, **sample.counts, "failures": sample.failed}
    print(json.dumps(kept))


def ratios(config: LlamaConfig, length: int, rounds: int, methods: tuple[str, ...]) -> Result:
    """Compare each method with native attention: up to the trained length, in a prefill, and decoding after it."""
    with free_memory(), torch.no_grad():
        models = variants(random_model(config).eval(), length, methods)
        ids = torch.randint(0, config.vocab_size, (1, length), device=device())

        def forward(model: PreTrainedModel, count: int) -> Callable[[], object]:
            return lambda: model(input_ids=ids[:, :count], use_cache=False, logits_to_keep=1)

        results: Result = {}
        for what, count in (("trained length", length // FACTOR), ("prefill", length)):
            works = {name: forward(model, count) for name, model in models.items()}
            results[f"{what}, {count} tokens"] = interleaved(works, rounds)
        works = {name: decoding(model, ids) for name, model in models.items()}
        results[f"decoding {DECODED} tokens after {length}"] = interleaved(works, rounds)
        return results


def decoding(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], object]:
    """Return what feeds some tokens one by one after a text that is in the cache already."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, : -4 * DECODED], past_key_values=cache, logits_to_keep=1)

    def work() -> None:
        for step in range(DECODED):
            model(input_ids=ids[:, step : step + 1], past_key_values=cache)

    return work


def step_ratios(config: LlamaConfig, length: int, rounds: int, methods: tuple[str, ...]) -> Result:
    """Compare forward and backward of the layers with gradient checkpointing; the loss is the same for all."""
    with free_memory():
        models = variants(random_model(config).eval(), length, methods)
        ids = torch.randint(0, config.vocab_size, (1, length), device=device())

        def step(model: PreTrainedModel) -> Callable[[], object]:
            model.train()
            with warnings.catch_warnings():  # Transformers 5.23 renames it
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": False})

            def work() -> None:
                model.model(input_ids=ids, use_cache=False).last_hidden_state.float().square().mean().backward()
                model.zero_grad(set_to_none=True)

            return work

        return interleaved({name: step(model) for name, model in models.items()}, rounds)


def lora_memory(config: LlamaConfig, length: int) -> Result:
    """Compare the peak of a LoRA step with what ``hf-posenc plan`` predicts."""
    run = FinetuneConfig("unused", lora=True, gradient_checkpointing=True, bf16=torch.cuda.is_available())
    with free_memory():
        predicted = predict_training_memory(config, run.step, length, packed=False).peak
        started = time.perf_counter()
        measured = measure_training(config, run, length, steps=2)
    return {
        "tokens": length,
        "measured_gib": measured.peak / 2**30,
        "predicted_gib": predicted / 2**30,
        "predicted / measured": predicted / measured.peak,
        "tokens_per_second": measured.tokens_per_second,
        "seconds_with_the_model_made": time.perf_counter() - started,
    }


def training_speed(config: LlamaConfig, length: int) -> Result:
    """Compare tokens per second and peaks of our training step with plain Trainer's, all weights trained."""
    run, measured = FinetuneConfig("unused", gradient_checkpointing=True, bf16=torch.cuda.is_available()), {}
    for way, train in WAYS.items():
        with free_memory():
            measured[way] = measure_training(config, run, length, steps=3, how=train)
    ours, plain = measured["ours"], measured["plain"]
    return {
        "tokens": length,
        "liger_kernel": is_liger_kernel_available(),  # used by both where it is installed
        "tokens_per_second": {way: each.tokens_per_second for way, each in measured.items()},
        "peak_gib": {way: each.peak / 2**30 for way, each in measured.items()},
        "tokens_per_second, ours / plain": ours.tokens_per_second / plain.tokens_per_second,
        "peak, ours / plain": ours.peak / plain.peak,
    }


def long_evaluation(config: LlamaConfig, length: int, questions: int) -> Result:
    """Take a perplexity curve in one pass, and put many questions to one text that is read once."""
    with free_memory():
        model = patch_model(random_model(config).eval(), "yarn", -(-length // config.max_position_embeddings))
        ids = torch.randint(0, config.vocab_size, (length,))
        lengths = [length >> shift for shift in range(4, -1, -1)]
        took = timed(lambda: perplexity(model, [ids], lengths, progress=False))
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
        asked = benchmark_retrieval(model, tokenizer, length, questions, 2)
    return {"curve_seconds": took, "lengths": lengths, "questions": asked}


def adapted_layers(config: LlamaConfig, length: int, layers: int = 2) -> Result:
    """Take the time and the peak of low-rank changes that are fitted in some layers (``hf-posenc fit --adapt``)."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    config.max_position_embeddings = length // FACTOR
    fit = FitConfig(context_length=length, held_out=0, compare=[], adapt_options={}, hide_progress=True)
    with free_memory():
        model = random_model(config).eval()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(lambda: fit_method(model, None, [torch.randint(0, config.vocab_size, (length,))], fit))
        weights = sum(each.nbytes for each in model.parameters())
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else weights
    return {"tokens": length, "layers": layers, "seconds": seconds, "peak_gib_beside_weights": (peak - weights) / 2**30}


@dataclass(frozen=True)
class Step:
    """A part of the check.

    Attributes:
        name: In the records.
        seconds: About what it takes on an H100; it is not started with less left.
        run: Takes the seconds that it may take.
    """

    name: str
    seconds: float
    run: Callable[[float], Result]


def steps(sizes: Sizes) -> list[Step]:
    """Return all steps, the most important first."""
    small, large, (long, longest), rounds = sizes.small, sizes.large, sizes.lengths, sizes.rounds
    few, methods = max(1, rounds // 2), sizes.methods
    return [
        Step("tests", 60, lambda left: run_tests(sizes, min(150, left - 20))),
        Step(f"1.5B, {long} tokens", 60, lambda left: ratios(small, long, rounds, methods)),
        Step(f"8B, LoRA step of {long} tokens", 40, lambda left: lora_memory(large, long)),
        Step(f"8B, adapted layers at {longest} tokens", 40, lambda left: adapted_layers(large, longest)),
        Step(f"8B, {long} tokens", 60, lambda left: ratios(large, long, few, methods[:-1])),
        Step(f"1.5B, training step of {long} tokens", 40, lambda left: step_ratios(small, long, few, methods)),
        Step(f"8B, LoRA step of {longest} tokens", 130, lambda left: lora_memory(large, longest)),
        Step(f"1.5B, {longest} tokens", 70, lambda left: ratios(small, longest, few, methods[:-1])),
        Step(f"1.5B, Trainer at {sizes.block} tokens", 40, lambda left: training_speed(small, sizes.block)),
        Step(
            f"1.5B, evaluation at {longest} tokens", 40, lambda left: long_evaluation(small, longest, sizes.questions)
        ),
    ]


def facts() -> Result:
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none: cpu",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "peft")},
        "flash_attention_2": is_flash_attn_2_available(),
        "liger_kernel": is_liger_kernel_available(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9, help="steps that no longer fit are left out")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="the file of records")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU too: to try the program itself")
    parser.add_argument("--tests", type=float, help=argparse.SUPPRESS)  # how the program calls itself
    args = parser.parse_args()
    if args.tests is not None:
        sampled_tests(args.tests)
        return
    if not torch.cuda.is_available() and not args.tiny:
        sys.exit("gpu_check needs a CUDA device, and PyTorch sees none. --tiny tries the program itself on a CPU.")
    torch.manual_seed(0)
    began = time.monotonic()
    records: Result = {**facts(), "steps": {}, "left_out": [], "failed": []}
    for step in steps(TINY if args.tiny else GPU):
        left = 60 * args.minutes - (time.monotonic() - began)
        if left < step.seconds:
            print(f"{step.name}: left out, it takes about {step.seconds:.0f} s and {left:.0f} s are left", flush=True)
            records["left_out"].append(step.name)
            continue
        started = time.monotonic()
        try:
            result = step.run(left)
        except Exception as error:  # the other steps count all the same
            result = {"error": f"{type(error).__name__}: {error}"}
            records["failed"].append(step.name)
        result["took_seconds"] = round(time.monotonic() - started, 1)
        records["steps"][step.name] = result
        records["took_seconds"] = round(time.monotonic() - began, 1)
        write_whole(args.output, json.dumps(records, indent=1) + "\n")
        print(f"{step.name}: {json.dumps(result)}", flush=True)
    write_whole(args.output, json.dumps(records, indent=1) + "\n")
    print(f"Records: {args.output}")
    if records["failed"] or records["steps"].get("tests", {}).get("failed"):
        sys.exit(1)


if __name__ == "__main__":
    main()
