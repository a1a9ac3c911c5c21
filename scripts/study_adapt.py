"""Adapted models side by side: rules, ranks, steps, texts and seeds, against the unpatched model and its teacher.

    scripts/fetch_smollm2
    python scripts/study_adapt.py --fitted emma.txt module.txt manual.txt french.txt --held-out novel.txt code.txt \
        --rule smollm2-135m-fitted-4x --output-dir outputs/study-adapt

Each row changes the weights for a rule that is there already (``hf-posenc fit --steps 0 --adapt``). It is measured on
texts that were not fitted on: on pieces of a sixteenth of the trained length and of all of it, as a difference from the
unpatched model with its paired interval; and on the beginning of each text, up to the target. What is measured is not
measured again, so an interrupted study goes on, and several processes can share the rows (``--rows``). A row takes
minutes on a GPU, and most of an hour on two cores for SmolLM2.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_posenc import FitConfig, fit_method, perplexity, retrieval
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.evaluation import read_records
from hf_posenc.evaluation.intervals import paired_interval
from hf_posenc.evaluation.rows import extended_as
from hf_posenc.fitting.adapting import Adapter
from hf_posenc.patching.extension import plain_spec
from hf_posenc.utils.files import write_whole
from hf_posenc.utils.units import length_name
from study_folder import claim, passkeys_right

SHORT_PIECES, LONG_PIECES = 64, 6  # of each text at most: of a sixteenth of the trained length, and of all of it
# Changes of FitConfig; those of the weights are under adapt_options. "texts" is how many are fitted on.
ROWS: dict[str, dict[str, Any]] = {
    "adapted": {},
    "seed 1": {"seed": 1},
    "seed 2": {"seed": 2},
    "one text": {"texts": 1},
    "two texts": {"texts": 2},
    "no steps on short texts": {"adapt_options": {"short_steps": 0}},
    "120 steps on short texts": {"adapt_options": {"short_steps": 120}},
    "rank 4": {"adapt_options": {"rank": 4}},
    "rank 8": {"adapt_options": {"rank": 8}},
    "rank 32": {"adapt_options": {"rank": 32}},
    "rank 64": {"adapt_options": {"rank": 64}},
    "40 steps in each layer": {"adapt_options": {"steps": 40}},
    "360 steps in each layer": {"adapt_options": {"steps": 360}},
    "start yarn": {"start": "yarn"},
    "start ntk": {"start": "ntk"},
    "start linear": {"start": "linear"},
}
RULES = ("unpatched", "teacher", "rule")  # whose weights do not change


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--rule", default="yarn", help="method, preset or folder of a fit whose rule is taken")
    parser.add_argument("--teacher", default="dca")
    parser.add_argument("--factor", type=float, default=4)
    parser.add_argument("--fitted", nargs="+", type=Path, required=True, help="text files to fit on")
    parser.add_argument("--held-out", nargs="+", type=Path, required=True, help="text files to measure on")
    parser.add_argument("--rows", nargs="+", choices=[*RULES, *ROWS], default=[*RULES, *ROWS], metavar="NAME")
    parser.add_argument("--passkeys", type=int, default=0, help="asked of each row in one text of each length")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/study-adapt"))
    args = parser.parse_args()
    claim(
        args.output_dir, {name: str(getattr(args, name)) for name in ("model", "rule", "teacher", "factor", "fitted")}
    )
    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device)

    def ids(file: Path) -> torch.Tensor:
        found: torch.Tensor = tokenizer(file.read_text("utf-8"), return_tensors="pt", verbose=False).input_ids[0]
        return found

    original = plain_spec(model.config.get_text_config(decoder=True)).original_max_position_embeddings
    target = int(args.factor * original)
    fitted, held_out = [ids(file)[:target] for file in args.fitted], {file.stem: ids(file) for file in args.held_out}
    for name in args.rows:
        if is_done(args.output_dir, name, args.held_out[-1].stem):
            continue
        row: dict[str, Any] | None = {"method": args.teacher}
        adapter = None
        if name == "unpatched":
            row = None
        elif name != "teacher":
            changes = dict(ROWS.get(name, {}))
            texts = fitted[: changes.pop("texts", None)]
            settings = {"start": args.rule, "teacher": args.teacher, "adapt_options": {}, **changes}
            config = FitConfig(target, steps=0, held_out=0, max_texts=len(texts), **settings)  # type: ignore[arg-type]  # an int
            if name == "rule":
                method = config.start_method(args.factor)
                row = {"method": method.name, **method.changed_options()}
            else:
                result = fit_method(model, tokenizer, texts, config, work_dir=args.output_dir / f"{name}.work")
                row, adapter = {"method": "fitted", **result.options}, result.adapter
                assert adapter is not None
                save_file(adapter.weights, args.output_dir / f"adapter, {name}.safetensors")
        measure(model, tokenizer, name, row, adapter, held_out, original, target, args.passkeys, args.output_dir)
    show(args.output_dir, list(held_out), original, target)


def measure(
    model: Any,
    tokenizer: Any,
    name: str,
    row: dict[str, Any] | None,
    adapter: Adapter | None,
    held_out: dict[str, torch.Tensor],
    original: int,
    target: int,
    passkeys: int,
    folder: Path,
) -> None:
    """Measure a row on all texts."""
    row = None if row is None else {**row, "context_length": target}
    shared: dict[str, Any] = {"tokenizer": tokenizer, "label": name, "progress": False}
    doublings = lengths_read(original, original if row is None else target)
    with nullcontext() if adapter is None else adapter.applied(model), extended_as(model, row):
        if passkeys:
            retrieval(
                model, tokenizer, ("passkey",), doublings, questions=passkeys,
                output=folder / "passkeys.jsonl", label=name, progress=False,
            )  # fmt: skip
        for text, ids in held_out.items():
            for size, most in {original // 16: SHORT_PIECES, original: LONG_PIECES}.items():
                perplexity(
                    model, [ids], [size], cut=True, max_tokens=size, max_documents=most,
                    output=folder / f"{text}-pieces.jsonl", **shared,
                )  # fmt: skip
            lengths = [original // 16, original // 4, *(size for size in doublings if size <= len(ids))]
            perplexity(model, [ids], lengths, output=folder / f"{text}.jsonl", **shared)


def lengths_read(original: int, target: int) -> list[int]:
    """Return the original length and its doublings up to the target."""
    return [original << shift for shift in range(target.bit_length()) if original << shift <= target]


def is_done(folder: Path, name: str, last_text: str) -> bool:
    """Return whether a row has the last of its perplexities; passkeys are asked before them."""
    file = folder / f"{last_text}.jsonl"
    return file.is_file() and any(record.label == name for record in read_records(file))


def show(folder: Path, texts: list[str], original: int, target: int) -> None:
    """Write and print, for each text, differences on pieces and perplexities of its beginning."""
    lines, sizes = [], (original // 16, original)
    for text in texts:
        pieces = {(r.label, r.context_length): r for r in read_records(folder / f"{text}-pieces.jsonl")}
        start = {(r.label, r.context_length): r.perplexity for r in read_records(folder / f"{text}.jsonl")}
        lengths = sorted({length for _, length in start})
        headings = [text, *(f"pieces of {length_name(size)}" for size in sizes), *map(length_name, lengths)]
        lines += ["", f"| {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) - 1)]
        for name in (*RULES, *ROWS):
            if (name, original) not in pieces:
                continue
            cells = []
            for size in sizes:
                one, other = pieces.get((name, size)), pieces.get(("unpatched", size))
                cells.append("" if one is None or other is None else str(paired_interval(one, other)))
            cells += [f"{start[name, length]:.2f}" if (name, length) in start else "" for length in lengths]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    if (folder / "passkeys.jsonl").is_file():
        lengths = lengths_read(original, target)
        lines += ["", f"| passkeys | {' | '.join(map(length_name, lengths))} |", "|---|" + "---:|" * len(lengths)]
        for name in (*RULES, *ROWS):
            cells = [passkeys_right(folder / "passkeys.jsonl", size, name) for size in lengths]
            if any(cells):
                lines.append(f"| {name} | {' | '.join(cells)} |")
    write_whole(folder / "study.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
