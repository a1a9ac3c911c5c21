"""What fitting a rule is worth on the tiny model: objectives, constraints, teachers, seeds and targets, side by side.

    python scripts/study_fit.py --output-dir outputs/study-fit    # about half an hour on two quiet cores

Each row is a fit with other settings on 16 texts of the five training novels; perplexity is that of the held-out novel
by the protocol of ``study_budget.py``. The table also has published rules and the model as it is. What is in
``results.jsonl`` is not measured again, so an interrupted study goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hf_posenc import FitConfig, fit_method, patched, perplexity
from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel, tiny_model_path
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.evaluation import read_records
from hf_posenc.utils.files import write_whole
from study_folder import claim

TARGET = 1024
LENGTHS = (256, 512, 1024)
PIECE = 2048  # tokens that the held-out novel is cut into, as in study_budget.py
SHARED: dict[str, Any] = {"max_texts": 16, "held_out": 0, "steps": 150, "block": 128, "hide_progress": True}
PUBLISHED = ("none", "ntk", "yarn", "llama3", "ntk_rcd", "yarn_rcd", "dynamic_yarn", "dca", "rerope")
VARIANTS: dict[str, dict[str, Any]] = {
    "attention_matching": {},
    "attention_matching, seed 1": {"seed": 1},
    "attention_matching, seed 2": {"seed": 2},
    "attention_matching, 4 times the queries": {"queries": 256},
    "teacher_tokens": {"objectives": ["teacher_tokens"]},
    "attention_matching and teacher_tokens": {"objectives": ["attention_matching", "teacher_tokens"]},
    "last_block": {"objectives": ["last_block"]},
    "full_length and short_blocks": {"objectives": ["full_length", "short_blocks"]},
    "attention_matching and needles": {"objectives": ["attention_matching", "needles=0.05"], "fitted_numbers": 8},
    "teacher rerope": {"teacher": "rerope"},
    "teacher self_extend": {"teacher": "self_extend"},
    "keep_rotations 10": {"keep_rotations": 10.0},
    "keep_rotations 1000": {"keep_rotations": 1000.0},
    "short_share 0": {"short_share": 0.0},
    "monotone": {"monotone": True},
    "lower_bound critical": {"lower_bound": "critical"},
    "smoothness 0.01": {"smoothness": 0.01},
    "no temperature": {"fit_temperature": False},
    "start grid": {"start": "grid"},
    # Low-rank changes of the query and key projections too.
    "adapted": {"adapt_options": {}},
    "adapted, seed 1": {"adapt_options": {}, "seed": 1},
    "adapted, seed 2": {"adapt_options": {}, "seed": 2},
    "adapted, rank 4": {"adapt_options": {"rank": 4}},
    "adapted, rank 64": {"adapt_options": {"rank": 64}},
    "adapted, no steps on short texts": {"adapt_options": {"short_steps": 0}},
    "adapted, 2 texts": {"adapt_options": {}, "max_texts": 2},
    "ntk, adapted": {"adapt_options": {}, "steps": 0, "start": "ntk"},
    "yarn, adapted": {"adapt_options": {}, "steps": 0, "start": "yarn"},
    "linear, adapted": {"adapt_options": {}, "steps": 0, "start": "linear"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/study-fit"))
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these rows, such as monotone")
    args = parser.parse_args()
    claim(args.output_dir, {"target": TARGET, "shared": SHARED, "variants": VARIANTS})
    model, tokenizer = load_model(tiny_model_path())
    documents = [load_novel(name) for name in TRAIN_NOVELS]
    for name in (*PUBLISHED, *VARIANTS):
        if (args.rows and name not in args.rows) or done(args.output_dir, name):
            continue
        rule: dict[str, Any] | None = {"method": name}
        adapter = None
        if name == "none":
            rule = None
        elif name in VARIANTS:
            config = FitConfig(context_length=TARGET, **{**SHARED, **VARIANTS[name]})  # type: ignore[arg-type]  # an int
            result = fit_method(model, tokenizer, documents, config)
            rule, adapter = {"method": "fitted", **result.options}, result.adapter
        with nullcontext() if adapter is None else adapter.applied(model), extended(model, rule):
            perplexity(
                model,
                [load_novel(HELD_OUT_NOVEL)],
                LENGTHS,
                tokenizer=tokenizer,
                cut=True,
                max_documents=16,
                max_tokens=PIECE,
                output=args.output_dir / "results.jsonl",
                model_name="tiny",
                label=name,
                progress=False,
            )
        show(args.output_dir)


def extended(model: Any, rule: Mapping[str, Any] | None) -> AbstractContextManager[Any]:
    """Return a context in which the model is extended to the target; None leaves it as it is."""
    return nullcontext() if rule is None else patched(model, context_length=TARGET, **rule)


def perplexities(folder: Path) -> dict[str, dict[int, float]]:
    """Return the perplexity at each length, of each row that is measured."""
    found: dict[str, dict[int, float]] = {}
    file = folder / "results.jsonl"
    for record in read_records(file) if file.is_file() else []:
        found.setdefault(record.label, {})[record.context_length] = record.perplexity
    return found


def done(folder: Path, name: str) -> bool:
    return set(perplexities(folder).get(name, {})) >= set(LENGTHS)


def show(folder: Path) -> None:
    """Write and print the table, as CSV for the documentation and as text."""
    found = perplexities(folder)
    lines = ["name," + ",".join(map(str, LENGTHS))]
    for name in (*PUBLISHED, *VARIANTS):
        if name in found:
            cells = ",".join(f"{found[name][length]:.2f}" for length in LENGTHS)
            lines.append(f'"{name}",{cells}' if "," in name else f"{name},{cells}")
    write_whole(folder / "results.csv", "\n".join(lines) + "\n")
    print(lines[-1] if len(lines) > 2 else "\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
