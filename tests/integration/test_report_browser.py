"""The page in a real browser: what it shows, how it sorts, on a phone, in the dark, on paper; nothing is fetched."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from browser import Browser
from hf_posenc.reporting import report
from hf_posenc.reporting.looks import COLOURS
from report_records import make_record, make_retrieval_record, read_page

pytestmark = pytest.mark.slow

CURVES = {
    ("none", 1.0): (60.0, 50.0, 1234.5),
    ("linear", 4.0): (160.0, 140.0, 150.0),
    ("ntk", 4.0): (62.0, 51.0, 98.5),
    ("yarn", 4.0): (75.0, 60.0, 70.0),
    ("a_method_with_quite_a_long_name", 4.0): (9.5, 8.0, 7.0),
}
TABLE = "perplexity_truncated_table"


def make_page(folder: Path) -> Path:
    """A report with every kind of panel."""
    rope = {"rotary_dim": 64, "rope_theta": 10000.0, "unrotated_pairs": 0}
    records: list[Any] = []
    for (method, factor), curve in CURVES.items():
        for length, perplexity in zip((128, 256, 1024), curve, strict=True):
            counts = [15] + [16] * (length // 16 - 1)
            by_position = {"position_bucket": 16, "position_tokens": counts, "position_nll": [3.3 * n for n in counts]}
            known = {"rope": {} if method.startswith("a_") else rope}
            records.append(make_record(method, length, perplexity, factor=factor, **by_position, **known))
    records += [
        make_retrieval_record(method, length, depth, seed, length == 256, seconds=length / 100)
        for method in ("none", "yarn")
        for length in (256, 1024)
        for depth in (0.0, 50.0, 100.0)
        for seed in (0, 1)
    ]
    return report(records, folder, "All panels").html


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_page(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def rows(browser: Browser, table: str) -> list[list[str]]:
    """Return the cells of a table's body as the browser now has them."""
    text = "[...document.querySelectorAll('#TABLE tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    found: list[list[str]] = browser.evaluate(text.replace("TABLE", table))
    return [[" ".join(cell.split()) for cell in row] for row in found]


def first_numbers(cells: list[str]) -> list[float]:
    return [float(cell.split()[0].replace(",", "")) for cell in cells]


def pixels(browser: Browser) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(browser.screenshot())).convert("RGB")).astype(int)


def has_colour(image: np.ndarray[Any, Any], colour: str, least: int = 20) -> bool:
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])
    return int((abs(image - wanted).sum(-1) < 12).sum()) >= least


def test_the_browser_shows_what_the_file_says_and_loads_nothing(browser: Browser, page: Path) -> None:
    browser.requests.clear()
    browser.look(1100)
    browser.open(page)
    written = read_page(page.read_text()).tables
    assert len(written) > 8
    for name, (_, *body) in written.items():
        if name.replace("_", "").isalnum() and name != TABLE:  # what is folded has no innerText
            browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert rows(browser, name) == body, name
    assert rows(browser, TABLE)[0] == [
        "unpatched",
        "",
        "60.00 57.00–63.00",
        "50.00 47.50–52.50",
        "1,234 1,173–1,296",
    ]
    assert [url for url in browser.requests if url != "about:blank"] == [page.as_uri()]
    assert browser.complaints == []


def test_a_header_sorts_up_down_and_back_and_the_address_keeps_it(browser: Browser, page: Path) -> None:
    browser.look(1100)
    browser.open(page)
    start = rows(browser, TABLE)
    header, at = f"#{TABLE} thead th:nth-child(5)", "location.hash"
    browser.click(header)
    rising = first_numbers([row[4] for row in rows(browser, TABLE)])
    assert rising == [7.0, 70.0, 98.5, 150.0, 1234.0]
    assert browser.evaluate(f"document.querySelector('{header}').getAttribute('aria-sort')") == "ascending"
    assert browser.evaluate(at) == f"#sort={TABLE}:4:ascending"
    browser.click(header)
    assert first_numbers([row[4] for row in rows(browser, TABLE)]) == rising[::-1]
    falling, address = rows(browser, TABLE), browser.evaluate(at)
    browser.click(header)
    assert rows(browser, TABLE) == start
    assert browser.evaluate(at) == ""
    browser.open(page, address)
    assert rows(browser, TABLE) == falling


def test_empty_cells_stay_last_words_sort_and_keys_work(browser: Browser, page: Path) -> None:
    browser.look(1100)
    for direction in ("ascending", "descending"):
        browser.open(page, f"#sort={TABLE}:1:{direction}")
        assert rows(browser, TABLE)[-1][0].startswith("unpatched")  # nothing to compare it with
    costs = [float(row[1].split()[0]) for row in rows(browser, TABLE)[:-1]]
    assert costs == sorted(costs, reverse=True) != costs[::-1]
    browser.open(page)
    browser.evaluate(f"document.querySelector('#{TABLE} thead th').focus()")
    browser.press("Enter")
    names = [row[0] for row in rows(browser, TABLE)]
    assert names == sorted(names)
    browser.open(page, "#sort=frequencies_pairs:2:ascending")  # opens what is folded
    rotations = first_numbers([row[2] for row in rows(browser, "frequencies_pairs")])
    assert rotations == sorted(rotations)
    assert rotations[0] < 1 < rotations[-1]
    for nonsense in ("#sort=none:1:ascending", f"#sort={TABLE}:99:ascending", "#sort=%00"):
        browser.open(page, nonsense)
    assert browser.complaints == []


def test_a_phone_needs_no_sideways_scrolling_but_in_wide_tables(browser: Browser, page: Path) -> None:
    browser.look(390, 2500)
    browser.open(page)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    shown = "[...document.querySelectorAll('svg.{}')].map(one => getComputedStyle(one).display)"
    assert set(browser.evaluate(shown.format("wide"))) == {"none"}
    assert set(browser.evaluate(shown.format("narrow"))) == {"block"}
    assert browser.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    image = pixels(browser)
    assert (image[:, -6:] == image[0, 0]).all()  # a margin to the right
    assert all(has_colour(image, colour) for colour in COLOURS[:3])
    browser.look(1100)
    assert set(browser.evaluate(shown.format("narrow"))) == {"none"}


def test_what_scrolls_off_a_phone_is_counted_above_the_table(browser: Browser, page: Path) -> None:
    """Columns were cut off at the edge of the screen, and nothing said that there are more."""
    boxes = "[...document.querySelectorAll('.scroll')]"
    browser.look(390, 2500)
    browser.open(page)
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    time.sleep(0.2)  # until the observers have run
    wide = browser.evaluate(f"{boxes}.map(one => one.scrollWidth > one.clientWidth + 1)")
    assert 2 <= sum(wide) < len(wide)
    hints = f"{boxes}.map(one => [one.previousElementSibling.checkVisibility(), one.previousElementSibling.innerText])"
    for is_wide, (is_shown, words) in zip(wide, browser.evaluate(hints), strict=True):
        assert is_shown == is_wide
        assert not is_wide or re.fullmatch(r"\d+ more columns?: scroll sideways →", words)
    box, head = f"document.querySelector('#{TABLE}').closest('.scroll')", f"document.querySelector('#{TABLE} thead tr')"
    edge = "one => one.getBoundingClientRect()"
    hidden = f"[...{head}.cells].filter(c => ({edge})(c).right > ({edge})({box}).right + 1).length"
    hint = f"{box}.previousElementSibling.innerText"
    assert browser.evaluate(hint).startswith(f"{browser.evaluate(hidden)} more column")
    assert browser.evaluate(hidden) > 0
    name = f"({edge})({head}.cells[0]).left"
    before = browser.evaluate(name)
    browser.evaluate(f"{box}.scrollLeft = 1000")
    time.sleep(0.2)
    assert browser.evaluate(hidden) == 0
    assert browser.evaluate(hint) == "← the last column; scroll back"
    assert browser.evaluate(name) == before  # the names of rows stay in sight
    assert browser.evaluate(f"[...{head}.cells].map(cell => cell.innerText.trim())")[:2] == ["method", "short cost"]
    browser.look(1100)
    time.sleep(0.2)
    assert not browser.evaluate(f"{box}.previousElementSibling.checkVisibility()")


def test_without_the_script_a_shadow_shows_that_a_table_goes_on(browser: Browser, page: Path) -> None:
    browser.look(390, 800)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page)
        browser.evaluate(f"document.querySelector('#{TABLE}').scrollIntoView()")
        box = f"document.querySelector('#{TABLE}').closest('.scroll')"
        edge, top = browser.evaluate(f"(r => [r.right, r.top])({box}.getBoundingClientRect())")
        strip = pixels(browser)[int(top) + 2, : int(edge)]
        assert (strip[-30] - strip[-1] > 50).all()
        browser.evaluate(f"{box}.scrollLeft = 1000")
        assert (pixels(browser)[int(top) + 2, int(edge) - 4] > 240).all()  # no more to come
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_and_charts_are_coloured_in_light_and_dark(browser: Browser, page: Path, scheme: str) -> None:
    browser.look(1100, 1600, scheme)
    browser.open(page)

    def colour(element: str, name: str) -> list[float]:
        value = browser.evaluate(f"getComputedStyle(document.querySelector('{element}')).{name}")
        return [float(part) for part in re.findall(r"[\d.]+", value)[:3]]

    paper = colour("body", "backgroundColor")
    assert (luminance(paper) < 0.05) == (scheme == "dark")
    for element in ("body", "small", ".quiet", "nav a", "dt", "svg.wide"):
        assert contrast(colour(element, "color"), paper) >= 4.5, element
    image = pixels(browser)
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 100
    ink = (abs(image - np.array(paper)).sum(-1) > 200).mean()
    assert 0.01 < ink < 0.5  # written on, and not all over
    assert has_colour(image, COLOURS[0]) == (scheme == "light")
    strokes = (
        "[...document.querySelectorAll('#perplexity_truncated svg.wide path')].map(p => getComputedStyle(p).stroke)"
    )
    drawn = {tuple(float(x) for x in re.findall(r"[\d.]+", value)[:3]) for value in browser.evaluate(strokes)} - {()}
    assert len(drawn) >= 5
    assert all(contrast(list(one), paper) >= 3 for one in drawn)


def test_paper_is_white_and_holds_what_is_folded(browser: Browser, page: Path) -> None:
    browser.look(1100, scheme="dark", media="print")
    browser.open(page)
    body = "getComputedStyle(document.body)"
    assert luminance([float(x) for x in re.findall(r"\d+", browser.evaluate(f"{body}.backgroundColor"))[:3]]) == 1
    folded = "[...document.querySelectorAll('details table')].map(one => one.checkVisibility())"
    assert browser.evaluate(folded) == [True] * len(browser.evaluate(folded))
    assert len(browser.evaluate(folded)) == 2
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    printed = browser.print()
    assert printed.startswith(b"%PDF")
    browser.look(1100)
    assert not any(browser.evaluate(folded))


def test_without_the_script_nothing_is_missing(browser: Browser, page: Path) -> None:
    browser.look(1100)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page, f"#sort={TABLE}:4:ascending")
        assert [row[0].split()[0] for row in rows(browser, TABLE)] == [
            method.replace("none", "unpatched") for method, _ in CURVES
        ]
        assert browser.evaluate("document.querySelectorAll('.sorts').length") == 0
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def luminance(colour: list[float]) -> float:
    """Return WCAG's relative luminance of an sRGB colour."""
    linear = [(c / 255 / 12.92) if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[float], other: list[float]) -> float:
    """Return WCAG's contrast ratio."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
