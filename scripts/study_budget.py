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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_posenc import FitConfig, fit_method
from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel, tiny_model_path
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.evaluation import Record
from hf_posenc.reporting.looks import INK, Look, numbered_look
from hf_posenc.reporting.plot import Chart, Line, draw_chart
from hf_posenc.utils.files import write_whole
from pretrain_tiny import CONTEXT
from study import Row, Study, Texts

Found = dict[str, dict[int, Record]]  # by row and length
LENGTHS = (256, 512, 1024, 2048)
BUDGETS = (50_000, 80_000, 200_000, 800_000)  # 0.6, 1, 2.5 and 10 % of the tokens it was made with
USUAL = (50_000, 200_000, 800_000)  # of most rows
WITH_ALL = 200_000  # these and more are not in the first hour
PRETRAINED_ON = 8_000_000
STEP_TOKENS = 1024  # or one block: 19 steps of 4096 are too few for the small budgets
BASE, UPPER_BOUND = "as it is", "trained at"
FITTED = "fitted"
FITTED_TEXTS = 16  # of the target length, of the training novels
SHOWN = 1.6  # times the perplexity at the original length: the charts' highest
# A model of 5 M parameters takes larger steps than the papers' 7 B. Of 1e-4, 2e-4 and 5e-4 the best for yarn x4 with
# 80k tokens; rules that keep the positions the model knows have less to learn, and more to lose by large steps.
SHARED: dict[str, Any] = {"learning_rate": 2e-4, "lr_scheduler_type": "linear", "eval_documents": 0, "save_steps": 1000}
GENTLE = {"learning_rate": 3e-5}


@dataclass(frozen=True)
class Way:
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

    def row(self, budget: int) -> str:
        """Return the name of its row after so many tokens."""
        return f"{self.label}, {budget}" if budget else self.label


def ways() -> list[Way]:
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
        FITTED: {"method": "fitted"},  # Budgets.settings gives its rule
        "self_extend": {"method": "self_extend"},
        "leaky_rerope": {"method": "leaky_rerope"},
    }
    budgets = {
        **dict.fromkeys(("yarn", "dynamic_yarn", "ntk", FITTED), BUDGETS),
        **dict.fromkeys(("rerope", "dca"), BUDGETS[:3]),  # they train at half the speed
        **dict.fromkeys(("self_extend", "leaky_rerope"), ()),
    }
    four = [Way(name, 4 * CONTEXT, settings, budgets.get(name, USUAL)) for name, settings in methods.items()]
    eight = [Way(name, 8 * CONTEXT, methods[name]) for name in ("yarn", "dynamic_yarn", "yarn, PoSE", "ntk", FITTED)]
    return [*four, *eight, *(Way(name, 8 * CONTEXT, methods[name], ()) for name in ("rerope", "dca"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/study"))
    names = list(dict.fromkeys(way.name for way in ways()))
    parser.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help="only these: %(choices)s")
    parser.add_argument("--all", action="store_true", help="200k and 800k tokens too, and the upper bound at 2048")
    args = parser.parse_args()
    selected = [way for way in ways() if not args.rows or way.name in args.rows]
    study = Budgets(args.output_dir)
    began = time.perf_counter()
    study.measure(Row(BASE))
    for budget in (0, *(budget for budget in BUDGETS if args.all or budget < WITH_ALL)):
        for way in selected:
            if budget in (0, *way.budgets):
                study.run(way, budget)
        study.show()
        if not args.rows and budget == 0:
            study.upper_bound(4 * CONTEXT)
    if not args.rows and args.all:
        study.upper_bound(8 * CONTEXT)
        study.show()
    print(
        f"{(time.perf_counter() - began) / 60:.0f} minutes. See {study.folder / 'study.md'} and the charts beside it."
    )


class Budgets:
    """The runs of the study, and the file their numbers are in."""

    def __init__(self, folder: Path) -> None:
        settings: dict[str, Any] = {way.label: {**SHARED, **way.settings} for way in ways()}
        settings |= {"step_tokens": STEP_TOKENS, "pretrained_on": PRETRAINED_ON}
        novels = [load_novel(name) for name in TRAIN_NOVELS]
        protocol = {"cut": True, "max_documents": 16, "progress": False}
        self.folder, self.study = folder, Study(folder, tiny_model_path(), novels, settings)
        self.texts = Texts(folder / "results.jsonl", [load_novel(HELD_OUT_NOVEL)], LENGTHS, protocol)

    def measure(self, row: Row) -> None:
        self.study.run(row, self.texts, model_name="tiny")

    def run(self, way: Way, budget: int) -> None:
        """Measure a way after a budget, or zero-shot (0); every run starts from the model as it was made."""
        row = Row(way.row(budget))
        if not self.texts.left(row.name):
            return
        settings = dict(way.settings)
        if way.name == FITTED:
            rule = self.folder / f"fitted-{way.target}.json"
            if not rule.is_file():
                fit = FitConfig(way.target, max_texts=FITTED_TEXTS, held_out=0, steps=150)
                fit_method(*load_model(tiny_model_path()), self.study.documents, fit).save(rule)
            settings["options"] = {"source": str(rule)}
        if budget == 0:
            rule_alone = {"method": settings["method"], "context_length": way.target, **settings.get("options", {})}
            self.measure(replace(row, rule=rule_alone))
            return
        window = CONTEXT if settings.get("position_schedule", "full") != "full" else way.target
        steps = {"seq_len": window, "per_device_train_batch_size": max(1, STEP_TOKENS // window)}
        training = {**SHARED, **settings, **steps, "context_length": way.target, "token_budget": budget}
        self.measure(replace(row, training=training))
        shutil.rmtree(self.study.run_folder(row.name))  # the numbers are what is kept

    def upper_bound(self, target: int) -> None:
        folder = self.folder / f"from-the-start-{target}"
        if not (folder / "training.json").is_file():
            script = Path(__file__).with_name("pretrain_tiny.py")
            words = ["--output-dir", str(folder), "--context-length", str(target)]
            subprocess.run([sys.executable, str(script), *words], check=True)
        self.measure(Row(f"{UPPER_BOUND} {target}", model=folder))

    def show(self) -> None:
        records = self.texts.records()
        targets = sorted({way.target for way in ways()})
        text = "\n\n".join(table(records, target) for target in targets)
        write_whole(self.folder / "study.md", text + "\n")
        print(f"\n{text}\n", flush=True)
        for target in targets:
            for length in (CONTEXT, target):
                drawn = draw_chart(chart(records, target, length))
                write_whole(self.folder / f"to-{target}-at-{length}.png", drawn.png)


def table(records: Found, target: int) -> str:
    """Return the Markdown table of one target: perplexity at 256 / at the target, by tokens trained."""

    def cell(name: str) -> str:
        if name not in records:
            return ""
        return " / ".join(f"{records[name][length].perplexity:.2f}" for length in (CONTEXT, target))

    lines = [
        f"| to {target}: perplexity at {CONTEXT} / {target} | zero-shot | 50k | 80k | 200k | 800k |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, shown in ((BASE, BASE), (f"{UPPER_BOUND} {target}", f"{UPPER_BOUND} {target} from the start")):
        if name in records:
            lines.append(f"| {shown} | {cell(name)} | | | | |")
    for way in ways():
        cells = [cell(way.row(budget)) for budget in (0, *BUDGETS)]
        if way.target == target and any(cells):
            lines.append(f"| {way.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def chart(records: Found, target: int, length: int) -> Chart:
    """Return the lines of perplexity at a length by tokens trained, of the rows that were extended to a target."""
    most = SHOWN * records[BASE][CONTEXT].perplexity
    lines = []
    for number, way in enumerate(one for one in ways() if one.target == target and one.budgets):
        names = [way.row(budget) for budget in (0, *BUDGETS)]
        points = [(x, records[name][length].perplexity) for x, name in enumerate(names) if name in records]
        points = [point for point in points if point[1] <= most]
        if points:
            look = numbered_look(number)
            lines.append(Line(way.name, [x for x, _ in points], [value for _, value in points], look))
    used = sorted({x for line in lines for x in line.x})
    if (bound := f"{UPPER_BOUND} {target}") in records:
        values = [records[bound][length].perplexity] * len(used)
        lines.append(Line(f"{bound} from the start", used, values, Look(INK, "", "dashed")))
    ticks = [(x, f"{tokens // 1000}k" if tokens else "zero-shot") for x, tokens in enumerate((0, *BUDGETS))]
    title = f"{CONTEXT} to {target}: perplexity at {length} tokens of the held-out novel"
    shown = f"perplexity, those above {most:.0f} are not shown"
    return Chart(title, "tokens trained", shown, lines, [tick for tick in ticks if tick[0] in used], log_x=False)


if __name__ == "__main__":
    main()
