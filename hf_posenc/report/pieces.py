"""The pieces a report is put together from: panels, tables whose headers sort, facts, inlined drawings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from hf_posenc.report.looks import COLOURS, INK, PAPER
from hf_posenc.report.plot import Drawing


@dataclass(frozen=True)
class Panel:
    """A part of a report.

    Attributes:
        slug: Names its files, and its place on the page; no two panels share one.
        title: Its heading.
        html: What stands below the heading on the page.
        markdown: The same in report.md.
        drawing: What is written beside the page as a PNG and an SVG.
        others: More drawings to write there, by the names of their files.
    """

    slug: str
    title: str
    html: str
    markdown: str
    drawing: Drawing | None = None
    others: Mapping[str, Drawing] = field(default_factory=dict)

    @property
    def drawings(self) -> dict[str, Drawing]:
        """All of its drawings, by the names of their files."""
        return {**({} if self.drawing is None else {self.slug: self.drawing}), **self.others}


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: What stands in it.
        small: Lines below it, smaller.
        sort: What its column is sorted by, where that is not the text.
        mark: Its CSS class.
        strong: Whether the text is bold.
        badge: A word beside the text, in a frame.
    """

    text: str
    small: tuple[str, ...] = ()
    sort: float | None = None
    mark: str = ""
    strong: bool = False
    badge: str = ""


def table(slug: str, heads: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table in a box that scrolls; ``slug`` names it in the page's sort links."""
    head = "".join(f'<th scope="col"{_class(one)}>{escape(one.text)}</th>' for one in heads)
    lines = "\n".join("<tr>" + "".join(_cell(one, at == 0) for at, one in enumerate(row)) + "</tr>" for row in rows)
    return scrolling(
        f'<table class="numbers" id="{slug}"><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table>'
    )


def scrolling(content: str) -> str:
    """Return a table in a box that scrolls sideways where it is too wide, with a line that says so when it is.

    The page's script fills the line; without it a shadow at the right edge is the sign.
    """
    return f'<div class="sideways"><p class="more"></p><div class="scroll">{content}</div></div>'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return names and values side by side."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs) + "</dl>"


def quiet(text: str) -> str:
    """Return a paragraph of lesser weight."""
    return f'<p class="quiet">{escape(text)}</p>' if text else ""


def folded(summary: str, content: str) -> str:
    """Return what a click, or a printer, unfolds."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>"


def inline(drawing: Drawing, slug: str, label: str, caption: str = "") -> str:
    """Return a drawing as part of the page: its wide form, and the narrow one that phones show in its place."""
    forms = (("wide", drawing.svg), ("narrow", drawing.narrow))
    drawn = "".join(_inline(svg.decode(), f"{slug}-{form}", label, form) for form, svg in forms)
    words = f'<figcaption class="quiet">{escape(caption)}</figcaption>' if caption else ""
    return f"<figure>{drawn}{words}</figure>"


def markdown_lines(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Return a table in GitHub's Markdown, of which the first ``texts`` columns are words and the others numbers."""
    lines = [heads, *rows]
    written = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([written[0], "|" + "---|" * texts + "---:|" * (len(heads) - texts), *written[1:]])


def markdown_facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return names and values as a list, under a line that says what they are."""
    return "How it was measured:\n\n" + "\n".join(f"- {name}: {value}" for name, value in pairs)


def _inline(svg: str, slug: str, label: str, form: str) -> str:
    """Return an SVG without its file header, its ink following the page's, its ids apart from other drawings'."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{slug}-", svg)
    for index, colour in enumerate(COLOURS):
        svg = svg.replace(colour, f"var(--c{index})")
    attributes = f'class="{form}" role="img" aria-label="{escape(label)}"'
    return svg.replace(INK, "currentColor").replace(PAPER, "var(--paper)").replace("<svg", f"<svg {attributes}", 1)


def _class(cell: Cell) -> str:
    return f' class="{cell.mark}"' if cell.mark else ""


def _cell(cell: Cell, names_row: bool) -> str:
    sort = "" if cell.sort is None else f' data-sort="{cell.sort:.10g}"'
    text = f'<span class="best">{escape(cell.text)}</span>' if cell.strong else escape(cell.text)
    text += f' <span class="badge">{escape(cell.badge)}</span>' if cell.badge else ""
    small = "".join(f"<small>{escape(line)}</small>" for line in cell.small if line)
    tag, scope = ("th", ' scope="row"') if names_row else ("td", "")
    return f"<{tag}{scope}{_class(cell)}{sort}>{text}{small}</{tag}>"
