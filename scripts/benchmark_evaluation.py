"""Perplexity by others' programs next to ours, same model and text: time, memory, numbers (run by benchmark.py).

    python scripts/benchmark.py evaluation

``python scripts/benchmark_evaluation.py WAY`` prints the bytes one way needs beyond the loaded model.
"""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.evaluation import perplexity
from hf_posenc.evaluation.losses import window_losses
from hf_posenc.evaluation.memory import memory_in_use, peak_memory, reset_peak_memory
from hf_posenc.evaluation.windows import sliding_windows

LENGTHS = [64 * point for point in range(1, 17)]  # tokens
DOCUMENTS, DOCUMENT_TOKENS = 4, 2048
WINDOW = 512  # of lm-eval; 1024, the longest length, of evaluate
Curve = dict[int, float]
Result = dict[str, Any]


class Inputs:
    """The tiny model and four stretches of the held-out novel, each of 2048 tokens, as text and as ids."""

    def __init__(self, model_name: str = str(tiny_model_path()), dtype: str = "float32") -> None:
        self.model: PreTrainedModel
        self.tokenizer: PreTrainedTokenizerBase
        self.model, self.tokenizer = load_model(model_name, dtype=dtype)
        novel = load_novel(HELD_OUT_NOVEL)
        self.texts, self.ids = [], []
        for number in range(DOCUMENTS):
            row = self.tokenizer(novel[number * 60000 :][: 12 * DOCUMENT_TOKENS], verbose=False).input_ids
            text = str(self.tokenizer.decode(row[:DOCUMENT_TOKENS]))
            self.texts.append(text)
            self.ids.append(self.tokenizer(text, verbose=False).input_ids)  # what everyone makes of the same text


def ours(inputs: Inputs, *arguments: Any, **settings: Any) -> Curve:
    records = perplexity(inputs.model, inputs.ids, *arguments, tokenizer=inputs.tokenizer, progress=False, **settings)
    return {record.context_length: record.perplexity for record in records}


def ours_curve(inputs: Inputs) -> Curve:
    return ours(inputs, LENGTHS, bos="prepended")


@torch.no_grad()
def yarn_curve(inputs: Inputs) -> Curve:
    """The YaRN authors' way with ``--truncate``: a forward of BOS + text for each length, with the logits of all of it.

    Restated after eval/perplexity.py of github.com/jquesnelle/yarn (commit b1d7076): the loss is that of Transformers'
    ``labels``, and means of windows are averaged. Here all have equally many tokens, so that is no difference.
    """
    curve = {}
    for length in LENGTHS:
        means = []
        for row in inputs.ids:
            ids = torch.tensor([[inputs.tokenizer.bos_token_id, *row[: length - 1]]], device=inputs.model.device)
            means.append(inputs.model(ids, labels=ids).loss)
        curve[length] = float(torch.exp(torch.stack(means).mean()))
    return curve


def ours_rolling(inputs: Inputs) -> Curve:
    """Windows that share one token: what lm-eval feeds, as one of our protocols. Its window does not count the last."""
    settings: dict[str, Any] = {"tokenizer": inputs.tokenizer, "stride": WINDOW, "bos": "prepended", "progress": False}
    records = [  # one document a call, as max_tokens, which is to be all of it, holds for every document of a call
        perplexity(inputs.model, [row], [WINDOW + 1], "sliding_window", max_tokens=1 + len(row), **settings)[0]
        for row in inputs.ids
    ]
    return {WINDOW: math.exp(sum(record.nll_sum for record in records) / sum(record.n_tokens for record in records))}


def lm_eval_rolling(inputs: Inputs) -> Curve:
    """lm-eval's own ``HFLM.loglikelihood_rolling`` on the loaded model."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    reader = HFLM(pretrained=inputs.model, tokenizer=inputs.tokenizer, max_length=WINDOW, batch_size=1)
    requests = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(inputs.texts)]
    total = sum(reader.loglikelihood_rolling(requests, disable_tqdm=True))
    return {WINDOW: math.exp(-total / sum(map(len, inputs.ids)))}


def ours_one_length(inputs: Inputs) -> Curve:
    """As ``evaluate`` averages: the mean of the documents' perplexities, from one call a document."""
    own = [
        perplexity(inputs.model, [row], LENGTHS[-1:], tokenizer=inputs.tokenizer, bos="prepended", progress=False)[0]
        for row in inputs.ids
    ]
    return {LENGTHS[-1]: statistics.mean(one.perplexity for one in own)}


@torch.no_grad()
def evaluate_one_length(inputs: Inputs) -> Curve:
    """The ``perplexity`` measurement of ``evaluate``: all texts in one batch, all logits, the mean of perplexities.

    Restated after measurements/perplexity/perplexity.py of github.com/huggingface/evaluate, which lies on the Hub and
    takes a model's name only; here it gets the loaded model. Padding: the texts are equally long, so there is none.
    """
    bos = inputs.tokenizer.bos_token_id
    batch = torch.tensor([[bos, *row[: LENGTHS[-1] - 1]] for row in inputs.ids], device=inputs.model.device)
    logits = inputs.model(batch, attention_mask=torch.ones_like(batch)).logits[:, :-1].contiguous()
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:].contiguous(), reduction="none")
    return {LENGTHS[-1]: float(torch.exp(losses.mean(1)).mean())}


Way = Callable[[Inputs], Curve]
PAIRS: list[tuple[str, Way, Way, str]] = [
    (
        f"YaRN authors' procedure, {len(LENGTHS)} lengths to {LENGTHS[-1]}",
        yarn_curve,
        ours_curve,
        "equal: the same tokens after BOS; ours takes all lengths from one pass",
    ),
    (
        f"lm-eval loglikelihood_rolling, {WINDOW}",
        lm_eval_rolling,
        ours_rolling,
        f"equal to our sliding window of {WINDOW + 1} (lm-eval does not count the last target), stride {WINDOW}, "
        "with BOS; a smaller stride gives lower numbers, as each token has more context",
    ),
    (
        f"evaluate's perplexity, {LENGTHS[-1]}",
        evaluate_one_length,
        ours_one_length,
        "equal as a mean of the documents' perplexities; our records pool all tokens, which gives a lower number",
    ),
]
WAYS = {way.__name__: way for _, theirs, mine, _ in PAIRS for way in (theirs, mine)}


def benchmark_evaluation(model_name: str, dtype: str, rounds: int) -> list[Result]:
    """Return the comparisons, then what batching windows gains."""
    inputs = Inputs(model_name, dtype)
    results = [
        compare(inputs, model_name, dtype, pair, rounds)
        for pair in PAIRS
        if pair[1] is not lm_eval_rolling or lm_eval_is_there()
    ]
    return results + [batching(inputs, window, rounds) for window in (128, WINDOW)]


def compare(inputs: Inputs, model_name: str, dtype: str, pair: tuple[str, Way, Way, str], rounds: int) -> Result:
    """Time both in turn, take the memory of each in a process of its own, and put the numbers side by side."""
    name, theirs, mine, reason = pair
    numbers = theirs(inputs), mine(inputs)  # warm up
    seconds = [(timed(theirs, inputs), timed(mine, inputs)) for _ in range(rounds)]
    return {
        "benchmark": f"time of {name} / ours",
        "ratio": statistics.median(a / b for a, b in seconds),
        "goal": 1.0,
        "better": "higher",
        "seconds_theirs": statistics.median(a for a, _ in seconds),
        "seconds_ours": statistics.median(b for _, b in seconds),
        "memory_mib_theirs": memory_of(theirs.__name__, model_name, dtype) / 2**20,
        "memory_mib_ours": memory_of(mine.__name__, model_name, dtype) / 2**20,
        "perplexity_theirs": numbers[0][max(numbers[0])],
        "perplexity_ours": numbers[1][max(numbers[1])],
        "largest_relative_difference": max(abs(numbers[0][at] / numbers[1][at] - 1) for at in numbers[0]),
        "reason": reason,
    }


def batching(inputs: Inputs, window: int, rounds: int) -> Result:
    """Compare windows fed one by one with batches of the default size."""
    ids = torch.tensor(inputs.ids[0])
    needed = torch.ones(len(ids), dtype=torch.bool)
    windows = sliding_windows(len(ids), window, window // 2)

    def feed(batch_size: int | None) -> float:
        started = time.perf_counter()
        window_losses(inputs.model, ids, windows, needed, batch_size=batch_size)
        return time.perf_counter() - started

    feed(1), feed(None)
    return {
        "benchmark": f"sliding window of {window}, one by one / in batches",
        "ratio": statistics.median(feed(1) / feed(None) for _ in range(2 * rounds)),
        "goal": 1.0,
        "better": "higher",
    }


def timed(way: Way, inputs: Inputs) -> float:
    started = time.perf_counter()
    way(inputs)
    return time.perf_counter() - started


def memory_of(way: str, model_name: str, dtype: str) -> int:
    command = [sys.executable, str(Path(__file__)), way, model_name, dtype]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def measure_memory(way: Way, inputs: Inputs) -> int:
    """Return the bytes needed at the peak beyond the loaded model and what importing took."""
    short, all_ids, all_texts = [row[:600] for row in inputs.ids[:1]], inputs.ids, inputs.texts
    if way is lm_eval_rolling:
        inputs.texts = [str(inputs.tokenizer.decode(short[0]))]
        way(inputs)  # imports lm-eval
    inputs.ids, inputs.texts = all_ids, all_texts
    with torch.no_grad():
        inputs.model(torch.tensor(short).to(inputs.model.device)[:, :16])
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what loading has freed would serve without being counted
    before = memory_in_use(inputs.model.device)
    reset_peak_memory(inputs.model.device)
    way(inputs)
    return peak_memory(inputs.model.device) - before


def lm_eval_is_there() -> bool:
    try:
        import lm_eval  # noqa: F401  # only to see if it is there
    except ImportError:
        print("lm-eval is not installed, so it is left out: pip install 'hf_posenc[lm-eval]'", file=sys.stderr)
        return False
    return True


def print_comparison(results: list[Result]) -> None:
    """Print the numbers side by side, and why they are what they are."""
    print(f"\n{'':46} {'seconds':>15} {'MiB':>15} {'perplexity':>21}")
    for result in (one for one in results if "reason" in one):
        pairs = [(result[f"{what}_theirs"], result[f"{what}_ours"]) for what in ("seconds", "memory_mib", "perplexity")]
        cells = [f"{pairs[0][0]:7.2f} {pairs[0][1]:7.2f}", f"{pairs[1][0]:7.0f} {pairs[1][1]:7.0f}"]
        name = result["benchmark"].removeprefix("time of ").removesuffix(" / ours")
        print(f"{name:46} {cells[0]:>15} {cells[1]:>15} {pairs[2][0]:10.4f} {pairs[2][1]:10.4f}")
        print(f"  {result['reason']} (largest difference {result['largest_relative_difference']:.1e})")
    print("  Each pair: theirs, ours. Memory is beyond the loaded model.")


if __name__ == "__main__":
    print(measure_memory(WAYS[sys.argv[1]], Inputs(*sys.argv[2:4])))
