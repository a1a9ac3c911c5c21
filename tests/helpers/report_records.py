"""Records made by hand, and a reader of the page that a report makes of them."""

from __future__ import annotations

import dataclasses
import math
from html.parser import HTMLParser
from typing import Any

from hf_posenc.evaluation.records import Record, RetrievalRecord


def make_record(method: str = "none", length: int = 256, perplexity: float = 40.0, **changes: Any) -> Record:
    each, tokens, nats = length - 1, 8 * (length - 1), math.log(perplexity)
    # Which of 8 documents are hard depends on the method, so perplexities that differ by a few percent tie.
    harder = [0.1 * math.sin(at * sum(map(ord, method))) for at in range(1, 5)]
    harder += [-more for more in harder]
    record = Record(
        model="tiny",
        method=method,
        factor=1.0 if method == "none" else 4.0,
        options={},
        tokens_trained=0,
        original_max_position_embeddings=256,
        context_length=length,
        protocol="truncated",
        window=None,
        stride=None,
        last_k=None,
        bos="none",
        num_documents=8,
        n_tokens=tokens,
        nll_sum=math.log(perplexity) * tokens,
        perplexity=perplexity,
        ci_low=perplexity * 0.95,
        ci_high=perplexity * 1.05,
        ci_unit="documents",
        unit_nll=[each * (nats + more) for more in harder],
        unit_tokens=[each] * 8,
        tokenizer_hash="tok-1",
        text_hash=f"text-{length}",
        dtype="float32",
        attn_implementation="sdpa",
        versions={"torch": "2.13.0"},
        seconds=1.0,
        peak_memory_bytes=1,
        run_key="run-1",
        scored=f"The first {length} tokens of each document are read in one go; all but the first token are scored.",
    )
    return dataclasses.replace(record, **changes)


def make_retrieval_record(
    method: str, length: int, depth: float | None, seed: int, right: bool, **changes: Any
) -> RetrievalRecord:
    record = RetrievalRecord(
        model="tiny",
        method=method,
        factor=1.0 if method == "none" else 4.0,
        options={},
        tokens_trained=0,
        original_max_position_embeddings=256,
        task="passkey",
        context_length=length,
        depth=depth,
        seed=seed,
        chat=False,
        num_prompt_tokens=length - 22,
        max_new_tokens=22,
        needle_places=[40],
        answers=["12345"],
        num_forced=int(right),
        num_written=0,
        n_tokens=5,
        n_right=5 if right else 2,
        nll_sum=1.0,
        forced=" 12345",
        written=" 1",
        tokenizer_hash="tok-1",
        text_hash=f"text-{length}-{depth}-{seed}",
        dtype="float32",
        attn_implementation="sdpa",
        versions={"torch": "2.13.0"},
        seconds=1.0,
        peak_memory_bytes=1,
        run_key=f"{method}-{length}-{depth}-{seed}",
    )
    return dataclasses.replace(record, **changes)


class PageParser(HTMLParser):
    """The contents of a page: ``tables`` by id (heat maps by caption) as rows of the texts of cells, and ``tags``."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.sorts: dict[str, list[list[str | None]]] = {}
        self._rows: list[list[str]] = []
        self._sorts: list[list[str | None]] = []
        self._inside = ""
        self._caption = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append((tag, values))
        if tag == "table":
            self._rows, self._sorts, self._caption = [], [], ""
            self._id = values.get("id", "")
        elif tag == "tr":
            self._rows.append([])
            self._sorts.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._sorts[-1].append(values.get("data-sort"))
        if tag in ("td", "th", "caption"):
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "caption"):
            self._inside = ""
        elif tag == "table":
            self.tables[self._id or self._caption] = [[cell.strip() for cell in row] for row in self._rows]
            self.sorts[self._id] = self._sorts

    def handle_data(self, data: str) -> None:
        if self._inside == "caption":
            self._caption += data
        elif self._inside and data.strip():
            self._rows[-1][-1] += f" {data.strip()}"


def read_page(page: str) -> PageParser:
    """Parse a page."""
    parser = PageParser()
    parser.feed(page)
    return parser
