"""Whether training on a task mix teaches a model to read far: in formats and tasks that it was not trained on.

    python scripts/study_reach.py --output-dir outputs/reach    # the tiny model: under half an hour on two quiet cores
    python scripts/study_reach.py --model .cache/smollm2-135m-instruct --output-dir outputs/reach-smollm2 --rows both

Rules without training are compared with the same model trained on plain text, on a task mix, and on both, with the same
number of tokens, the same rule and the same steps. All rows are measured by the perplexity of the held-out novel, and
by retrieval in it: formats that no training has (``passkey``, ``kv``), and tasks that no training has (the others).
The questions of a text share it, and the texts are the same for all rows. What is trained or measured is not done
again, so an interrupted study goes on; with ``--rows`` it can be done in parts.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hf_posenc import FitConfig, fit_method, patched, perplexity
from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel, tiny_model_path
from hf_posenc.checkpoint.loading import load_model, read_tokenizer
from hf_posenc.checkpoint.manifest import MANIFEST, tokens_trained
from hf_posenc.evaluation import read_records
from hf_posenc.evaluation.intervals import share_interval
from hf_posenc.evaluation.records import RetrievalRecord, read_retrieval_records
from hf_posenc.retrieving.measuring_retrieval import check_prompts, retrieval
from hf_posenc.training import RECIPES, FinetuneConfig, finetune
from hf_posenc.training.data import to_token_ids
from hf_posenc.training.dry_run import dry_run
from hf_posenc.training.launch import Launch
from hf_posenc.training.run_folder import read_log
from hf_posenc.utils.dtypes import computes_natively
from hf_posenc.utils.files import write_whole
from hf_posenc.utils.units import length_name
from study_folder import claim

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


@dataclass(frozen=True)
class Row:
    """A line of the tables: a model, trained or not, and the rule it is read with.

    Attributes:
        name: Of ``ZERO_SHOT`` or ``MIXES``, or unpatched.
        seed: Of the training; None where there is none.
        read_with: Another method than that of the training.
    """

    name: str
    seed: int | None = None
    read_with: str | None = None

    @property
    def label(self) -> str:
        parts = [self.name, f"seed {self.seed}" if self.seed is not None else "", self.read_with or ""]
        return ", ".join(part for part in parts if part)


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


def rows(plan: Plan) -> list[Row]:
    """Return the lines of the tables in their order."""
    trained = [
        Row(name, seed, read_with) for name in MIXES for read_with in (None, *plan.read_with) for seed in plan.seeds
    ]
    return [Row(UNPATCHED), *map(Row, ZERO_SHOT), *trained]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/reach"))
    parser.add_argument("--model", default="tiny", metavar="PATH", help="tiny (default), or the folder of SmolLM2-135M")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these, such as dca 'task mix' 'both, seed 0'")
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
    plan = replace(plan, **{name: value for name, value in given.items() if value is not None})
    selected = select(rows(plan), args.rows)
    study = Study(args.output_dir, plan)
    study.check_trainings(selected)
    for row in selected:
        study.run(row)
        study.show()
    print(f"See {study.folder / 'study.md'}.")


def select(known: Sequence[Row], names: Sequence[str] | None) -> list[Row]:
    """Return the rows of some names or labels; all without any.

    Raises:
        SystemExit: There is no row of a name.
    """
    if unknown := sorted(set(names or ()) - {word for row in known for word in (row.name, row.label)}):
        there = ", ".join(dict.fromkeys(row.name for row in known))
        raise SystemExit(f"no such row: {', '.join(unknown)}. Known: {there}. Quote a name with a space in it.")
    return [row for row in known if not names or not {row.name, row.label}.isdisjoint(names)]


class Study:
    """The trained models of a study, and the files their numbers are in."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        counts = {"questions": plan.questions, "samples": plan.samples}
        check_prompts(read_tokenizer(plan.model), plan.tasks, plan.far, **counts, documents=held_out())
        training = {**SHARED, **plan.training, "token_budget": plan.token_budget, "mixes": MIXES}
        measured = {"lengths": plan.lengths, "pieces": plan.pieces, "questions": plan.questions}
        claim(folder, {"model": plan.name, "target": plan.target, "training": training, "measured": measured})
        self.folder, self.plan = folder, plan
        self.perplexities, self.answers = folder / "perplexity.jsonl", folder / "retrieval.jsonl"

    def run(self, row: Row) -> None:
        """Train what a row needs, and measure it."""
        lengths, far = self.plan.lengths, self.plan.far
        if row.name == UNPATCHED:  # beyond the length it was trained on it is known to fail
            lengths, far = (tuple(one for one in each if one <= self.plan.original) for each in (lengths, far))
        has_perplexity = set(self.curves().get(row.label, {})) >= set(lengths)
        answered = self.answered()
        cells = [(task, length) for length in far for task in self.plan.tasks]
        left = [(task, length) for task, length in cells if (row.label, task, length) not in answered]
        if has_perplexity and not left:
            return
        source = self.plan.model if row.seed is None else self.train(row.name, row.seed)
        model, tokenizer = load_model(source, dtype=self.plan.dtype)
        facts = {"label": row.label, "model_name": self.plan.name, "tokens_trained": tokens_trained(source)}
        with self.extended(model, row):
            if not has_perplexity:
                # Of the same tokens for all rows, those too that are read at the short lengths alone.
                pieces = {"cut": True, "max_tokens": max(self.plan.lengths), "max_documents": self.plan.pieces}
                perplexity(model, held_out(), lengths, tokenizer=tokenizer, **pieces, **facts, output=self.perplexities)
            for task, length in left:
                counts = {"samples": self.plan.samples, "questions": self.plan.questions}
                retrieval(
                    model, tokenizer, [task], [length], **counts, **facts, documents=held_out(), output=self.answers
                )

    def curves(self) -> dict[str, dict[int, float]]:
        """Return the perplexities by length, of each row."""
        found: dict[str, dict[int, float]] = {}
        for one in read_records(self.perplexities) if self.perplexities.is_file() else []:
            found.setdefault(one.label, {})[one.context_length] = one.perplexity
        return found

    def answered(self) -> dict[tuple[str, str, int], list[RetrievalRecord]]:
        """Return the answers by row, task and length, where all questions of the plan were asked, and no others.

        Of a question that was asked again, as by other versions of torch, the last answer counts.
        """
        found: dict[tuple[str, str, int], dict[tuple[int, int], RetrievalRecord]] = {}
        for one in read_retrieval_records(self.answers) if self.answers.is_file() else []:
            if one.seed < self.plan.samples:
                found.setdefault((one.label, one.task, one.context_length), {})[one.seed, one.question] = one
        count = self.plan.samples * self.plan.questions
        return {cell: list(asked.values()) for cell, asked in found.items() if len(asked) == count}

    def rule(self, name: str) -> dict[str, Any]:
        """Return how a method is requested; the fitted one is fitted first if there is no preset."""
        if name != FITTED:
            return {"method": name, "context_length": self.plan.target}
        if self.plan.preset is not None:
            return {"preset": self.plan.preset}
        file = self.folder / "fitted.json"
        if not file.is_file():
            model, tokenizer = load_model(self.plan.model)
            config = FitConfig(context_length=self.plan.target, **self.plan.fit)  # type: ignore[arg-type]  # an int
            fit_method(model, tokenizer, trained_on(), config).save(file)
        return {"method": FITTED, "context_length": self.plan.target, "options": {"source": str(file)}}

    def extended(self, model: Any, row: Row) -> AbstractContextManager[Any]:
        """Return a context in which a model is read with the rule of a row; a trained one has that of its training."""
        name = row.name if row.seed is None else row.read_with
        if name is None or name == UNPATCHED:
            return nullcontext()
        rule = self.rule(name)
        return patched(model, on_scaled="replace", **rule.pop("options", {}), **rule)

    def run_folder(self, name: str, seed: int) -> Path:
        return self.folder / "runs" / f"{name}-{seed}".replace(" ", "-")

    def train(self, name: str, seed: int) -> Path:
        """Return the folder of a trained model; a training that was killed goes on."""
        folder = self.run_folder(name, seed)
        if not (folder / MANIFEST).is_file():
            finetune(*load_model(self.plan.model), trained_on(), self.training(name, seed, self.rule(FITTED)))
        return folder

    def training(self, name: str, seed: int, rule: Mapping[str, Any]) -> FinetuneConfig:
        return FinetuneConfig(
            **{**SHARED, **self.plan.training, **rule},
            output_dir=str(self.run_folder(name, seed)),
            task_mix=MIXES[name],
            token_budget=self.plan.token_budget,  # type: ignore[arg-type]  # becomes a TokenCount
            seed=seed,
            resume_from_checkpoint="true",
        )

    def check_trainings(self, selected: Sequence[Row]) -> None:
        """Raise what the trainings of rows would, before any row is measured.

        Any rule shows whether blocks and budget suit the mixes; the fitted one may not be there yet.
        """
        rule, trained = {"context_length": self.plan.target}, [row for row in selected if row.seed is not None]
        runs = dict.fromkeys((row.name, row.seed) for row in trained)
        configs = [self.training(*run, rule) for run in runs if not (self.run_folder(*run) / MANIFEST).is_file()]
        if configs:
            tokenizer = read_tokenizer(self.plan.model)
            texts = to_token_ids(tokenizer, trained_on())  # once for all
            for config in configs:
                dry_run(str(self.plan.model), config, Launch(), texts=(tokenizer, texts))

    def show(self) -> None:
        """Write the tables, as text and as CSV."""
        tables = {"perplexity": self.perplexity_rows(), "retrieval": self.retrieval_rows(), "training": self.losses()}
        for name, lines in tables.items():
            if lines:
                write_whole(self.folder / f"{name}.csv", as_csv(lines))
        text = "\n\n".join(as_table(lines) for lines in tables.values() if lines)
        write_whole(self.folder / "study.md", text + "\n")
        print(f"\n{text}\n", flush=True)

    def perplexity_rows(self) -> list[dict[str, str]]:
        curves, lengths = self.curves(), self.plan.lengths
        return [
            {"name": row.label, **{length_name(length): number(curves[row.label].get(length), 2) for length in lengths}}
            for row in rows(self.plan)
            if row.label in curves
        ]

    def retrieval_rows(self) -> list[dict[str, str]]:
        """Return a line for each length, measure and row, with a column for each task."""
        answered, lines = self.answered(), []
        for length in self.plan.far:
            for measure, measured in MEASURES.items():
                for row in rows(self.plan):
                    asked = {task: answered.get((row.label, task, length), []) for task in self.plan.tasks}
                    if any(asked.values()):
                        cells = {task: measured(each) if each else "" for task, each in asked.items()}
                        lines.append({"length": length_name(length), "measure": measure, "name": row.label, **cells})
        return lines

    def losses(self) -> list[dict[str, str]]:
        """Return the loss of each kind of data in the first and last fifth of its steps; all have other blocks."""
        lines = []
        for name in (name for name, mix in MIXES.items() if mix):
            for seed in self.plan.seeds:
                folder = self.run_folder(name, seed)
                steps = read_log(folder / "train_log.jsonl")
                for when, end in (("first fifth", 0), ("last fifth", -1)) if (folder / MANIFEST).is_file() else ():
                    cells = {kind: number(mean_loss(steps, kind, end), 2) for kind in KINDS}
                    lines.append({"name": f"{name}, seed {seed}", "steps": when, **cells})
        return lines


def held_out() -> list[str]:
    return [load_novel(HELD_OUT_NOVEL)]


def trained_on() -> list[str]:
    return [load_novel(name) for name in TRAIN_NOVELS]


def right(asked: Sequence[RetrievalRecord]) -> str:
    """Return the share of right answers in percent with its 95 % interval, teacher-forced."""
    return str(share_interval([one.score() or 0.0 for one in asked], [one.text for one in asked]))


def tokens_right(asked: Sequence[RetrievalRecord]) -> str:
    """Return the share of the tokens of answers that were the likeliest, in percent."""
    return number(100 * sum(one.n_right for one in asked) / sum(one.n_tokens for one in asked), 1)


def loss(asked: Sequence[RetrievalRecord]) -> str:
    """Return the mean loss of a token of an answer, in nats."""
    return number(math.fsum(one.nll_sum for one in asked) / sum(one.n_tokens for one in asked), 2)


MEASURES = {"right": right, "tokens": tokens_right, "loss": loss}


def mean_loss(steps: Sequence[Mapping[str, Any]], kind: str, end: int) -> float | None:
    """Return the loss of a kind over its first (0) or last (-1) fifth of steps, each token alike; None without any."""
    of_kind = [step for step in steps if step["kind"] == kind]
    count = math.ceil(len(of_kind) / 5)
    part = of_kind[:count] if end == 0 else of_kind[len(of_kind) - count :]
    tokens = sum(step["tokens_in_loss"] for step in part)
    return math.fsum(step["loss"] * step["tokens_in_loss"] for step in part) / tokens if part else None


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def as_csv(lines: Sequence[Mapping[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def as_table(lines: Sequence[Mapping[str, str]]) -> str:
    """Return a Markdown table."""
    names = list(lines[0])
    return "\n".join(
        ["| " + " | ".join(cells) + " |" for cells in (names, ["---"] * len(names), *(line.values() for line in lines))]
    )


if __name__ == "__main__":
    main()
