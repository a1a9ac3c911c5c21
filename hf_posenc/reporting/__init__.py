"""Records -> a Markdown table, plots and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_posenc.evaluation.effective_length import reach
from hf_posenc.evaluation.records import AnyRecord, Record, RetrievalRecord
from hf_posenc.evaluation.rows import short_model_names
from hf_posenc.reporting.commands import command_panel
from hf_posenc.reporting.comparable import listed, make_grids, make_tables, sort_tables, text_table
from hf_posenc.reporting.costs import cost_panel
from hf_posenc.reporting.frequencies import frequency_panels
from hf_posenc.reporting.looks import make_looks
from hf_posenc.reporting.page import Block, Panel, Paragraph, Sentences, html_page, markdown_page
from hf_posenc.reporting.perplexity_panels import left_out_panel, perplexity_panels
from hf_posenc.reporting.retrieval_panel import grid_panel, matrix_panel
from hf_posenc.utils.files import writable_folder, write_whole

DEFAULT_TITLE = "Results by context length"
__all__ = ["ReportPaths", "report", "text_table"]


@dataclass(frozen=True)
class ReportPaths:
    """The files of a report; ``plots`` holds a PNG and an SVG for each drawing."""

    html: Path
    markdown: Path
    plots: tuple[Path, ...]


def report(
    records: Sequence[AnyRecord],
    output_dir: str | Path,
    title: str = DEFAULT_TITLE,
    command: str = "",
) -> ReportPaths:
    """Write records as a Markdown table, plots and one self-contained HTML page.

    The first panel says how far each row reads and retrieves. Rows are methods (with what they were fine-tuned on),
    columns context lengths; each protocol and each retrieval task has its own table, the protocols losses by position
    where records have them, the tasks heat maps of depth by length. Then what each method does to the frequencies, what
    it took, and the commands to measure it all again.

    Args:
        records: Records of any number of models, from ``perplexity``, ``retrieval``, ``read_records`` or
            ``read_retrieval_records``; of repeats (equal ``run_key``) the last counts.
        output_dir: Gets ``report.html``, ``report.md``, and as ``.png`` and ``.svg`` ``perplexity_<protocol>``,
            ``positions_<protocol>``, ``retrieval_<task>``, ``retrieval_<task>_by_length``, ``frequencies`` and
            ``cost_<protocol or task>``, as far as the records go; files of an earlier report in it are replaced.
        title: The heading; the models that it does not name are put before it.
        command: What was typed to make the report, for its last line.

    What cannot be compared with the first table of its protocol or task has a table of its own, and a row without a
    number at or below its original length is left out; the report says which, and why.

    Raises:
        ValueError: No records, none that can be in a table, or ``output_dir`` cannot be written to.
    """
    folder = writable_folder(output_dir)
    panels = _make_panels(records, command)
    title = title_with_models(title, records)
    folder.mkdir(parents=True, exist_ok=True)
    return ReportPaths(
        html=write_whole(folder / "report.html", html_page(title, panels)),
        markdown=write_whole(folder / "report.md", markdown_page(title, panels)),
        plots=tuple(path for panel in panels for path in panel.write_drawings(folder)),
    )


def title_with_models(title: str, records: Sequence[AnyRecord]) -> str:
    """Return a title that names every model."""
    names = short_model_names(record.model for record in records).values()
    unnamed = [name for name in names if name not in title]
    return f"{listed(unnamed)}: {title}" if unnamed else title


def _make_panels(records: Sequence[AnyRecord], command: str) -> list[Panel]:
    grids = make_grids([record for record in records if isinstance(record, RetrievalRecord)])
    perplexities = [record for record in records if isinstance(record, Record)]
    # Without retrieval, a report of which nothing can be shown is refused.
    tables, left_out = sort_tables(perplexities) if grids else (make_tables(perplexities), [])
    looks = make_looks(records)
    return [
        _verdict_panel(records),
        *(panel for table in tables for panel in perplexity_panels(table, looks)),
        *([left_out_panel(left_out)] if left_out else []),
        *([matrix_panel(grids)] if len(grids) > 1 else []),
        *(grid_panel(grid, looks) for grid in grids),
        *frequency_panels(records, looks),
        *(cost_panel(table, looks) for table in tables),
        *(cost_panel(grid, looks) for grid in grids),
        command_panel(records, command),
    ]


def _verdict_panel(records: Sequence[AnyRecord]) -> Panel:
    """Return a sentence for each row on the length that it reads and retrieves, as far as it was measured."""
    rows = reach(records)
    parts = {
        "How far it reads": [(row.name, sentence) for row in rows if (sentence := row.loss_sentence())],
        "How far it retrieves": [(row.name, sentence) for row in rows for sentence in row.retrieval_sentences()],
    }
    blocks: list[Block] = [
        Sentences(title, [(name, sentence.removeprefix(name)) for name, sentence in sentences])
        for title, sentences in parts.items()
        if sentences
    ]
    if judged := [f"{row.name}: {words}" for row in rows if (words := row.judged_by())]:
        blocks.append(Paragraph(f"How the losses were judged: {'; '.join(judged)}.", kind="quiet"))
    return Panel("verdict", "In short", blocks)
