"""The real model: SmolLM2-135M, which reads 8k tokens, trained on 300k tokens to read 32k, and measured.

    scripts/fetch_smollm2
    python scripts/study_smollm2.py --output-dir outputs/smollm2-study    # three to four hours on two cores

Runs and shows the ``hf-posenc`` commands that do it. PoSE: blocks of 1024 tokens, whose positions skip up to 32k, of
five novels and of the long modules of the Python that runs this; a sixth novel, Python's reference and another module
are held out. They are read with the rule of the training, and with ``dca``, the best of those that need none. Killed,
it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch

from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel
from hf_posenc.checkpoint.manifest import MANIFEST
from hf_posenc.evaluation.records import read_records, read_retrieval_records
from hf_posenc.reporting import text_table
from hf_posenc.utils.dtypes import computes_natively
from hf_posenc.utils.files import write_whole
from study import Study

LENGTHS = (512, 2048, 8192, 16384, 32768)
ORIGINAL = 8192
TEXTS = ("novel", "reference", "module")
HELD_OUT_MODULE = "_pydecimal.py"
LONG_MODULE = 30_000  # bytes
METHOD = ("--method", "dynamic_yarn", "--factor", "4")
WITHOUT_TRAINING = ("--method", "dca", "--factor", "4")
ROWS = ("zero-shot", "zero-shot, dca", "trained", "trained, dca")
TRAINING = (
    *METHOD,
    *("--position-schedule", "pose", "--seq-len", "1024", "--gradient-accumulation-steps", "4"),
    *("--token-budget", "300k", "--learning-rate", "5e-5", "--lr-scheduler-type", "linear", "--warmup-steps", "8"),
    *("--eval-documents", "0", "--save-steps", "10"),
)
# The folder holds float32 weights, so "auto" would take that: bfloat16 where it is faster.
IN_BF16 = computes_natively(torch.bfloat16)
TRAINED_IN = ("--bf16", str(IN_BF16).lower())
MEASURED = ("--dtype", "bfloat16" if IN_BF16 else "float32", "--model-name", "SmolLM2")
PASSKEY = (*MEASURED, "--tasks", "passkey", "--depths", "0", "50", "100")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/smollm2-study"))
    parser.add_argument("--model", type=Path, default=Path(".cache/smollm2-135m-instruct"))
    parser.add_argument("--samples", type=int, default=1, help="passkeys of each depth and length (default: 1)")
    args = parser.parse_args()
    base, trained, texts = str(args.model), args.output_dir / "model", args.output_dir / "texts"
    # Refuses a folder of other settings, or of another Python, of whose library the texts are.
    Study(args.output_dir, base, [], {"model": base, "training": [*TRAINING, *TRAINED_IN], "python": sys.version})
    write_texts(texts)
    if not (trained / MANIFEST).is_file():
        words = ["finetune", base, "--output-dir", str(trained), "--documents", str(texts / "train.jsonl")]
        run([*words, *TRAINING, *TRAINED_IN, "--resume-from-checkpoint"])
    for text in TEXTS:
        measured = [*MEASURED, "--documents", str(texts / f"{text}.txt")]
        measured += ["--output", str(args.output_dir / f"{text}.jsonl"), "--context-lengths", *map(str, LENGTHS)]
        read(base, trained, measured)
    keys = [*PASSKEY, "--samples", str(args.samples), "--output", str(args.output_dir / "passkey.jsonl")]
    run(["eval", base, *keys, "--context-lengths", str(ORIGINAL), "--label", "unpatched"])
    keys += ["--context-lengths", *map(str, LENGTHS[2:])]
    read(base, trained, keys)
    show(args.output_dir)


def read(base: str, trained: Path, what: Sequence[str]) -> None:
    """Measure ``ROWS``: the model before and after the training, each with both rules."""
    rows = (
        (base, METHOD),
        (base, WITHOUT_TRAINING),
        (str(trained), ()),
        (str(trained), (*WITHOUT_TRAINING, "--on-scaled", "replace")),
    )
    for label, (model, rule) in zip(ROWS, rows, strict=True):
        run(["eval", model, *what, *rule, "--label", label])


def write_texts(folder: Path) -> None:
    """Write what is trained on and what is held out."""
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(os.__file__).parent
    texts = [load_novel(name) for name in TRAIN_NOVELS]
    for module in sorted(library.glob("*.py")):
        if module.stat().st_size > LONG_MODULE and "decimal" not in module.name:
            texts.append(module.read_text("utf-8"))
    write_whole(folder / "train.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_whole(folder / "novel.txt", load_novel(HELD_OUT_NOVEL))
    write_whole(folder / "reference.txt", "\n\n".join(topics.values()))
    write_whole(folder / "module.txt", (library / HELD_OUT_MODULE).read_text("utf-8"))


def run(words: Sequence[str]) -> None:
    print(f"\nhf-posenc {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "hf_posenc", *words], check=True)


def show(folder: Path) -> None:
    """Write and print the tables: perplexity of each text, and the passkeys that were right."""
    tables = [f"{text}\n{text_table(read_records(folder / f'{text}.jsonl'))}" for text in TEXTS]
    tables.append(text_table(read_retrieval_records(folder / "passkey.jsonl")))
    file = write_whole(folder / "study.txt", "\n\n".join(tables) + "\n")
    print(f"\n{file.read_text('utf-8')}\nSee {file}.")


if __name__ == "__main__":
    main()
