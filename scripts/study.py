"""The runner that the studies share: rows that are patched, fitted or trained, perplexities of texts, and tables.

What is in the folder of a study is neither trained nor measured again, so an interrupted study goes on, and several
processes can share its rows.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc import FitConfig, fit_method, patched, perplexity
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.checkpoint.manifest import MANIFEST, tokens_trained
from hf_posenc.evaluation import Record, read_records
from hf_posenc.evaluation.documents import Document
from hf_posenc.training import FinetuneConfig, finetune
from hf_posenc.utils.files import write_whole

Line = dict[str, str]  # of a table: cells by the name of their column
FITTED_RULE = "rule.json"  # in the folder of a row whose rule is fitted


@dataclass(frozen=True)
class Row:
    """A line of the tables: what is done with the model, and the rule it is read with.

    Attributes:
        name: The label of its records.
        rule: Keywords of ``patch_model``; None reads the model as it is, and a trained one with the rule of its
            training.
        training: Settings of FinetuneConfig; None trains nothing.
        fit: Settings of FitConfig, by which a rule is fitted, or weights are changed; None fits nothing.
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
            {"name": row.name, **{str(at): f"{of[at].perplexity:.2f}" if at in of else "" for at in self.lengths}}
            for row in rows
            if (of := found.get(row.name))
        ]


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
        """``settings`` are all that decides the numbers; ``loading`` has keywords of ``load_model``.

        Raises:
            SystemExit: The folder holds a study with others, whose numbers must not be mixed with these.
        """
        self.folder, self.model, self.documents, self.loading = folder, model, documents, loading
        file, text = folder / "settings.json", json.dumps(settings, indent=2, sort_keys=True) + "\n"
        folder.mkdir(parents=True, exist_ok=True)
        if file.is_file() and file.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{folder} holds a study with other settings ({file.name}). Give another --output-dir.")
        write_whole(file, text)

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name.replace(",", "").replace(" ", "-")

    def run(self, row: Row, *texts: Texts, **facts: Any) -> None:
        """Measure what is left of the texts of a row; ``facts`` are noted in its records."""
        if left := [one for one in texts if one.left(row.name)]:
            with self.ready(row) as (model, tokenizer, trained_on):
                told = {"tokenizer": tokenizer, "label": row.name, "tokens_trained": trained_on, **facts}
                for one in left:
                    perplexity(model, one.texts, one.lengths, output=one.file, **one.protocol, **told)

    @contextmanager
    def ready(self, row: Row) -> Iterator[tuple[Any, Any, int]]:
        """While open, there is the model of a row, trained and extended.

        Yields:
            Model, tokenizer and how many tokens it was trained on.
        """
        folder, source, rule = self.run_folder(row.name), row.model or self.model, row.rule
        documents = self.documents if row.documents is None else row.documents
        if row.training is not None:
            if not (folder / MANIFEST).is_file():
                config = FinetuneConfig(str(folder), resume_from_checkpoint="true", **row.training)
                finetune(*load_model(source), documents, config)
            source = folder
        model, tokenizer = load_model(source, **self.loading)
        with ExitStack() as extended:
            if row.fit is not None:
                config_of_fit = FitConfig(**{"held_out": 0, "hide_progress": True, **row.fit})
                result = fit_method(model, tokenizer, documents, config_of_fit, work_dir=folder)
                rule = config_of_fit.request(result.method, result.options)
                if result.adapter is None:
                    result.save(folder / FITTED_RULE)
                else:
                    extended.enter_context(result.adapter.applied(model))
            if rule is not None:
                extended.enter_context(patched(model, on_scaled="replace", **rule))
            yield model, tokenizer, tokens_trained(source) or 0

    def write(self, tables: Mapping[str, Sequence[Line]]) -> None:
        """Write tables that have lines, as CSV each, and print them."""
        for name, lines in tables.items():
            if lines:
                text = io.StringIO()
                writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(lines)
                print(f"\n{write_whole(self.folder / f'{name}.csv', text.getvalue())}\n{text.getvalue()}", flush=True)
