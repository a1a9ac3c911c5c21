"""The whole line on a model small enough for two CPU cores: extend, measure, fine-tune, measure, report."""

from __future__ import annotations

import shlex
import time
from functools import partial
from pathlib import Path

from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel, tiny_model_path
from hf_posenc.evaluation import perplexity
from hf_posenc.loading import load_model
from hf_posenc.patching import patched
from hf_posenc.report import ReportPaths, report, text_table
from hf_posenc.training import FinetuneConfig, finetune

LENGTHS = (64, 128, 256, 512, 1024, 2048)
METHODS = ("linear", "ntk", "yarn")
FACTOR = 4
_TITLE = "A 256-token Llama made to read 1024 tokens"


def run_demo(output_dir: Path, token_budget: int, num_documents: int = 24) -> ReportPaths:
    """Compare methods zero-shot on a held-out novel, then fine-tune YaRN, and write a report.

    Rerun after an interruption, it goes on where it was.

    Args:
        output_dir: Gets ``results.jsonl``, ``report/`` and the trained model in ``yarn-x4/``.
        token_budget: Tokens of the other five novels to fine-tune on.
        num_documents: Pieces of the held-out novel measured on, each as long as the longest length.
    """
    began = time.perf_counter()
    words = ["hf-posenc", "demo", "--output-dir", str(output_dir), "--token-budget", str(token_budget)]
    measure = partial(
        perplexity,
        documents=[load_novel(HELD_OUT_NOVEL)],
        context_lengths=LENGTHS,
        cut=True,
        max_documents=num_documents,
        output=output_dir / "results.jsonl",
        model_name="hf_posenc's tiny Llama",
        command=shlex.join(words),
    )
    model, tokenizer = load_model(tiny_model_path())
    print(f"1. The tiny model as it is, then extended {FACTOR} times by {', '.join(METHODS)}, on unseen text")
    records = measure(model, tokenizer=tokenizer)
    for method in METHODS:
        with patched(model, method, FACTOR):
            records += measure(model, tokenizer=tokenizer)

    print(f"2. Fine-tuning yarn x{FACTOR} on {token_budget:,} tokens of other novels, then measuring again")
    config = FinetuneConfig(
        output_dir=str(output_dir / f"yarn-x{FACTOR}"),
        method="yarn",
        factor=FACTOR,
        token_budget=token_budget,  # type: ignore[arg-type]  # an int becomes a TokenCount
        learning_rate=3e-4,  # a model of 5 M parameters takes larger steps than the papers' 7 B
        micro_batch_size=8,
        save_steps=10,
        logging_steps=5,
        eval_documents=0,  # measured below, on the same text as the others
        resume=True,
    )
    result = finetune(model, tokenizer, [load_novel(name) for name in TRAIN_NOVELS], config)
    records += measure(result.model, tokenizer=tokenizer, tokens_trained=result.tokens_trained)

    paths = report(records, output_dir / "report", _TITLE)
    print(f"\n{text_table(records)}\n\nDone in {(time.perf_counter() - began) / 60:.1f} minutes.")
    print(f"Look at {paths.html} (or {paths.markdown}). The model that reads further is in {result.output_dir}.")
    return paths
