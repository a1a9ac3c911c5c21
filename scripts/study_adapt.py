"""Adapted models side by side: rules, ranks, steps, texts and seeds, against the unpatched model and its teacher.

    scripts/fetch_smollm2
    python scripts/study_texts.py outputs/texts
    python scripts/study_adapt.py --fitted outputs/texts/four_kinds_{1,2}.txt \
        --held-out outputs/texts/{persuasion,documentation,code,french}.txt

Each row changes the weights for a rule (``hf-posenc fit --adapt``). It is measured on
texts that were not fitted on: on pieces of a sixteenth of the trained length and of all of it, as a difference from the
unpatched model with its paired interval; and on the beginning of the first text, up to the target. A row takes one
to three hours on two cores for SmolLM2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_posenc.checkpoint.loading import load_model
from hf_posenc.evaluation.intervals import paired_interval
from hf_posenc.fitting.config import rule_of
from hf_posenc.patching.extension import plain_spec
from hf_posenc.utils.units import length_name
from study import Line, Row, Study, Texts

SHORT_PIECES, LONG_PIECES = 64, 6  # of each text at most: of a sixteenth of the trained length, and of all of it
# Changes of FitConfig; those of the weights are under adapt_options. "texts" is how many are fitted on.
ADAPTED: dict[str, dict[str, Any]] = {
    "adapted": {},
    "seed 1": {"seed": 1},
    "seed 2": {"seed": 2},
    "one text": {"texts": 1},
    "two texts": {"texts": 2},
    "no steps on short texts": {"adapt_options": {"short_steps": 0}},
    "120 steps on short texts": {"adapt_options": {"short_steps": 120}},
    "rank 4": {"adapt_options": {"rank": 4}},
    "rank 8": {"adapt_options": {"rank": 8}},
    "rank 16": {"adapt_options": {"rank": 16}},
    "rank 32": {"adapt_options": {"rank": 32}},
    "240 steps in each layer": {"adapt_options": {"steps": 240}},
    "2400 steps in each layer": {"adapt_options": {"steps": 2400}},
    "yarn": {"adapt_options": {"rule": "yarn"}},
    "ntk": {"adapt_options": {"rule": "ntk"}},
    "linear": {"adapt_options": {"rule": "linear"}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--rule", default="llama3", help="method, preset or folder of a fit whose rule is taken")
    parser.add_argument("--teacher", default="dca")
    parser.add_argument("--factor", type=float, default=4)
    parser.add_argument("--fitted", nargs="+", type=Path, required=True, help="text files to fit on")
    parser.add_argument("--held-out", nargs="+", type=Path, required=True, help="text files to measure on")
    names = ["unpatched", "teacher", "rule", *ADAPTED]
    parser.add_argument(
        "--rows", nargs="+", choices=names, default=names, metavar="NAME", help="only these: %(choices)s"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/study-adapt"))
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device)
    original = plain_spec(model.config.get_text_config(decoder=True)).original_max_position_embeddings
    target = int(args.factor * original)

    def ids(file: Path) -> torch.Tensor:
        found: torch.Tensor = tokenizer(file.read_text("utf-8"), return_tensors="pt", verbose=False).input_ids[0]
        return found

    fitted, held_out = [ids(file)[:target] for file in args.fitted], {file.stem: ids(file) for file in args.held_out}
    rule = rule_of(args.rule, args.factor)
    rows = [
        Row("unpatched"),
        Row("teacher", {"method": args.teacher, "context_length": target}),
        Row("rule", {"method": rule.name, "context_length": target, **rule.changed_options()}),
    ]
    for name, changes in ADAPTED.items():
        changed = {"teacher": args.teacher, **changes}
        changed["adapt_options"] = {"rule": args.rule, **changed.get("adapt_options", {})}
        texts = fitted[: changed.pop("texts", None)]
        fit = {"context_length": target, "max_texts": len(texts), **changed}
        rows.append(Row(name, fit=fit, documents=texts))

    settings = {name: str(getattr(args, name)) for name in ("model", "rule", "teacher", "factor", "fitted")}
    study = Study(args.output_dir, args.model, fitted, settings, dtype=args.dtype, device=args.device)
    pieces = {
        text: [
            Texts(
                args.output_dir / f"{text}-pieces.jsonl",
                [of_text],
                [size],
                {"cut": True, "max_tokens": size, "max_documents": most, "progress": False},
            )
            for size, most in {original // 16: SHORT_PIECES, original: LONG_PIECES}.items()
        ]
        for text, of_text in held_out.items()
    }
    for row in (row for row in rows if row.name in args.rows):
        doublings = [
            original << n for n in range(20) if original << n <= (target if row.name != "unpatched" else original)
        ]
        measured = [each for of_text in pieces.values() for each in of_text]
        first, of_first = next(iter(held_out.items()))
        lengths = [original // 16, original // 4, *(size for size in doublings if size <= len(of_first))]
        measured.append(Texts(args.output_dir / f"{first}.jsonl", [of_first], lengths, {"progress": False}))
        study.run(row, *measured)
        study.write(tables(study, rows, pieces, original, target))


def tables(
    study: Study, rows: Sequence[Row], pieces: dict[str, list[Texts]], original: int, target: int
) -> dict[str, list[Line]]:
    """Return the differences on pieces of each text, and perplexities of the beginning of the first."""
    found: dict[str, list[Line]] = {}
    for text, of_text in pieces.items():
        sizes = {each.lengths[0]: each.records() for each in of_text}
        found[text] = [
            {
                text: row.name,
                **{
                    f"pieces of {length_name(size)}": str(paired_interval(of[row.name][size], of["unpatched"][size]))
                    if size in of.get(row.name, {}) and size in of.get("unpatched", {})
                    else ""
                    for size, of in sizes.items()
                },
            }
            for row in rows
            if any(row.name in of for of in sizes.values())
        ]
    lengths = [original // 16, original // 4, *(original << n for n in range(20) if original << n <= target)]
    first = next(iter(pieces))
    found["beginning"] = Texts(study.folder / f"{first}.jsonl", [], lengths).lines(rows)
    return found


if __name__ == "__main__":
    main()
