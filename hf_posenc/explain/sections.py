"""An explanation: sections of sentences, a table and pictures, as text for a terminal and as a page of one file."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hf_posenc.explain.canvas import Picture, evenly
from hf_posenc.report.page import Block, Cell, Figure, NumberTable, Panel, Paragraph, html_page
from hf_posenc.utils.files import writable_folder, write_whole
from hf_posenc.utils.units import aligned

_ROWS = 14  # of a table in a terminal, about


@dataclass(frozen=True)
class Section:
    """A part of an explanation.

    Attributes:
        slug: Names it on the page.
        heading: Above it.
        sentences: In order.
        heads: Of its table; empty for none.
        rows: All rows of the table.
        chosen: Which of them a terminal shows; empty for evenly spread ones.
        left: Columns of words, to the left.
        pictures: Draws what belongs to it, when a page is written.
    """

    slug: str
    heading: str
    sentences: Sequence[str]
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    chosen: Sequence[int] = ()
    left: Sequence[int] = ()
    pictures: Callable[[], Sequence[Picture]] = field(default=tuple)


@dataclass(frozen=True)
class Explanation:
    """An explanation of a method or an encoding on a model.

    Attributes:
        title: In a line.
        model: The name of the model.
        about: The model in a line.
        sections: In order.
    """

    title: str
    model: str
    about: str
    sections: Sequence[Section]

    def text(self, width: int) -> str:
        """Return it as lines of at most ``width`` columns; tables are as wide as they are."""
        parts = [self.title, self.about, "", *(section_text(section, width) + "\n" for section in self.sections)]
        return "\n".join(parts).rstrip()

    def write(self, output_dir: str | Path) -> list[Path]:
        """Write ``explain.html`` and its pictures to a folder; arguments and result as ``write_page``'s."""
        panels = [panel for section in self.sections for panel in section_panels(section)]
        return write_page(output_dir, "explain.html", f"{self.title} ({self.model})", panels)


def section_text(section: Section, width: int) -> str:
    """Return a section as lines of at most ``width`` columns; tables are as wide as they are."""
    lines = [section.heading]
    for sentence in section.sentences:
        lines.append(
            textwrap.fill(sentence, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        )
    if section.heads:
        chosen = section.chosen or evenly(len(section.rows), min(_ROWS, max(len(section.rows), 2)))
        shown = [section.heads, *(section.rows[at] for at in chosen)]
        lines += ["", *(f"  {line}" for line in aligned(shown, section.left))]
        if len(chosen) < len(section.rows):
            lines.append(f"  ({len(chosen)} of {len(section.rows)} rows; --output-dir writes all of them)")
    return "\n".join(lines)


def section_panels(section: Section) -> list[Panel]:
    """Return a section's words and table, then a part for each of its pictures."""
    blocks: list[Block] = [Paragraph(sentence) for sentence in section.sentences]
    if section.heads:
        cells = [[Cell(cell, sort=_number(cell)) for cell in row] for row in section.rows]
        folded = f"All {len(section.rows)} rows" if len(section.rows) > _ROWS else ""
        blocks.append(NumberTable(f"{section.slug}_table", section.heads, cells, folded=folded))
    return [Panel(section.slug, section.heading, blocks), *map(picture_panel, section.pictures())]


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


def picture_panel(picture: Picture) -> Panel:
    """Return a picture with its caption as a part of a page."""
    figure = Figure(picture.drawing, picture.slug, picture.title)
    return Panel(picture.slug, picture.title, [figure, Paragraph(picture.caption, "quiet")])


def write_page(output_dir: str | Path, name: str, title: str, panels: Sequence[Panel]) -> list[Path]:
    """Write a page and the PNG and SVG files of its drawings; files of an earlier run are replaced.

    Args:
        output_dir: Folder; made if it does not exist.
        name: Of the page.
        title: Its heading.
        panels: In order.

    Returns:
        The page, then the pictures.
    """
    folder = writable_folder(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    page = write_whole(folder / name, html_page(title, panels, images=True))
    return [page, *(path for panel in panels for path in panel.write_drawings(folder))]
