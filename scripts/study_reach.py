"""Whether training on a task mix teaches a model to read far: in formats and tasks that it was not trained on.

    python scripts/study_reach.py --output-dir outputs/reach    # the tiny model: under half an hour on two quiet cores
    python scripts/study_reach.py --model .cache/smollm2-135m-instruct --output-dir outputs/reach-smollm2 --rows dca

Rules without training are compared with the same model trained on plain text, on a task mix, and on both, with the same
number of tokens, the same rule and the same steps. All rows are measured by the perplexity of the held-out novel, and
by retrieval in it: formats that no training has (``passkey``, ``kv``), and tasks that no training has (the others).
The questions of a text share it, and the texts are the same for all rows. What is trained or measured is not done
again, so an interrupted study goes on; with ``--rows`` it can be done in parts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel, tiny_model_path
from hf_posenc.checkpoint.loading import read_tokenizer
from hf_posenc.checkpoint.manifest import MANIFEST
from hf_posenc.evaluation.intervals import share_interval
from hf_posenc.evaluation.records import RetrievalRecord
from hf_posenc.retrieving.measuring_retrieval import check_prompts
from hf_posenc.training import RECIPES, FinetuneConfig
from hf_posenc.training.data import to_token_ids
from hf_posenc.training.dry_run import dry_run
from hf_posenc.training.launch import Launch
from hf_posenc.training.run_folder import read_log
from hf_posenc.utils.dtypes import computes_natively
from hf_posenc.utils.units import length_name
from study import Line, Questions, Row, Study, Texts, fitted_rule, select

FORMATS = ("passkey", "kv")  # what the task mix trains, a key with a value and a hidden sentence, in other formats
TASKS = ("graph_parents", "graph_bfs", "babilong_qa1", "babilong_qa2", "niah_multikey_1")
UNPATCHED, FITTED, DCA = "unpatched", "fitted", "dca"
ZERO_SHOT = ("ntk", "yarn", FITTED, "dynamic_yarn", DCA)
REACH = RECIPES["reach"].values
MIXES: dict[str, list[str] | None] = {
    "plain text": None,
    "task mix": ["kv=0.4", "needles=0.3", "knots=0.3"],
    "both": REACH["task_mix"],
}
SHARED: dict[str, Any] = {"lr_scheduler_type": "linear", "eval_documents": 0, "save_total_limit": 1}
KINDS = ("kv", "needles", "knots", "text", "short_text")  # of data in the mixes


@dataclass(frozen=True)
class Plan:
    """What is done with a model.

    Attributes:
        name: In the records.
        model: Its path.
        original: Tokens it was trained on.
        target: Tokens it is extended to.
        lengths: At which perplexity is measured.
        pieces: Of the held-out novel, each of the longest length.
        far: Lengths of the retrieval tasks.
        tasks: Which of ``FORMATS`` and ``TASKS``.
        samples: Texts of each task and length.
        questions: Of each text.
        token_budget: Of each training.
        training: Settings of FinetuneConfig, besides ``SHARED``.
        preset: The fitted rule; without one it is fitted first,
        fit: with these settings of FitConfig.
        read_with: Other methods that trained models are read with, besides the rule of the training.
        seeds: Of the trainings.
        dtype: In which it is measured.
    """

    name: str
    model: Path
    original: int
    target: int
    lengths: tuple[int, ...]
    pieces: int
    far: tuple[int, ...]
    samples: int
    questions: int
    token_budget: int
    training: dict[str, Any]
    tasks: tuple[str, ...] = (*FORMATS, *TASKS)
    preset: str | None = None
    fit: Mapping[str, Any] = field(default_factory=dict)
    read_with: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    dtype: str = "auto"


def tiny_plan() -> Plan:
    return Plan(
        name="tiny",
        model=Path(tiny_model_path()),
        original=256,
        target=1024,
        lengths=(64, 128, 256, 512, 1024),
        pieces=16,
        far=(1024,),
        samples=25,
        questions=4,
        token_budget=200_000,
        training={"learning_rate": 2e-4, "save_steps": 100},  # rate and fit of study_budget.py; a step is a block
        fit={"max_texts": 16, "held_out": 0, "steps": 150},
        tasks=(*FORMATS, "graph_parents", "babilong_qa1", "babilong_qa2", "niah_multikey_1"),
        seeds=(0, 1),
    )


def smollm2_plan(model: Path) -> Plan:
    in_bf16 = computes_natively(torch.bfloat16)
    return Plan(
        name="SmolLM2",
        model=model,
        original=8192,
        target=32768,
        lengths=(512, 2048, 8192, 16384, 32768),
        pieces=1,
        far=(8192, 16384, 32768),
        samples=3,  # most of the time goes into reading a text
        questions=34,
        token_budget=500_000,
        training={
            **{name: REACH[name] for name in ("position_schedule", "learning_rate", "warmup_steps")},
            **{"seq_len": 2048, "gradient_accumulation_steps": 1, "save_steps": 10, "bf16": in_bf16},
        },
        tasks=(*FORMATS, "graph_parents", "babilong_qa1", "niah_multikey_1"),
        preset="smollm2-135m-fitted-4x",
        read_with=(DCA,),
        dtype="bfloat16" if in_bf16 else "float32",
    )


def held_out() -> list[str]:
    return [load_novel(HELD_OUT_NOVEL)]


def trained_on() -> list[str]:
    return [load_novel(name) for name in TRAIN_NOVELS]


def right(asked: Sequence[RetrievalRecord]) -> str:
    """Return the share of right answers in percent with its 95 % interval, teacher-forced."""
    return str(share_interval([one.score() or 0.0 for one in asked], [one.text for one in asked]))


def tokens_right(asked: Sequence[RetrievalRecord]) -> str:
    """Return the share of the tokens of answers that were the likeliest, in percent."""
    return f"{100 * sum(one.n_right for one in asked) / sum(one.n_tokens for one in asked):.1f}"


def loss(asked: Sequence[RetrievalRecord]) -> str:
    """Return the mean loss of a token of an answer, in nats."""
    return f"{math.fsum(one.nll_sum for one in asked) / sum(one.n_tokens for one in asked):.2f}"


MEASURES: dict[str, Callable[[Sequence[RetrievalRecord]], str]] = {"right": right, "tokens": tokens_right, "loss": loss}


def mean_loss(steps: Sequence[Mapping[str, Any]], kind: str, end: int) -> float | None:
    """Return the loss of a kind over its first (0) or last (-1) fifth of steps, each token alike; None without any."""
    of_kind = [step for step in steps if step["kind"] == kind]
    count = math.ceil(len(of_kind) / 5)
    part = of_kind[:count] if end == 0 else of_kind[len(of_kind) - count :]
    tokens = sum(step["tokens_in_loss"] for step in part)
    return math.fsum(step["loss"] * step["tokens_in_loss"] for step in part) / tokens if part else None


class Reach:
    """The rows of a plan, what is measured of them, and their tables."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        tokenizer = read_tokenizer(plan.model)
        asked: dict[str, Any] = {"questions": plan.questions, "samples": plan.samples, "documents": held_out()}
        check_prompts(tokenizer, plan.tasks, plan.far, **asked)
        training = {**SHARED, **plan.training, "token_budget": plan.token_budget, "mixes": MIXES}
        measured = {"lengths": plan.lengths, "pieces": plan.pieces, "questions": plan.questions}
        settings = {"model": plan.name, "target": plan.target, "training": training, "measured": measured}
        self.study = Study(folder, plan.model, trained_on(), settings, dtype=plan.dtype)
        self.plan, self.folder, self.fitted = plan, folder, folder / "fitted.json"
        # The same tokens for all rows, also for those that are read at the short lengths alone.
        pieces = {"cut": True, "max_tokens": max(plan.lengths), "max_documents": plan.pieces}
        self.texts = Texts(folder / "perplexity.jsonl", held_out(), plan.lengths, pieces)
        self.questions = Questions(
            folder / "retrieval.jsonl", plan.tasks, plan.far, plan.samples, plan.questions, held_out()
        )
        self.rows = [Row(UNPATCHED), *(Row(name, self.rule(name)) for name in ZERO_SHOT)]
        for name in MIXES:
            for read_with in (None, *plan.read_with):
                for seed in plan.seeds:
                    trained = f"{name}, seed {seed}"
                    label = trained if read_with is None else f"{trained}, {read_with}"
                    rule = None if read_with is None else self.rule(read_with)
                    self.rows.append(Row(label, rule, training=self.training(name, seed)))

    def rule(self, name: str) -> dict[str, Any]:
        """Return the keywords of ``patch_model`` for a method."""
        if name == FITTED and self.plan.preset is not None:
            return {"preset": self.plan.preset}
        rule: dict[str, Any] = {"method": name, "context_length": self.plan.target}
        return {**rule, "source": str(self.fitted)} if name == FITTED else rule

    def training(self, name: str, seed: int) -> dict[str, Any]:
        rule = self.rule(FITTED)
        if "source" in rule:
            rule["options"] = {"source": rule.pop("source")}
        return {
            **{**SHARED, **self.plan.training, **rule},
            "output_dir": str(self.study.run_folder(f"{name}, seed {seed}")),
            "task_mix": MIXES[name],
            "token_budget": self.plan.token_budget,
            "seed": seed,
        }

    def run(self, row: Row) -> None:
        """Train what a row needs, and measure it; the rule is fitted first if there is no preset."""
        options = (row.training or {}).get("options", {})
        if "source" in {**(row.rule or {}), **options}:
            fitted_rule(self.fitted, self.plan.model, trained_on(), context_length=self.plan.target, **self.plan.fit)
        texts, questions = self.texts, self.questions
        if row.name == UNPATCHED:  # beyond the length it was trained on it is known to fail
            short, far = ([at for at in each.lengths if at <= self.plan.original] for each in (texts, questions))
            texts, questions = replace(texts, lengths=short), replace(questions, lengths=far)
        self.study.run(row, texts, questions, model_name=self.plan.name)

    def check_trainings(self, selected: Sequence[Row]) -> None:
        """Raise what the trainings of rows would, before any row is measured.

        Any rule shows whether blocks and budget suit the mixes; the fitted one may not be there yet.
        """
        configs = []
        for training in {row.training["output_dir"]: row.training for row in selected if row.training}.values():
            if not (Path(training["output_dir"]) / MANIFEST).is_file():
                any_rule: dict[str, Any] = {
                    "method": None,
                    "preset": None,
                    "options": {},
                    "context_length": self.plan.target,
                }
                configs.append(FinetuneConfig(**{**training, **any_rule}))
        if configs:
            tokenizer = read_tokenizer(self.plan.model)
            texts = to_token_ids(tokenizer, trained_on())  # once for all
            for config in configs:
                dry_run(str(self.plan.model), config, Launch(), texts=(tokenizer, texts))

    def show(self) -> None:
        perplexities = self.texts.lines(self.rows, length_name)
        tables = {"perplexity": perplexities, "retrieval": self.answers(), "training": self.losses()}
        self.study.write(tables)

    def answers(self) -> list[Line]:
        """Return a line for each length, measure and row, with a column for each task."""
        answered, lines = self.questions.answered(), []
        for length in self.plan.far:
            for measure, measured in MEASURES.items():
                for row in self.rows:
                    asked = {task: answered.get((row.name, task, length), []) for task in self.plan.tasks}
                    if any(asked.values()):
                        cells = {task: measured(each) if each else "" for task, each in asked.items()}
                        lines.append({"length": length_name(length), "measure": measure, "name": row.name, **cells})
        return lines

    def losses(self) -> list[Line]:
        """Return the loss of each kind of data in the first and last fifth of its steps; all have other blocks."""
        lines = []
        for row in self.rows:
            if row.training is None or row.rule is not None or row.training["task_mix"] is None:
                continue
            folder = Path(row.training["output_dir"])
            steps = read_log(folder / "train_log.jsonl")
            for when, end in (("first fifth", 0), ("last fifth", -1)) if (folder / MANIFEST).is_file() else ():
                losses = {kind: mean_loss(steps, kind, end) for kind in KINDS}
                cells = {kind: "" if loss is None else f"{loss:.2f}" for kind, loss in losses.items()}
                lines.append({"name": row.name, "steps": when, **cells})
        return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/reach"))
    parser.add_argument("--model", default="tiny", metavar="PATH", help="tiny (default), or the folder of SmolLM2-135M")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these, such as dca 'task mix, seed 0'")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only these retrieval tasks")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="only trainings with these seeds")
    parser.add_argument("--samples", type=int, metavar="TEXTS", help="texts of each task and length")
    parser.add_argument("--questions", type=int, help="questions of each text")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS", help="measure at these lengths alone")
    parser.add_argument("--token-budget", type=int, metavar="TOKENS", help="tokens of each training")
    parser.add_argument("--learning-rate", type=float, metavar="RATE", help="the highest of each training")
    args = parser.parse_args()
    plan = tiny_plan() if args.model == "tiny" else smollm2_plan(Path(args.model))
    given = {name: getattr(args, name) for name in ("samples", "questions", "token_budget")}
    given |= {name: value and tuple(value) for name, value in (("tasks", args.tasks), ("seeds", args.seeds))}
    if args.lengths:
        given |= {"lengths": tuple(args.lengths), "far": tuple(args.lengths)}
    if args.learning_rate is not None:
        given["training"] = {**plan.training, "learning_rate": args.learning_rate}
    reach = Reach(args.output_dir, replace(plan, **{name: value for name, value in given.items() if value is not None}))
    selected = select(reach.rows, args.rows)
    reach.check_trainings(selected)
    for row in selected:
        reach.run(row)
        reach.show()
    print(f"See {reach.folder / 'study.md'}.")


if __name__ == "__main__":
    main()
