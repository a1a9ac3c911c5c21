"""What fitting a rule is worth on the tiny model: objectives, constraints, teachers, seeds and targets, side by side.

    python scripts/study_fit.py --output-dir outputs/study-fit    # about half an hour on two quiet cores

Each row is a fit with other settings on 16 texts of the five training novels; perplexity is that of the held-out novel
by the protocol of ``study_budget.py``. The table also has published rules and the model as it is. What is in
``results.jsonl`` is not measured again, so an interrupted study goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel, tiny_model_path
from study import FITTED_RULE, Row, Study, Texts

TARGET = 1024
LENGTHS = (256, 512, 1024)
PIECE = 2048  # tokens that the held-out novel is cut into, as in study_budget.py
SHARED: dict[str, Any] = {"context_length": TARGET, "max_texts": 16, "steps": 150, "block": 128}
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
}
RULE = "attention_matching"  # whose rule is one of those that weights are changed for
# Low-rank changes of the query and key projections: settings of AdaptConfig, and of FitConfig.
ADAPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adapted": ({}, {}),
    "adapted, seed 1": ({}, {"seed": 1}),
    "adapted, seed 2": ({}, {"seed": 2}),
    "adapted, rank 4": ({"rank": 4}, {}),
    "adapted, rank 16": ({"rank": 16}, {}),
    "adapted, no steps on short texts": ({"short_steps": 0}, {}),
    "adapted, 2 texts": ({}, {"max_texts": 2}),
    "adapted to the fitted rule": ({"rule": RULE}, {}),
    "adapted to ntk": ({"rule": "ntk"}, {}),
    "adapted to yarn": ({"rule": "yarn"}, {}),
    "adapted to linear": ({"rule": "linear"}, {}),
}


def rows_of(study: Study) -> list[Row]:
    rows = [Row(name, None if name == "none" else {"method": name, "context_length": TARGET}) for name in PUBLISHED]
    rows += [Row(name, fit={**SHARED, **changes}) for name, changes in VARIANTS.items()]
    shared = {name: SHARED[name] for name in ("context_length", "max_texts")}
    for name, (of_weights, changes) in ADAPTED.items():
        if of_weights.get("rule") == RULE:
            of_weights = {"rule": str(study.run_folder(RULE) / FITTED_RULE)}
        rows.append(Row(name, fit={**shared, "adapt_options": of_weights, **changes}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/study-fit"))
    names = [*PUBLISHED, *VARIANTS, *ADAPTED]
    parser.add_argument(
        "--rows", nargs="+", choices=names, default=names, metavar="NAME", help="only these: %(choices)s"
    )
    args = parser.parse_args()
    novels = [load_novel(name) for name in TRAIN_NOVELS]
    settings = {"shared": SHARED, "variants": VARIANTS, "adapted": ADAPTED}
    study = Study(args.output_dir, tiny_model_path(), novels, settings)
    protocol = {"cut": True, "max_documents": 16, "max_tokens": PIECE, "progress": False}
    texts = Texts(args.output_dir / "results.jsonl", [load_novel(HELD_OUT_NOVEL)], LENGTHS, protocol)
    rows = rows_of(study)
    for row in (row for row in rows if row.name in args.rows):
        study.run(row, texts, model_name="tiny")
        study.write({"results": texts.lines(rows)})


if __name__ == "__main__":
    main()
