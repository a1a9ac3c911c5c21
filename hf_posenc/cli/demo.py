"""The full pipeline on a model small enough for two CPU cores: extend, measure, fine-tune, measure, report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.cli.shared_arguments import parse
from hf_posenc.utils.files import writable_folder
from hf_posenc.utils.units import TokenCount, duration_name

if TYPE_CHECKING:
    from hf_posenc.evaluation import Record
    from hf_posenc.reporting import ReportPaths

LENGTHS = (64, 128, 256, 512, 1024, 2048)
METHODS = ("linear", "ntk", "yarn")
FACTOR = 4
ORIGINAL = 256
_MODEL = "hf_posenc's tiny Llama"
_TITLE = f"{_MODEL}, trained on 256 tokens, made to read 1024"
# What the commands log besides the progress: settings, memory, checks. The demo has a line for each result instead.
_DETAILS = ("hf_posenc.evaluation", "hf_posenc.training", "hf_posenc.patching.api")


@dataclass
class DemoArguments:
    """How long the demo may train, and where its files go."""

    output_dir: str = field(default="outputs/demo", metadata={"help": "folder for results, report and trained model"})
    token_budget: TokenCount = field(default=TokenCount("100k"), metadata={"help": "tokens to fine-tune on"})
    dtype: str = field(
        default="auto",
        metadata={"help": "float32, bfloat16, float16, checkpoint or auto (what the hardware computes natively)"},
    )


def demo(argv: Sequence[str]) -> None:
    """Run the full pipeline on a tiny model: extend, measure, fine-tune, measure, report; takes minutes on a CPU.

    Examples:
        hf-posenc demo --output-dir demo
    """
    _, chosen = parse("demo", demo.__doc__, argv, (DemoArguments,), {})
    run_demo(writable_folder(chosen.output_dir), chosen.token_budget, dtype=chosen.dtype)


def run_demo(output_dir: Path, token_budget: int, num_documents: int = 16, dtype: str = "auto") -> ReportPaths:
    """Compare methods zero-shot on a held-out novel, then fine-tune YaRN, and write a report.

    Rerun after an interruption, it goes on where it was.

    Args:
        output_dir: Gets ``results.jsonl``, ``report/`` and the trained model in ``yarn-x4/``.
        token_budget: Tokens of the other five novels to fine-tune on.
        num_documents: Pieces of the held-out novel measured on, each as long as the longest length.
        dtype: As ``load_model`` takes it.
    """
    from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel, tiny_model_path
    from hf_posenc.checkpoint.loading import load_model
    from hf_posenc.evaluation import perplexity
    from hf_posenc.patching.api import patched
    from hf_posenc.reporting import report, text_table
    from hf_posenc.training import FinetuneConfig, finetune
    from hf_posenc.utils.console import quiet

    began = time.perf_counter()
    words = ["hf-posenc", "demo", "--output-dir", str(output_dir), "--token-budget", str(token_budget)]
    measure = partial(
        perplexity,
        documents=[load_novel(HELD_OUT_NOVEL)],
        context_lengths=LENGTHS,
        cut=True,
        max_documents=num_documents,
        output=output_dir / "results.jsonl",
        model_name=_MODEL,
        command=shlex.join(words),
    )
    numbers = iter(range(1, len(METHODS) + 5))

    @contextmanager
    def step(headline: str) -> Iterator[list[str]]:
        """Print the headline, and at the end what the block put into the list, and how long it took."""
        print(f"[{next(numbers)}/{len(METHODS) + 4}] {headline}", flush=True)
        began, results = time.perf_counter(), list[str]()
        yield results
        print(f"      {'; '.join(results)} ({duration_name(time.perf_counter() - began)})", flush=True)

    with quiet(*_DETAILS):
        model, tokenizer = load_model(tiny_model_path(), dtype=dtype)
        records: list[Record] = []
        for method in (None, *METHODS):
            how = "as it is" if method is None else f"extended {FACTOR} times by {method}"
            text = f"{num_documents} pieces of a novel it has not seen"
            with step(f"The tiny model {how}, on {text}") as results:
                with nullcontext() if method is None else patched(model, method, FACTOR):
                    found = measure(model, tokenizer=tokenizer)
                results.append(_perplexities(found))
            records += found
        config = FinetuneConfig(
            output_dir=str(output_dir / f"yarn-x{FACTOR}"),
            method="yarn",
            factor=FACTOR,
            token_budget=TokenCount(token_budget),
            learning_rate=5e-4,  # a model of 5 M parameters takes larger steps than the papers' 7 B
            per_device_train_batch_size=4,
            save_steps=10,
            logging_steps=10,
            eval_documents=0,  # measured below, on the same text as the others
            resume_from_checkpoint="true",
        )
        with step(f"Fine-tuning yarn x{FACTOR} on {token_budget:,} tokens of other novels") as results:
            result = finetune(model, tokenizer, [load_novel(name) for name in TRAIN_NOVELS], config)
            results.append(f"mean loss of {result.steps} steps: {result.train_loss:.3f}")
        with step("The fine-tuned model, on the same pieces") as results:
            found = measure(result.model, tokenizer=tokenizer, tokens_trained=result.tokens_trained)
            results.append(_perplexities(found))
        records += found
        with step("A report of all of it") as results:
            paths = report(records, output_dir / "report", _TITLE)
            results.append(str(paths.html))
    print(f"\n{text_table(records)}\n\nDone in {(time.perf_counter() - began) / 60:.1f} minutes.")
    print(f"Look at {paths.html} (or {paths.markdown}). The model that reads further is in {result.output_dir}.")
    return paths


def _perplexities(records: Sequence[Record]) -> str:
    """Return the perplexities at the original length, the target and the longest."""
    shown = [record for record in records if record.context_length in (ORIGINAL, ORIGINAL * FACTOR, LENGTHS[-1])]
    return "perplexity " + ", ".join(f"{one.perplexity:.1f} at {one.context_length}" for one in shown)
