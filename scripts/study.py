"""The runner that the studies share: rows that are patched, fitted or trained, measured on the same texts, and tables.

What is in the folder of a study is neither trained nor measured again, so an interrupted study goes on, and several
processes can share its rows.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from hf_posenc import FitConfig, fit_method, patched, perplexity
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.checkpoint.manifest import MANIFEST, tokens_trained
from hf_posenc.evaluation import Record, read_records
from hf_posenc.evaluation.documents import Document
from hf_posenc.evaluation.records import read_retrieval_records
from hf_posenc.retrieving.measuring_retrieval import retrieval
from hf_posenc.training import FinetuneConfig, finetune
from hf_posenc.utils.files import write_whole

Line = dict[str, str]  # of a table: cells by the name of their column


@dataclass(frozen=True)
class Row:
    """A line of the tables: what is done with the model, and the rule it is read with.

    Attributes:
        name: The label of its records.
        rule: Keywords of ``patch_model``; None reads the model as it is, and a trained one with the rule of its
            training.
        training: Settings of FinetuneConfig; None trains nothing.
        fit: Settings of FitConfig, by which a rule is fitted, and changed weights if they say so; None fits nothing.
        documents: That it is trained or fitted on; None: those of the study.
        model: Its folder; None: that of the study.
    """

    name: str
    rule: Mapping[str, Any] | None = None
    training: Mapping[str, Any] | None = None
    fit: Mapping[str, Any] | None = None
    documents: Sequence[Document] | None = None
    model: Path | None = None


@dataclass(frozen=True)
class Texts:
    """Perplexities of some texts; ``protocol`` has further arguments of ``perplexity``."""

    file: Path
    texts: Sequence[Document]
    lengths: Sequence[int]
    protocol: Mapping[str, Any] = field(default_factory=dict)

    def left(self, name: str) -> bool:
        return not set(self.lengths) <= set(self.records().get(name, {}))

    def measure(self, model: Any, tokenizer: Any, facts: Mapping[str, Any]) -> None:
        perplexity(model, self.texts, self.lengths, tokenizer=tokenizer, output=self.file, **self.protocol, **facts)

    def records(self) -> dict[str, dict[int, Record]]:
        """Return the records by the name of their row and by length."""
        found: dict[str, dict[int, Record]] = {}
        for record in read_records(self.file) if self.file.is_file() else []:
            found.setdefault(record.label, {})[record.context_length] = record
        return found

    def lines(self, rows: Sequence[Row]) -> list[Line]:
        """Return a line of perplexities for each row that is measured."""
        found = self.records()
        return [
            {"name": name, **{str(at): f"{of[at].perplexity:.2f}" if at in of else "" for at in self.lengths}}
            for name, of in ((row.name, found.get(row.name, {})) for row in rows)
            if of
        ]


@dataclass(frozen=True)
class Questions:
    """Retrieval tasks in some texts: so many questions in each of so many texts (``samples``)."""

    file: Path
    tasks: Sequence[str]
    lengths: Sequence[int]
    samples: int
    questions: int
    documents: Sequence[str] | None = None

    def left(self, name: str) -> bool:
        records = read_retrieval_records(self.file) if self.file.is_file() else []
        asked = {(one.task, one.context_length, one.seed, one.question) for one in records if one.label == name}
        return not set(product(self.tasks, self.lengths, range(self.samples), range(self.questions))) <= asked

    def measure(self, model: Any, tokenizer: Any, facts: Mapping[str, Any]) -> None:
        asked: dict[str, Any] = {"samples": self.samples, "questions": self.questions, "documents": self.documents}
        retrieval(model, tokenizer, self.tasks, self.lengths, **asked, output=self.file, **facts)


class Study:
    """A folder that is one study, by the settings it was started with, and what all its rows are made from."""

    def __init__(
        self,
        folder: Path,
        model: str | Path,
        documents: Sequence[Document],
        settings: Mapping[str, Any],
        **loading: Any,
    ) -> None:
        self.folder, self.model, self.documents, self.loading = folder, model, documents, loading
        claim(folder, settings)

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name.replace(",", "").replace(" ", "-")

    def run(self, row: Row, *measurements: Texts | Questions, **facts: Any) -> None:
        """Do what is left of the measurements of a row; ``facts`` are noted in its records."""
        if left := [one for one in measurements if one.left(row.name)]:
            with self.ready(row) as (model, tokenizer, trained_on):
                for one in left:
                    one.measure(model, tokenizer, {"label": row.name, "tokens_trained": trained_on, **facts})

    @contextmanager
    def ready(self, row: Row) -> Iterator[tuple[Any, Any, int]]:
        """While open, there is the model of a row, trained and extended.

        Yields:
            Model, tokenizer and how many tokens it was trained on.
        """
        folder, source, rule = self.run_folder(row.name), row.model or self.model, row.rule
        documents = self.documents if row.documents is None else row.documents
        if row.training is not None:
            config = FinetuneConfig(**{"output_dir": str(folder), "resume_from_checkpoint": "true", **row.training})
            if not (Path(str(config.output_dir)) / MANIFEST).is_file():
                finetune(*load_model(source), documents, config)
            source = Path(str(config.output_dir))
        model, tokenizer = load_model(source, **self.loading)
        adapter = None
        if row.fit is not None:
            config_of_fit = FitConfig(**{"held_out": 0, "hide_progress": True, **row.fit})
            result = fit_method(model, tokenizer, documents, config_of_fit, work_dir=folder)
            rule, adapter = {"method": "fitted", **result.options}, result.adapter
        changed = nullcontext() if adapter is None else adapter.applied(model)
        with changed, nullcontext() if rule is None else patched(model, on_scaled="replace", **rule):
            yield model, tokenizer, tokens_trained(source) or 0

    def write(self, tables: Mapping[str, Sequence[Line]]) -> None:
        """Write tables, as CSV each and as Markdown together, and print them."""
        tables = {name: lines for name, lines in tables.items() if lines}
        for name, lines in tables.items():
            text = io.StringIO()
            writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
            write_whole(self.folder / f"{name}.csv", text.getvalue())
        shown = "\n\n".join(map(as_table, tables.values()))
        write_whole(self.folder / "study.md", shown + "\n")
        print(f"\n{shown}\n", flush=True)


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make the folder of a study, or go on in one that was started with the same settings.

    Raises:
        SystemExit: It holds a study with others, whose numbers must not be mixed with these.
    """
    file, text = folder / "settings.json", json.dumps(settings, indent=2, sort_keys=True) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{folder} holds a study with other settings ({file.name}). Give another --output-dir.")
    write_whole(file, text)


def select(known: Sequence[Row], names: Sequence[str] | None) -> list[Row]:
    """Return the rows of some names; all without any.

    Raises:
        SystemExit: There is no row of a name.
    """
    if unknown := sorted(set(names or ()) - {row.name for row in known}):
        there = ", ".join(row.name for row in known)
        raise SystemExit(f"no such row: {', '.join(unknown)}. Known: {there}. Quote a name with a space in it.")
    return [row for row in known if not names or row.name in names]


def passkeys_right(file: Path, length: int, label: str) -> str:
    """Return how many passkeys of a row were right at a length, given the prompt: ``2/3``, or nothing without any.

    Of a question that was asked again, as by other versions of torch, the last answer counts.
    """
    records = read_retrieval_records(file) if file.is_file() else []
    cell = label, "passkey", length
    found = [one for one in records if (one.label, one.task, one.context_length) == cell]
    scores = list({(one.depth, one.seed, one.question): one.score() for one in found}.values())
    return f"{scores.count(1.0)}/{len(scores)}" if scores else ""


def as_table(lines: Sequence[Line]) -> str:
    """Return a Markdown table."""
    names = list(lines[0])
    cells = [names, ["---"] * len(names), *(list(line.values()) for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
