"""Blocks of a page: every text is escaped, and the HTML and the Markdown say the same."""

from __future__ import annotations

import re
from html import unescape

import pytest

from hf_posenc.reporting.page import (
    Block,
    Cell,
    Code,
    Facts,
    Figure,
    HeatMap,
    HeatMaps,
    NumberTable,
    Panel,
    Paragraph,
    Sentences,
    html_page,
    markdown_page,
)
from hf_posenc.reporting.plot import Drawing
from report_records import read_page

BAD = "<script>alert('1')</script> & \"two\" 5 %"
SVG = b'<?xml version="1.0"?>\n<svg id="a" width="1"><path style="stroke: #3b3f46"/></svg>'
DRAWING = Drawing(b"png", SVG, SVG)
BLOCKS: list[tuple[Block, int]] = [  # and how often the page shows the text
    (Paragraph(BAD), 1),
    (Paragraph(BAD, "note"), 1),
    (Sentences(BAD, [(BAD, BAD)]), 3),
    (Facts([(BAD, BAD)]), 2),
    (Code(BAD, [BAD, BAD]), 3),
    (Figure(DRAWING, "figure", BAD, BAD), 3),  # its label is in both forms
    (NumberTable("table", [Cell(BAD)], [[Cell(BAD, (BAD,), badge=BAD, interval=BAD)]], folded=BAD), 6),
    (NumberTable("table", [Cell("a"), Cell(BAD)], [[Cell("a"), Cell(BAD, (BAD,), interval=BAD, strong=True)]]), 4),
    (HeatMaps("maps", DRAWING, [BAD], [HeatMap(BAD, [(BAD, [(0.5, 2)])])]), 3),
]


@pytest.mark.parametrize(("block", "count"), BLOCKS, ids=lambda value: type(value).__name__)
def test_every_text_of_a_block_is_escaped(block: Block, count: int) -> None:
    page = html_page(BAD, [Panel("slug", BAD, [block])])
    assert [tag for tag, _ in read_page(page).tags].count("script") == 1
    assert unescape(page).replace("\N{NO-BREAK SPACE}", " ").count(BAD) == count + 4  # titles, heading, list of panels
    assert "&amp;lt;" not in page  # nor is it escaped twice


def test_a_table_in_markdown_has_the_parts_of_its_cells_in_one_line() -> None:
    heads = [Cell("method"), Cell("a|b"), Cell("text hash", mark="text")]
    row = [
        Cell("yarn|x4", ("zero-shot",)),
        Cell("1.00", ("+2 %",), interval="0.9–1.1", strong=True, badge="tie"),
        Cell("ab12", mark="hash"),
    ]
    apart = NumberTable("t", heads, [row], small_heads=("fine-tuning",))
    together = NumberTable("t", heads, [row], joint=", ")
    panels = [
        Panel("one", "One", [apart]),
        Panel("two", "Two", [together, Figure(DRAWING, "file", "long", alt="short")]),
    ]
    assert markdown_page("Title", panels) == (
        "# Title\n\n## One\n\n"
        "| method | fine-tuning | a\\|b | text hash |\n|---|---|---:|---:|\n"
        "| yarn\\|x4 | zero-shot | **1.00** tie (0.9–1.1) +2 % | `ab12` |\n\n## Two\n\n"
        "| method | a\\|b | text hash |\n|---|---:|---:|\n"
        "| yarn\\|x4, zero-shot | **1.00** tie, (0.9–1.1), +2 % | `ab12` |\n\n"
        "![short](file.png)\n"
    )


def test_drawings_follow_the_ink_of_the_page_and_their_ids_are_apart() -> None:
    page = html_page("Title", [Panel("p", "P", [Figure(DRAWING, "one", "x"), Figure(DRAWING, "two", "x")])])
    ids = re.findall(r'<svg [^>]*\bid="([^"]+)"', page)
    assert ids == ["one-wide-a", "one-narrow-a", "two-wide-a", "two-narrow-a"]
    assert page.count("stroke: currentColor") == 4
    assert "<?xml" not in page
