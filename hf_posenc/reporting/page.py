"""The parts of pages: panels of blocks, written as one HTML page that loads nothing from a server, and as Markdown.

The HTML, the style sheet, the script and the Markdown are the templates beside this module, with a macro for each kind
of block. All of the page can be read without its script, which only sorts the tables.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from hf_posenc.reporting.looks import COLOURS, COLOURS_ON_DARK, INK, PAPER
from hf_posenc.reporting.plot import Drawing
from hf_posenc.utils.files import write_whole


@dataclass(frozen=True)
class Paragraph:
    """Sentences; ``kind`` is "note" for what limits the numbers and "quiet" for what explains them, else empty."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Sentences:
    """A list of sentences under a heading; ``lines`` are pairs of how one begins, which is bold, and the rest."""

    title: str
    lines: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Facts:
    """Pairs of a name and a value: how something was measured."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Code:
    """Lines to type, below what they are for."""

    text: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Figure:
    """A drawing: on the page its wide form, and the narrow one that phones show instead; in Markdown its PNG file.

    Attributes:
        drawing: The drawing.
        slug: Names its files.
        label: What is drawn, for readers who do not see it.
        caption: Shown below it.
        alt: The label in Markdown, where that is a shorter one.
    """

    drawing: Drawing
    slug: str
    label: str
    caption: str = ""
    alt: str = ""

    @property
    def forms(self) -> list[tuple[str, Markup]]:
        """Each form and its SVG, from the attributes of the outermost tag on."""
        forms = (("wide", self.drawing.svg), ("narrow", self.drawing.narrow))
        return [(form, inline_svg(svg.decode(), f"{self.slug}-{form}")) for form, svg in forms]


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: Its text.
        small: What is shown smaller below it; after it in Markdown.
        sort: What its column is sorted by, where that is not the text.
        mark: Its CSS class; "hash" is code in Markdown.
        strong: Whether the text is bold.
        badge: A word beside the text, in a frame.
        interval: The first of the small lines; in brackets in Markdown.
    """

    text: str
    small: tuple[str, ...] = ()
    sort: float | None = None
    mark: str = ""
    strong: bool = False
    badge: str = ""
    interval: str = ""

    @property
    def small_lines(self) -> list[str]:
        """The lines below the text."""
        return [line for line in (self.interval, *self.small) if line]

    def markdown(self, joint: str) -> str:
        """Return the cell in one line, its parts joined by ``joint``."""
        text = f"`{self.text}`" if self.mark == "hash" else f"**{self.text}**" if self.strong else self.text
        parts = (" ".join(filter(None, (text, self.badge))), self.interval and f"({self.interval})", *self.small)
        return joint.join(filter(None, parts))


@dataclass(frozen=True)
class NumberTable:
    """A table whose headers sort it; the first cell of a row is its name.

    Attributes:
        slug: Names it in the page's sort links.
        heads: Headings of the columns: cells, or their texts.
        rows: As many cells each.
        small_heads: Names of the columns that the small lines of the first cells have in Markdown; none: they stay in
            the first column.
        joint: Between the parts of a cell in Markdown.
        folded: On the page, the words to click to see the table, which is hidden before; empty to show it.
    """

    slug: str
    heads: Sequence[Cell | str]
    rows: Sequence[Sequence[Cell]]
    small_heads: tuple[str, ...] = ()
    joint: str = " "
    folded: str = ""

    @property
    def head_cells(self) -> list[Cell]:
        """The headings."""
        return [Cell(head) if isinstance(head, str) else head for head in self.heads]

    @property
    def markdown_lines(self) -> list[list[str]]:
        """The cells in Markdown, line by line, the headings first."""
        first, *heads = (head.text for head in self.head_cells)
        lines = [[first, *self.small_heads, *heads]]
        for name, *cells in self.rows:
            names = [name.text, *name.small] if self.small_heads else [name.markdown(self.joint)]
            lines.append([*names, *(cell.markdown(self.joint) for cell in cells)])
        return [[cell.replace("|", "\\|") for cell in line] for line in lines]


@dataclass(frozen=True)
class HeatMap:
    """Shares by depth and length; ``rows`` are pairs of a depth and, by length, a share and of how many."""

    caption: str
    rows: Sequence[tuple[str, Sequence[tuple[float, int]]]]


@dataclass(frozen=True)
class HeatMaps:
    """Heat maps: shaded tables on the page, if there are any; in Markdown the PNG file of their drawing."""

    slug: str
    drawing: Drawing
    heads: Sequence[str]
    maps: Sequence[HeatMap]


# Each is written by the macro with the name of its class.
Block = Paragraph | Sentences | Facts | Code | Figure | NumberTable | HeatMaps


@dataclass(frozen=True)
class Panel:
    """A part of a page under its heading; ``slug`` names it in links, and no two panels of a page share one."""

    slug: str
    title: str
    blocks: Sequence[Block]

    def write_drawings(self, folder: Path) -> list[Path]:
        """Write its drawings to a folder, by the names of their files; files of the same name are replaced."""
        drawn = sorted(
            (block for block in self.blocks if isinstance(block, Figure | HeatMaps)), key=lambda one: one.slug
        )
        return [
            write_whole(folder / f"{block.slug}{suffix}", content)
            for block in drawn
            for suffix, content in block.drawing.files.items()
        ]


def html_page(title: str, panels: Sequence[Panel]) -> str:
    """Return the page: a list of what is on it, then the panels in order."""
    templates = _templates()
    style = templates.get_template("page.css").render(colours=COLOURS, colours_on_dark=COLOURS_ON_DARK)
    # As it is, not as a template: the browser runs it only where its hash is the one that the page says.
    script, _, _ = templates.loader.get_source(templates, "page.js")  # type: ignore[union-attr]  # set in _templates
    return templates.get_template("page.html").render(
        title=title,
        panels=panels,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def markdown_page(title: str, panels: Sequence[Panel]) -> str:
    """Return the same as Markdown; its drawings are the PNG files beside it."""
    return _templates().get_template("page.md").render(title=title, panels=panels)


@functools.cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("hf_posenc.reporting"),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def inline_svg(svg: str, prefix: str) -> Markup:
    """Return an SVG after ``<svg``, its ink following the page's, its ids apart from other drawings'."""
    svg = svg[svg.index("<svg") + len("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for index, colour in enumerate(COLOURS):
        svg = svg.replace(colour, f"var(--c{index})")
    return Markup(svg.replace(INK, "currentColor").replace(PAPER, "var(--paper)"))
