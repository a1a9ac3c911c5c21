"""The rows of a comparison, measured one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.comparing.config import CompareConfig
from hf_posenc.comparing.planning import Plan, Step
from hf_posenc.evaluation import perplexity
from hf_posenc.evaluation.passes import default_bucket
from hf_posenc.evaluation.records import AnyRecord
from hf_posenc.evaluation.rows import extended_as
from hf_posenc.retrieval.measuring_retrieval import retrieval
from hf_posenc.utils.units import duration_name


class Sweep:
    """The rows of a plan, measured one after the other."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        documents: Sequence[str],
        what: CompareConfig,
        plan: Plan,
    ) -> None:
        self.model, self.tokenizer, self.documents, self.what, self.plan = model, tokenizer, documents, what, plan
        self.notes: list[str] = []

    def measure(self, budget: float | None) -> dict[str, list[AnyRecord]]:
        """Return the records of each row by its name; rows that no longer fit into ``budget`` seconds are left out.

        The unpatched model and one method are measured in any case.
        """
        began, rows = time.perf_counter(), dict[str, list[AnyRecord]]()
        promised = 0.0
        for step in self.plan.steps:
            spent = time.perf_counter() - began
            late = max(spent / promised, 1.0) if promised else 1.0
            if budget is not None and len(rows) >= 2 and spent + late * step.seconds > budget:
                self.notes.append(f"left out, for time is up: {step.name}")
                continue
            rows[step.candidate.name] = self._row(step)
            promised += step.seconds
        took = duration_name(time.perf_counter() - began)
        self.notes.append(f"measured in {took} (estimated {duration_name(promised)})")
        return rows

    def _row(self, step: Step) -> list[AnyRecord]:
        what, shared = self.what, self._shared()
        records: list[AnyRecord] = []
        with extended_as(self.model, step.candidate.row):
            records += perplexity(
                self.model,
                self.documents,
                self.plan.lengths,
                cut=what.cut,
                max_documents=what.max_documents,
                position_bucket=default_bucket(self.plan.original),
                **shared,
            )
            if what.tasks:
                prompts: dict[str, Any] = {"tasks": what.tasks, "depths": what.depths, "samples": what.samples}
                prompts["context_lengths"] = self.plan.retrieval_lengths
                records += retrieval(self.model, documents=self.documents, **prompts, **shared)
        return records

    def _shared(self) -> dict[str, Any]:
        what = self.what
        return {
            "tokenizer": self.tokenizer,
            "prefill_chunk": what.prefill_chunk,
            "output": what.output,
            "model_name": what.model_name,
            "progress": not what.hide_progress,
        }
