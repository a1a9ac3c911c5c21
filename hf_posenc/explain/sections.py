"""An explanation: sections of sentences and a table, as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from hf_posenc.utils.units import aligned

_ROWS = 14  # of a table in a terminal, about


@dataclass(frozen=True)
class Section:
    """A part of an explanation.

    Attributes:
        heading: Above it.
        sentences: In order.
        heads: Headings of its table; empty for none.
        rows: All rows of the table.
        chosen: Which of them a terminal shows; empty for evenly spread ones.
        left: Columns of words, to the left.
    """

    heading: str
    sentences: Sequence[str]
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    chosen: Sequence[int] = ()
    left: Sequence[int] = ()


@dataclass(frozen=True)
class Explanation:
    """An explanation of a method or an encoding on a model.

    Attributes:
        title: In a line.
        about: The model in a line.
        sections: In order.
    """

    title: str
    about: str
    sections: Sequence[Section]

    def text(self, width: int) -> str:
        """Return it as lines of at most ``width`` columns; tables are as wide as they are."""
        parts = [self.title, self.about, "", *(section_text(section, width) + "\n" for section in self.sections)]
        return "\n".join(parts).rstrip()


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
            lines.append(f"  ({len(chosen)} of {len(section.rows)} rows)")
    return "\n".join(lines)


def evenly(length: int, count: int) -> list[int]:
    """Return at most ``count`` whole numbers from 0 to ``length - 1``, evenly spread, each once."""
    return sorted({round(at * (length - 1) / (count - 1)) for at in range(count)})
