"""Records -> a Markdown table, plots and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.retrieval.records import RetrievalRecord
from hf_posenc.report.heat_map import draw_heat_map
from hf_posenc.report.markdown import headline, markdown_report, text_table
from hf_posenc.report.page import html_page
from hf_posenc.report.plot import draw
from hf_posenc.report.retrieval import make_grids
from hf_posenc.report.tables import make_tables

__all__ = ["ReportPaths", "report", "text_table"]


@dataclass(frozen=True)
class ReportPaths:
    """The files of a report; ``plots`` holds a PNG and an SVG for each protocol and task."""

    html: Path
    markdown: Path
    plots: tuple[Path, ...]


def report(
    records: Sequence[Record | RetrievalRecord], output_dir: str | Path, title: str = "Results by context length"
) -> ReportPaths:
    """Write records as a Markdown table, plots and one self-contained HTML page.

    Rows are methods (with what they were fine-tuned on), columns context lengths; each protocol and each retrieval task
    has its own table, and each task heat maps of depth by length.

    Args:
        records: Of any number of models, from ``perplexity``, ``retrieval``, ``read_records`` or
            ``read_retrieval_records``; of repeats (equal ``run_key``) the last counts.
        output_dir: Gets ``report.html``, ``report.md``, ``perplexity_<protocol>.png`` and ``.svg``, and
            ``retrieval_<task>.png`` and ``.svg``; files of an earlier report there are replaced.
        title: The heading.

    Raises:
        ValueError: No records; numbers that cannot be compared, with the difference named; two runs that would share
            a row; a row without a number at or below its original length; or ``output_dir`` is a file.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(output_dir)!r} is a file. Give a folder for the report.")
    found = [record for record in records if isinstance(record, RetrievalRecord)]
    grids = make_grids(found)
    tables = [] if grids and len(found) == len(records) else make_tables([r for r in records if isinstance(r, Record)])
    headlines = [headline(table) for table in tables]
    drawn = [draw(table) for table in tables]
    maps = [draw_heat_map(grid) for grid in grids]
    folder.mkdir(parents=True, exist_ok=True)
    names = [*(f"perplexity_{table.slug}" for table in tables), *(grid.slug for grid in grids)]
    plots = tuple(
        _write(folder / f"{name}{suffix}", content)
        for name, files in zip(names, [*drawn, *maps], strict=True)
        for suffix, content in files.items()
    )
    page = html_page(title, tables, headlines, [files[".svg"].decode() for files in drawn], grids)
    return ReportPaths(
        html=_write(folder / "report.html", page.encode()),
        markdown=_write(folder / "report.md", markdown_report(title, tables, headlines, grids).encode()),
        plots=plots,
    )


def _write(path: Path, content: bytes) -> Path:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    return partial.replace(path)
