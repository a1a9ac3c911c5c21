"""An explanation: sections of sentences, a table and pictures, as text for a terminal and as parts of a page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from hf_posenc.gallery.canvas import Picture
from hf_posenc.gallery.pages import picture_panel
from hf_posenc.report.pieces import Cell, Panel, folded, markdown_lines, table
from hf_posenc.utils.units import aligned

_ROWS = 14  # of a table in a terminal, about


@dataclass(frozen=True)
class Section:
    """A part of an explanation.

    Attributes:
        slug: Names it on the page.
        heading: Stands above it.
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


def section_text(section: Section, width: int) -> str:
    """Return a section as lines of at most ``width`` columns; tables are as wide as they are."""
    lines = [section.heading]
    for sentence in section.sentences:
        lines.append(
            textwrap.fill(sentence, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        )
    if section.heads:
        chosen = section.chosen or _spread(len(section.rows))
        shown = [section.heads, *(section.rows[at] for at in chosen)]
        lines += ["", *(f"  {line}" for line in aligned(shown, section.left))]
        if len(chosen) < len(section.rows):
            lines.append(f"  ({len(chosen)} of {len(section.rows)} rows; --output-dir writes all of them)")
    return "\n".join(lines)


def _spread(count: int) -> list[int]:
    if count <= _ROWS:
        return list(range(count))
    return sorted({round(at * (count - 1) / (_ROWS - 1)) for at in range(_ROWS)})


def section_panels(section: Section) -> list[Panel]:
    """Return a section's words and table, then a part for each of its pictures."""
    words = "\n".join(f"<p>{escape(sentence)}</p>" for sentence in section.sentences)
    markdown = "\n\n".join(section.sentences)
    if section.heads:
        cells = [[Cell(cell, sort=_number(cell)) for cell in row] for row in section.rows]
        whole = table(f"{section.slug}_table", [Cell(head) for head in section.heads], cells)
        words += folded(f"All {len(section.rows)} rows", whole) if len(section.rows) > _ROWS else whole
        markdown += "\n\n" + markdown_lines(section.heads, section.rows)
    return [Panel(section.slug, section.heading, words, markdown), *map(picture_panel, section.pictures())]


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None
