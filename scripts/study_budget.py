"""What a small token budget buys: the tiny model taken from 256 to 1024 and 2048 tokens by every method.

    python scripts/study_budget.py --output-dir outputs/study          # under an hour on two quiet cores
    python scripts/study_budget.py --output-dir outputs/study --all    # the rest: about three hours more

The methods zero-shot and after 50k tokens, 0.6 % of the 8 M it was made with, some after 80k, 1 % (--all: after 200k
and 800k too), PoSE's short windows and LoRA beside training at full length, and the upper bound: the same model
trained at 1024 tokens (--all: 2048 too) from the start on all 8 M. Of the rules that keep known distances, which train
at half the speed, rerope and dca are trained, self_extend and leaky_rerope measured zero-shot. Perplexity is that of
the held-out novel. What is in ``results.jsonl`` is not measured again, so an interrupted study goes on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc import FitConfig, fit_method, patched
from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel, tiny_model_path
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.evaluation import Record, perplexity, read_records
from hf_posenc.reporting.looks import INK, Look, numbered_look
from hf_posenc.reporting.plot import Chart, Line, draw_chart
from hf_posenc.training import FinetuneConfig, finetune
from hf_posenc.utils.files import write_whole
from pretrain_tiny import CONTEXT
from study_folder import claim

LENGTHS = (256, 512, 1024, 2048)
BUDGETS = (50_000, 80_000, 200_000, 800_000)  # 0.6, 1, 2.5 and 10 % of the tokens it was made with
USUAL = (50_000, 200_000, 800_000)  # of most rows
WITH_ALL = 200_000  # these and more are not in the first hour
PRETRAINED_ON = 8_000_000
STEP_TOKENS = 1024  # or one block: 19 steps of 4096 are too few for the small budgets
UPPER_BOUND = "trained at"
FITTED = "fitted"
FITTED_TEXTS = 16  # of the target length, of the training novels
SHOWN = 1.6  # times the perplexity at the original length: the charts' highest
# A model of 5 M parameters takes larger steps than the papers' 7 B. Of 1e-4, 2e-4 and 5e-4 the best for yarn x4 with
# 80k tokens; rules that keep the positions the model knows have less to learn, and more to lose by large steps.
SHARED: dict[str, Any] = {"learning_rate": 2e-4, "lr_scheduler_type": "linear", "eval_documents": 0, "save_steps": 1000}
GENTLE = {"learning_rate": 3e-5}


@dataclass(frozen=True)
class Row:
    """One way to extend: a line of the table.

    Attributes:
        name: What the table calls it.
        target: Tokens it is extended to.
        settings: Of FinetuneConfig, besides ``SHARED``.
        budgets: Tokens of each run; zero-shot is always measured.
    """

    name: str
    target: int
    settings: dict[str, Any] = field(default_factory=dict)
    budgets: tuple[int, ...] = USUAL

    @property
    def label(self) -> str:
        return f"{self.name} to {self.target}"


def rows() -> list[Row]:
    """Return what is compared, the most telling first."""
    plain = {"method": "abf", "options": {"rope_theta": 10000.01}}  # the base it has; abf wants a larger one
    methods: dict[str, dict[str, Any]] = {
        "yarn": {"method": "yarn"},
        "dynamic_yarn": {"method": "dynamic_yarn"},
        "rerope": {"method": "rerope", **GENTLE},
        "dca": {"method": "dca", **GENTLE},
        "yarn, PoSE": {"method": "yarn", "position_schedule": "pose"},
        "yarn, LoRA": {"method": "yarn", "lora": True, "learning_rate": 2e-3},
        "ntk": {"method": "ntk"},
        "linear": {"method": "linear"},
        "no scaling": plain,
        "ntk_by_parts": {"method": "ntk_by_parts"},
        "dynamic": {"method": "dynamic"},
        "abf (base x50)": {"method": "abf", "options": {"rope_theta": 500000.0}},  # as Llama-2-Long raised it
        "nope (DroPE)": {"method": "nope"},
        FITTED: {"method": "fitted"},  # Study.settings gives its rule
        "self_extend": {"method": "self_extend"},
        "leaky_rerope": {"method": "leaky_rerope"},
    }
    budgets = {
        **dict.fromkeys(("yarn", "dynamic_yarn", "ntk", FITTED), BUDGETS),
        **dict.fromkeys(("rerope", "dca"), BUDGETS[:3]),  # they train at half the speed
        **dict.fromkeys(("self_extend", "leaky_rerope"), ()),
    }
    four = [Row(name, 4 * CONTEXT, settings, budgets.get(name, USUAL)) for name, settings in methods.items()]
    eight = [Row(name, 8 * CONTEXT, methods[name]) for name in ("yarn", "dynamic_yarn", "yarn, PoSE", "ntk", FITTED)]
    return [*four, *eight, *(Row(name, 8 * CONTEXT, methods[name], ()) for name in ("rerope", "dca"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/study"))
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these rows, such as yarn ntk")
    parser.add_argument("--all", action="store_true", help="200k and 800k tokens too, and the upper bound at 2048")
    args = parser.parse_args()
    selected = [row for row in rows() if not args.rows or row.name in args.rows]
    if not selected:
        raise SystemExit(f"no such row: {args.rows}. Known: {', '.join(sorted({row.name for row in rows()}))}.")
    study = Study(args.output_dir)
    began = time.perf_counter()
    study.measure_base()
    for budget in (0, *(budget for budget in BUDGETS if args.all or budget < WITH_ALL)):
        for row in selected:
            study.run(row, budget)
        study.show()
        if not args.rows and budget == 0:
            study.upper_bound(4 * CONTEXT)
    if not args.rows and args.all:
        study.upper_bound(8 * CONTEXT)
        study.show()
    print(
        f"{(time.perf_counter() - began) / 60:.0f} minutes. See {study.folder / 'study.md'} and the charts beside it."
    )


class Study:
    """The runs of a study, and the file their numbers are in."""

    def __init__(self, folder: Path) -> None:
        settings = {row.label: {**SHARED, **row.settings} for row in rows()}
        self.folder, self.results = folder, folder / "results.jsonl"
        claim(folder, {"step_tokens": STEP_TOKENS, "pretrained_on": PRETRAINED_ON, "rows": settings})
        self.train_texts = [load_novel(name) for name in TRAIN_NOVELS]

    def records(self) -> list[Record]:
        return read_records(self.results) if self.results.is_file() else []

    def has(self, label: str, tokens_trained: int) -> bool:
        """Say whether a run is measured; trained tokens come in whole steps."""
        found = [one for one in self.records() if one.label == label]
        near = [one for one in found if abs(one.tokens_trained - tokens_trained) <= max(LENGTHS)]
        return {one.context_length for one in near} >= set(LENGTHS)

    def measure(self, model: Any, tokenizer: Any, label: str, tokens_trained: int = 0) -> None:
        perplexity(
            model,
            [load_novel(HELD_OUT_NOVEL)],
            LENGTHS,
            tokenizer=tokenizer,
            cut=True,
            max_documents=16,
            output=self.results,
            model_name="tiny",
            label=label,
            tokens_trained=tokens_trained,
            progress=False,
        )

    def measure_base(self) -> None:
        if not self.has("as it is", 0):
            self.measure(*load_model(tiny_model_path()), "as it is")

    def settings(self, row: Row) -> dict[str, Any]:
        """Return a row's settings; a fitted rule is fitted first, on the training novels."""
        if row.name != FITTED:
            return row.settings
        rule = self.folder / f"fitted-{row.target}.json"
        if not rule.is_file():
            model, tokenizer = load_model(tiny_model_path())
            config = FitConfig(context_length=row.target, max_texts=FITTED_TEXTS, held_out=0, steps=150)  # type: ignore[arg-type]  # an int
            fit_method(model, tokenizer, self.train_texts, config).save(rule)
        return {**row.settings, "options": {"source": str(rule)}}

    def run(self, row: Row, budget: int) -> None:
        """Measure a row after a budget, or zero-shot (0); every run starts from the model as it was made."""
        if self.has(row.label, budget):
            return
        if budget in row.budgets:
            self._train(row, budget)
        elif budget == 0:
            model, tokenizer = load_model(tiny_model_path())
            settings = self.settings(row)
            extension = {"context_length": row.target, **settings.get("options", {})}
            with patched(model, settings["method"], **extension):
                self.measure(model, tokenizer, row.label)

    def _train(self, row: Row, budget: int) -> None:
        model, tokenizer = load_model(tiny_model_path())
        window = CONTEXT if row.settings.get("position_schedule", "full") != "full" else row.target
        folder = self.folder / "runs" / f"{row.label}, {budget}".replace(" ", "-")
        config = FinetuneConfig(
            **{**SHARED, **self.settings(row)},
            output_dir=str(folder),
            context_length=row.target,  # type: ignore[arg-type]  # an int becomes a ContextLength
            seq_len=window,  # type: ignore[arg-type]  # the same
            per_device_train_batch_size=max(1, STEP_TOKENS // window),
            token_budget=budget,  # type: ignore[arg-type]  # becomes a TokenCount
            resume_from_checkpoint="true",
        )
        result = finetune(model, tokenizer, self.train_texts, config)
        self.measure(result.model, tokenizer, row.label, result.tokens_trained)
        shutil.rmtree(folder)  # the numbers are what is kept

    def upper_bound(self, target: int) -> None:
        label = f"{UPPER_BOUND} {target}"
        if self.has(label, 0):
            return
        folder = self.folder / f"from-the-start-{target}"
        if not (folder / "training.json").is_file():
            script = Path(__file__).with_name("pretrain_tiny.py")
            words = ["--output-dir", str(folder), "--context-length", str(target)]
            subprocess.run([sys.executable, str(script), *words], check=True)
        self.measure(*load_model(folder), label)

    def show(self) -> None:
        records = self.records()
        text = "\n\n".join(table(records, target) for target in sorted({row.target for row in rows()}))
        write_whole(self.folder / "study.md", text + "\n")
        print(f"\n{text}\n", flush=True)
        for target in sorted({row.target for row in rows()}):
            for length in (CONTEXT, target):
                drawn = draw_chart(chart(records, target, length))
                write_whole(self.folder / f"to-{target}-at-{length}.png", drawn.png)


def by_tokens(records: list[Record], label: str) -> dict[int, dict[int, float]]:
    """Return perplexities by tokens trained, then by length."""
    found: dict[int, dict[int, float]] = {}
    for record in records:
        if record.label == label:
            found.setdefault(record.tokens_trained, {})[record.context_length] = record.perplexity
    return dict(sorted(found.items()))


def table(records: list[Record], target: int) -> str:
    """Return the Markdown table of one target: perplexity at 256 / at the target, by tokens trained."""
    lines = [
        f"| to {target}: perplexity at {CONTEXT} / {target} | zero-shot | 50k | 80k | 200k | 800k |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for label, shown in (
        ("as it is", "as it is"),
        (f"{UPPER_BOUND} {target}", f"{UPPER_BOUND} {target} from the start"),
    ):
        for curve in by_tokens(records, label).values():
            lines.append(f"| {shown} | {curve[CONTEXT]:.2f} / {curve[target]:.2f} | | | | |")
    for row in rows():
        curves = by_tokens(records, row.label)
        if row.target == target and curves:
            cells = {nearest(tokens): f"{curve[CONTEXT]:.2f} / {curve[target]:.2f}" for tokens, curve in curves.items()}
            lines.append(f"| {row.name} | " + " | ".join(cells.get(at, "") for at in (0, *BUDGETS)) + " |")
    return "\n".join(lines)


def nearest(tokens: int) -> int:
    """Return the budget that a run of whole steps was given."""
    return min((0, *BUDGETS), key=lambda budget: abs(budget - tokens))


def chart(records: list[Record], target: int, length: int) -> Chart:
    """Return the lines of perplexity at a length by tokens trained, of the rows that were extended to a target."""
    positions = {tokens: index for index, tokens in enumerate((0, *BUDGETS))}
    most = SHOWN * by_tokens(records, "as it is")[0][CONTEXT]
    lines = []
    for number, row in enumerate(one for one in rows() if one.target == target and one.budgets):
        curves = by_tokens(records, row.label).items()
        points = [(positions[nearest(tokens)], curve[length]) for tokens, curve in curves]
        points = [point for point in points if point[1] <= most]
        look = numbered_look(number)
        if points:
            lines.append(Line(row.name, [x for x, _ in points], [value for _, value in points], look))
    used = sorted({x for line in lines for x in line.x})
    for curve in by_tokens(records, f"{UPPER_BOUND} {target}").values():
        name = f"{UPPER_BOUND} {target} from the start"
        lines.append(Line(name, used, [curve[length]] * len(used), Look(INK, "", "dashed")))
    ticks = [(x, f"{tokens // 1000}k" if tokens else "zero-shot") for tokens, x in positions.items()]
    title = f"{CONTEXT} to {target}: perplexity at {length} tokens of the held-out novel"
    shown = f"perplexity, those above {most:.0f} are not shown"
    return Chart(title, "tokens trained", shown, lines, [tick for tick in ticks if tick[0] in used], log_x=False)


if __name__ == "__main__":
    main()
