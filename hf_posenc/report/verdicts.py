"""The panel at the top of a report: how far each row reads and retrieves, a sentence each."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hf_posenc.evaluation.effective_length import reach
from hf_posenc.evaluation.records import Record
from hf_posenc.report.pieces import Panel
from hf_posenc.retrieval.cell_records import RetrievalRecord


def verdict_panel(records: Sequence[Record | RetrievalRecord]) -> Panel:
    """Return the panel; of what was not measured it says nothing."""
    rows = reach(records)
    parts = {
        "How far it reads": [(row.name, sentence) for row in rows if (sentence := row.loss_sentence())],
        "How far it retrieves": [(row.name, sentence) for row in rows for sentence in row.retrieval_sentences()],
    }
    told = {title: sentences for title, sentences in parts.items() if sentences}
    html = "\n".join(
        f"<h3>{title}</h3>\n<ul>{''.join(f'<li>{_html(*one)}</li>' for one in sentences)}</ul>"
        for title, sentences in told.items()
    )
    markdown = "\n\n".join(
        f"**{title}**\n\n" + "\n".join(f"- {sentence}" for _, sentence in sentences)
        for title, sentences in told.items()
    )
    return Panel("verdict", "In short", html, markdown)


def _html(name: str, sentence: str) -> str:
    """Return a sentence with the name of its row, its beginning, standing out; no line ends before a percent sign."""
    return f"<strong>{escape(name)}</strong>{escape(sentence.removeprefix(name))}".replace(" %", "&nbsp;%")
