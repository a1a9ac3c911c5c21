"""The comparison everybody quotes: one tiny model trained from scratch with each positional encoding, then read on.

    python scripts/compare_encodings.py --output-dir outputs/encodings

The same data, seed, tokens and shape for each (the tiny Llama of ``scripts/pretrain_tiny.py``, 256 tokens of context);
measured are perplexity of the held-out novel at 1x to 8x that length, passkey, what a training step, reading and
decoding cost next to RoPE in time and memory, and parameters; then the extension methods on the one trained with RoPE.
What ``results.jsonl`` and the folders hold is not made again, so an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_posenc import patch_model, save_extended
from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.evaluation.records import read_retrieval_records
from hf_posenc.planning.tracking import ALL, MemoryTracker
from hf_posenc.reporting.looks import PLAIN, numbered_look
from hf_posenc.reporting.plot import Chart, Line, draw_chart
from hf_posenc.retrieving.measuring_retrieval import retrieval
from hf_posenc.utils.files import write_whole
from pretrain_tiny import CONTEXT, build_model, encode, train, train_tokenizer, unfinished_of
from study import Row, Study, Texts

ENCODINGS = ("rope", "xpos", "sinusoidal", "learned", "relative_bias", "t5_bias", "alibi", "nope")
LENGTHS = (256, 512, 1024, 2048)
PASSKEY_LENGTHS = (256, 512)
EXTENSIONS = ("linear", "ntk", "yarn", "dynamic_yarn", "self_extend", "leaky_rerope")
# How positions enter, whether they are absolute or relative, and whether keys can wait in a KV cache.
WORDS = {
    "rope": ("rotates query/key pairs", "relative in effect", "yes"),
    "xpos": ("rotates pairs, decays with distance", "relative in effect", "yes; prefill long texts in chunks"),
    "sinusoidal": ("added to embeddings", "absolute", "yes"),
    "learned": ("added to embeddings", "absolute", "yes, up to its end"),
    "relative_bias": ("bias on logits", "relative", "yes"),
    "t5_bias": ("bias on logits", "relative", "yes"),
    "alibi": ("bias on logits", "relative", "yes"),
    "nope": ("causal mask only", "neither", "yes"),
}
COSTS = ("step", "read", "decode")
# What the literature says of reading past the trained length, for the table.
CLAIMS = {
    "rope": "does not (Chen et al. 2023; Press et al. 2021, fig. 1)",
    "xpos": "does (Sun et al. 2022, table 3)",
    "sinusoidal": "hoped to (Vaswani et al. 2017, 3.5); does not (Press et al. 2021, fig. 1)",
    "learned": "cannot",
    "relative_bias": "hoped to (Shaw et al. 2018, 3.2)",
    "t5_bias": "does, somewhat (Press et al. 2021, fig. 1)",
    "alibi": "does (Press et al. 2021, fig. 1)",
    "nope": "does, on small tasks (Kazemnejad et al. 2023)",
}
READ_TOKENS, DECODED_TOKENS, ROUNDS = 1024, 32, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/encodings"))
    parser.add_argument("--tokens", type=int, default=2_000_000, help="trained on, each (default: %(default)s)")
    parser.add_argument("--encodings", nargs="+", default=ENCODINGS, choices=ENCODINGS, help="only these")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.perf_counter()
    comparison = Comparison(args.output_dir, args.tokens, args.seed)
    for name in args.encodings:
        comparison.train(name)
        comparison.measure(name)
        comparison.show()
    if "rope" in args.encodings:  # what the rest is compared with
        comparison.extend()
        comparison.cost([name for name in args.encodings if name != "rope"])
        comparison.show()
    minutes = (time.perf_counter() - began) / 60
    print(f"{minutes:.0f} minutes. See {args.output_dir / 'encodings.md'} and the charts beside it.")


class Comparison:
    """The models of a comparison, in a folder each, and the file their numbers are in."""

    def __init__(self, folder: Path, tokens: int, seed: int) -> None:
        self.folder, self.tokens, self.seed, self.costs = folder, tokens, seed, folder / "costs.json"
        self.study = Study(folder, self.path("rope"), [], {"tokens": tokens, "seed": seed})
        self.texts = Texts(
            folder / "results.jsonl",
            [load_novel(HELD_OUT_NOVEL)],
            LENGTHS,
            {"cut": True, "max_documents": 16, "progress": False},
        )

    def path(self, name: str) -> Path:
        return self.folder / f"{name}-{self.tokens}-seed{self.seed}"

    def load(self, name: str) -> Any:
        return load_model(self.path(name))[0]

    def train(self, name: str) -> None:
        """Train a model with an encoding, all else equal, unless it is there."""
        if (self.path(name) / "tokenizer.json").is_file():  # saved last
            return
        print(f"{name}: training on {self.tokens:,} tokens", flush=True)
        texts = [load_novel(one) for one in TRAIN_NOVELS]
        tokenizer = train_tokenizer(texts)
        torch.manual_seed(self.seed)
        model = build_model()  # all else first: the weights that all have are the same
        if name != "rope":  # what the model has
            patch_model(model, name, 1)
        torch.manual_seed(self.seed)  # and so are the blocks
        stream = torch.tensor([token for text in texts for token in encode(tokenizer, text)])
        settings = {"context_length": CONTEXT, "step_tokens": 4096, "learning_rate": 1.5e-3, "device": "cpu"}
        unfinished = unfinished_of(self.path(name))
        train(model, stream, argparse.Namespace(tokens=self.tokens, **settings), unfinished)
        if name == "rope":
            model.save_pretrained(self.path(name))
            tokenizer.save_pretrained(self.path(name))
        else:
            save_extended(model, self.path(name), tokenizer, tokens_trained=self.tokens)
        unfinished.unlink(missing_ok=True)

    def measure(self, name: str) -> None:
        """Measure a model as it was trained; a learned table only up to its end."""
        row = Row(name, model=self.path(name))
        lengths = [length for length in LENGTHS if name != "learned" or length <= CONTEXT]
        self.perplexity(row, lengths)
        selected = [length for length in PASSKEY_LENGTHS if length in lengths]
        settings = {"depths": (0, 50, 100), "samples": 8, "output": self.passkey_file(name), "progress": False}
        with self.study.ready(row) as (model, tokenizer, _):
            retrieval(model, tokenizer, ("passkey",), selected, label=name, model_name="tiny", **settings)

    def extend(self) -> None:
        """Measure the extension methods on the model trained with RoPE, zero-shot."""
        for method in EXTENSIONS:
            self.perplexity(Row(f"rope, {method} x8", {"method": method, "factor": 8}), LENGTHS)

    def perplexity(self, row: Row, lengths: Sequence[int]) -> None:
        model_name = f"tiny, {self.tokens} tokens, seed {self.seed}"
        self.study.run(row, replace(self.texts, lengths=lengths), model_name=model_name, tokens_trained=self.tokens)

    def cost(self, names: list[str]) -> None:
        """Measure training step, reading and decoding of each next to RoPE, in turns, in this process."""
        rope, found = self.load("rope"), self.paid()
        for name in names:
            if name not in found:
                found[name] = ratios(rope, self.load(name))
                write_whole(self.costs, json.dumps(found, indent=2) + "\n")

    def paid(self) -> dict[str, dict[str, float]]:
        """Return what ``cost`` has measured."""
        found: dict[str, dict[str, float]] = json.loads(self.costs.read_text()) if self.costs.is_file() else {}
        return found

    def passkey_file(self, name: str) -> Path:
        return self.folder / f"passkey-{name}-seed{self.seed}.jsonl"

    def passkeys(self, name: str) -> str:
        """Return how many of the passkeys were right, token by token, at each length.

        Of one that was asked again, as by other versions of torch, the last answer counts.
        """
        file = self.passkey_file(name)
        asked = {
            (one.context_length, one.depth, one.seed): one.score("forced")
            for one in (read_retrieval_records(file) if file.is_file() else [])
        }
        scores = [[score for (at, *_), score in asked.items() if at == length] for length in PASSKEY_LENGTHS]
        return ", ".join(f"{of.count(1.0)}/{len(of)}" if of else "ends" for of in scores)

    def show(self) -> None:
        """Write the tables and the charts of what is there."""
        records = self.texts.records()
        curves = {label: {length: one.perplexity for length, one in of.items()} for label, of in records.items()}
        text = f"{self._measured(curves)}\n\n{extended(curves)}\n\n{cost_table(self.paid())}\n"
        write_whole(self.folder / "encodings.md", text)
        print(f"\n{text}", flush=True)
        extensions = [label for label in curves if label == "rope" or label.startswith("rope, ")]
        encodings = [label for label in curves if label == "rope" or label not in extensions]
        for name, labels, title in (
            ("encodings", encodings, f"trained with each encoding, at {CONTEXT} tokens"),
            ("extensions", extensions, f"trained with rope at {CONTEXT} tokens, then extended zero-shot"),
        ):
            if labels:
                write_whole(self.folder / f"{name}.png", draw_chart(chart(curves, labels, title)).png)

    def _measured(self, curves: dict[str, dict[int, float]]) -> str:
        times = " | ".join(f"{n // CONTEXT}x" for n in LENGTHS)
        lines = [
            f"| encoding | {times} | 8x / 1x | does it extrapolate, in the literature | passkey 1x, 2x |",
            "|---|" + "---:|" * len(LENGTHS) + "---:|---|---|",
        ]
        for name in ENCODINGS:
            if name in curves:
                curve = curves[name]
                values = " | ".join(f"{curve[n]:.1f}" if n in curve else "ends" for n in LENGTHS)
                growth = f"{curve[LENGTHS[-1]] / curve[CONTEXT]:.2f}" if LENGTHS[-1] in curve else "ends"
                lines.append(f"| `{name}` | {values} | {growth} | {CLAIMS[name]} | {self.passkeys(name)} |")
        return "\n".join(lines)


def cost_table(costs: dict[str, dict[str, float]]) -> str:
    """Return the table of how positions enter, and what that costs next to RoPE."""
    lines = [
        f"Time (and memory) as multiples of RoPE's; reading {READ_TOKENS} tokens, by learned {CONTEXT}:",
        "",
        "| encoding | positions | absolute or relative | KV cache | parameters | training step | reading | decoding |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for name, words in WORDS.items():
        shown = ["0", *["1 (1)"] * 3]
        if name != "rope":
            if name not in costs:
                continue
            cost = costs[name]
            times = [f"{cost[way]:.2f} ({cost[f'{way}_memory']:.2f})" for way in COSTS]
            shown = [f"{cost['parameters']:,.0f}", *times]
        lines.append(f"| `{name}` | {' | '.join((*words, *shown))} |")
    return "\n".join(lines)


def extended(curves: dict[str, dict[int, float]]) -> str:
    """Return the table of the extension methods on the model trained with RoPE."""
    lines = [f"| rope, then | {' | '.join(f'{n // CONTEXT}x' for n in LENGTHS)} |", "|---|" + "---:|" * len(LENGTHS)]
    for label, curve in curves.items():
        if label == "rope" or label.startswith("rope, "):
            shown = "as it is" if label == "rope" else label.removeprefix("rope, ")
            lines.append(f"| {shown} | {' | '.join(f'{curve[n]:.1f}' for n in LENGTHS)} |")
    return "\n".join(lines)


def ratios(rope: Any, model: Any) -> dict[str, float]:
    """Return what a model costs next to RoPE's: median ratio of seconds in turns, of peaks, and further parameters."""
    ids = torch.randint(1, rope.config.vocab_size, (16, CONTEXT))
    long = torch.randint(1, rope.config.vocab_size, (1, READ_TOKENS))
    if "learned" in str(getattr(model.get_decoder(), "positional_encoding", "")).lower():
        long = long[:, :CONTEXT]  # all it can read
    ways: dict[str, Any] = {
        "step": lambda one: one(ids, labels=ids, use_cache=False).loss.backward(),
        "read": lambda one: no_grad(one, long, use_cache=False),
        "decode": lambda one: decode(one, long[:, : CONTEXT - DECODED_TOKENS]),
    }
    found: dict[str, float] = {}
    for key, way in ways.items():
        taken: dict[str, list[float]] = {"model": [], "rope": []}
        for number in range(ROUNDS + 1):  # each first in every other round
            for name, one in sorted({"model": model, "rope": rope}.items(), reverse=number % 2 == 1):
                taken[name].append(seconds(way, one))
        pairs = zip(taken["model"][1:], taken["rope"][1:], strict=True)  # the first round warms up
        found[key] = statistics.median(mine / its for mine, its in pairs)
        found[f"{key}_memory"] = peak(way, model) / peak(way, rope)
    extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in rope.parameters())
    return {**found, "parameters": extra}


@torch.no_grad()
def no_grad(model: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
    return model(ids, **kwargs)


def decode(model: Any, ids: torch.Tensor) -> None:
    """Write some tokens behind a text, from its cache."""
    model.generate(ids, max_new_tokens=DECODED_TOKENS, min_new_tokens=DECODED_TOKENS, do_sample=False, pad_token_id=0)


def seconds(way: Any, model: Any) -> float:
    began = time.perf_counter()
    way(model)
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def peak(way: Any, model: Any) -> int:
    """Return the most bytes of tensors, besides the weights, that lived at one time; a kernel's own are not seen."""
    with MemoryTracker(model.parameters(), model.config.vocab_size, CONTEXT) as tracker:
        way(model)
    model.zero_grad(set_to_none=True)
    return max(peak[ALL] for peak in tracker.peaks.values())


def chart(curves: dict[str, dict[int, float]], labels: list[str], title: str) -> Chart:
    """Return the lines of perplexity by tokens read, of some of the rows; RoPE as it is has the colour of the text."""
    lines = []
    for number, label in enumerate(labels):
        look = PLAIN if label == "rope" else numbered_look(number)
        name = label.removeprefix("rope, ")
        lines.append(Line(name, list(curves[label]), list(curves[label].values()), look))
    ticks = [(length, f"{length}") for length in LENGTHS]
    return Chart(title, "tokens read", "perplexity of the held-out novel", lines, ticks, [(CONTEXT, "trained at")])


if __name__ == "__main__":
    main()
