"""How charts are drawn: a method's colour and marker, rows that share a method, intervals, names of models."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_posenc.evaluation.rows import row_key
from hf_posenc.methods.registry import methods
from hf_posenc.reporting import report, title_with_models
from hf_posenc.reporting.looks import COLOURS, COLOURS_ON_DARK, INK, METHOD_LOOKS, PLAIN, make_looks
from hf_posenc.reporting.plot import Chart, Line, draw_chart
from report_records import make_record, make_retrieval_record, read_page

ROPE = {"rope": {"rotary_dim": 64, "rope_theta": 10000.0, "unrotated_pairs": 0}}
# Linear RGB as readers without one kind of cones see it. Machado, Oliveira and Fernandes 2009, severity 1.
SEEN_BY = {
    "all": np.eye(3),
    "protanopes": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopes": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopes": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def with_positions(method: str, length: int, perplexity: float, **changes: Any) -> Any:
    """A record with losses by position."""
    counts = [15] + [16] * (length // 16 - 1)
    by_position = {"position_bucket": 16, "position_tokens": counts, "position_nll": [3.0 * n for n in counts]}
    return make_record(method, length, perplexity, **{**ROPE, **by_position, **changes})


def drawn(svg: Path) -> list[tuple[str, str]]:
    """The colour and the marker of each line of a chart, in their order."""
    text, found = svg.read_text(), []
    for number in itertools.count():
        group = re.search(rf'<g id="line-{number}">(.*?)</g>\s*</g>', text, re.DOTALL)
        if group is None:
            return found
        colour = re.findall(r"stroke: (#\w{6})", group[1])[0]
        (shape,) = set(re.findall(r'<use xlink:href="#(\w+)"', group[1]))  # an id made of what is drawn
        found.append((colour, shape))
    raise AssertionError


def names(tables: dict[str, list[list[str]]], table: str, every: int = 1) -> list[str]:
    """The methods of a table's rows, without what they were trained on."""
    return [" ".join(row[0].split()[:2]) if "x4" in row[0] else "unpatched" for row in tables[table][1::every]]


def test_a_method_looks_the_same_in_every_chart_of_a_report(tmp_path: Path) -> None:
    """In each chart colours were counted anew, over the rows that it has."""
    curves = {"none": 50.0, "linear": 90.0, "ntk": 60.0, "yarn": 55.0}
    records: list[Any] = [
        with_positions(method, length, perplexity, seconds=length / 100 + perplexity)
        for method, perplexity in curves.items()
        for length in (128, 256)
    ]
    records += [
        make_retrieval_record(method, length, depth, 0, True, seconds=length / 100)
        for method in ("yarn", "none", "ntk")
        for length in (128, 256)
        for depth in (0.0, 50.0)
    ]
    tables = read_page(report(records, tmp_path).html.read_text()).tables
    charts = {
        "perplexity_truncated": names(tables, "perplexity_truncated_table"),
        "positions_truncated": ["unpatched", *tables["positions_truncated_table"][0][2:]],
        "cost_truncated": names(tables, "cost_truncated_table"),
        "frequencies": names(tables, "frequencies_methods"),
        "retrieval_passkey_by_length": names(tables, "retrieval_passkey_table", every=2),
        "cost_retrieval_passkey": names(tables, "cost_retrieval_passkey_table"),
    }
    assert len({tuple(rows) for rows in charts.values()}) == 2  # the last two have fewer, in another order
    looks: dict[str, set[tuple[str, str]]] = {}
    for chart, rows in charts.items():
        for row, look in zip(rows, drawn(tmp_path / f"{chart}.svg"), strict=True):
            looks.setdefault(row, set()).add(look)
    assert set(looks) == {"unpatched", "linear x4", "ntk x4", "yarn x4"}
    assert [len({colour for colour, _ in found}) for found in looks.values()] == [1] * 4
    assert [len({shape for _, shape in found}) for found in looks.values()] == [1] * 4
    assert len(set.union(*looks.values())) == 4
    assert looks["unpatched"].pop()[0] == INK


def test_a_method_has_its_colour_in_every_report(tmp_path: Path) -> None:
    alone = report([make_record("none"), make_record("yarn")], tmp_path / "alone")
    others = ["none", "linear", "ntk", "yarn"]
    report([make_record(method) for method in others], tmp_path / "others")
    first, second = drawn(alone.plots[1]), drawn(tmp_path / "others" / "perplexity_truncated.svg")
    assert first[1] == second[3]
    assert len(set(second)) == 4
    assert METHOD_LOOKS.keys() == methods().keys()


def test_rows_of_a_method_share_colour_and_marker_and_no_two_look_alike() -> None:
    rows = [make_record("yarn", factor=float(factor)) for factor in range(2, 22)]
    rows += [make_record("yarn", factor=4.0, tokens_trained=tokens) for tokens in (1000, 2000)]
    rows += [make_record("none"), make_record("none", model="other"), make_record("none", tokens_trained=1000)]
    looks = make_looks(rows)
    found = [looks[row_key(row)] for row in rows]
    assert len(set(found)) == len(rows) == 25
    assert len({(look.colour, look.marker) for look in found[:22]}) == 1
    assert {look.colour for look in found[22:]} == {INK}
    assert [look.bold for look in found[20:]] == [True, True, False, False, True]
    assert [look.fill for look in found[:2]] == ["none", "none"]  # hollow: not trained
    assert [look.fill for look in found[20:22]] == ["full", "full"]


def test_a_method_of_another_package_takes_a_colour_that_is_free() -> None:
    rows = [make_record(method) for method in ("none", "yarn", "ntk", "theirs", "another")]
    colours = [look.colour for look in make_looks(rows).values()]
    assert len(set(colours)) == 5


def test_a_method_of_another_package_looks_the_same_in_every_report() -> None:
    """It had the next free number, so that its colour depended on what else was in the report."""
    rows = [make_record("theirs"), make_record("yarn"), make_record("none")]
    row = row_key(rows[0])
    looks = [make_looks(some)[row] for some in (rows, rows[:1], rows[::-1], [*rows, make_record("llama3")])]
    assert len(set(looks)) == 1


def test_a_method_of_another_package_has_a_look_of_its_own() -> None:
    first, second = make_looks([make_record("yarn"), make_record("theirs")]).values()
    assert first.marker != second.marker
    assert first.colour != second.colour


@pytest.mark.parametrize(
    ("colours", "paper", "ink"), [(COLOURS, "#ffffff", INK), (COLOURS_ON_DARK, "#0d1117", "#e6edf3")]
)
def test_colours_have_contrast_with_the_paper_and_differ_for_every_reader(
    colours: tuple[str, ...], paper: str, ink: str
) -> None:
    def linear(colour: str) -> Any:
        values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)

    def contrast(one: str) -> float:
        low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) + 0.05 for colour in (one, paper))
        return high / low

    def lab(rgb: Any) -> Any:
        """CIE 1976, white D65."""
        to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
        xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.95047, 1, 1.08883]
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    assert all(contrast(colour) >= 3 for colour in (*colours, ink))  # WCAG 2.1, 1.4.11
    for reader, matrix in SEEN_BY.items():
        seen = [lab(np.array(matrix) @ linear(colour)) for colour in (*colours, ink)]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20, reader


@pytest.mark.parametrize(("count", "kind"), [(2, "band"), (3, "band"), (4, "whiskers"), (6, "whiskers"), (7, "")])
def test_intervals_lie_behind_the_lines_and_give_way_where_rows_are_many(tmp_path: Path, count: int, kind: str) -> None:
    methods = ("none", "linear", "ntk", "yarn", "dynamic", "dca", "llama3")[:count]
    paths = report([make_record(method, n, 40.0) for method in methods for n in (128, 256)], tmp_path)
    svg, page = paths.plots[1].read_text(), paths.html.read_text()
    found = {what: len(re.findall(rf'<g id="{what}-\d+">', svg)) for what in ("band", "whiskers")}
    assert found == {what: count if what == kind else 0 for what in found}
    if kind:
        assert max(svg.index(f'id="{kind}-{at}"') for at in range(count)) < svg.index('id="line-0"')
    words = {
        "band": "Bands are the 95 % intervals.",
        "whiskers": "Whiskers are the 95 % intervals.",
        "": "With so many rows, the 95 % intervals are in the table only.",
    }
    assert f'<figcaption class="quiet">{words[kind]}</figcaption>' in page
    assert words[kind] in paths.markdown.read_text()


def test_whiskers_of_lines_that_meet_are_side_by_side(tmp_path: Path) -> None:
    paths = report([make_record(method) for method in ("none", "linear", "ntk", "yarn")], tmp_path)
    svg = paths.plots[1].read_text()
    x = [
        float(re.search(rf'<g id="whiskers-{at}">.*?M ([\d.]+) ', svg, re.DOTALL)[1])  # type: ignore[index]
        for at in range(4)
    ]
    assert np.diff(x) == pytest.approx([3.5] * 3, abs=1e-3)  # points


def test_titles_name_every_model(tmp_path: Path) -> None:
    def page_and_drawings(folder: Path) -> tuple[str, list[str]]:
        drawings = {
            path.stem: " ".join(re.findall("<!-- (.*?) -->", path.read_text())) for path in folder.glob("*.svg")
        }
        return (folder / "report.html").read_text(), [words for _, words in sorted(drawings.items())]

    small, large = {"model": "hub/Small-1B"}, {"model": "/data/Large-7B/"}
    records: list[Any] = [
        with_positions(method, n, 40.0, **small, seconds=n) for method in ("none", "yarn") for n in (128, 256)
    ]
    records += [make_retrieval_record("none", n, 0.0, 0, True, **small, seconds=n) for n in (128, 256)]
    report(records, tmp_path / "one")
    page, drawings = page_and_drawings(tmp_path / "one")
    assert "<title>Small-1B: Results by context length</title>" in page
    assert "<h1>Small-1B: Results by context length</h1>" in page
    assert len(drawings) == 7
    assert all("Small-1B: " in words for words in drawings)
    two = [make_record(**small), make_record(**large)]
    report(two, tmp_path / "two")
    page, drawings = page_and_drawings(tmp_path / "two")
    assert "<h1>Small-1B and Large-7B: Results by context length</h1>" in page
    assert ["Small-1B and Large-7B: " in words for words in drawings] == [True]
    assert title_with_models("Small-1B read further", two) == "Large-7B: Small-1B read further"


def test_long_titles_and_labels_take_more_lines_on_a_phone() -> None:
    """They ran out of the drawing to the right."""
    words = "rotations of the pair within the 256 tokens that the model was trained on"
    line = Line("yarn", [1.0, 2.0], [1.0, 2.0], PLAIN)
    drawing = draw_chart(Chart(f"a-model: {words}", words, "stretch", [line], [(1.0, "1")]))
    wide, narrow = (re.findall("<!-- (.*?) -->", svg.decode()) for svg in (drawing.svg, drawing.narrow))
    assert words in wide
    assert max(map(len, narrow)) <= 34
    assert " ".join(narrow).count("trained on") == 2


def test_long_names_leave_room_for_the_lines_and_are_not_cut_off_on_a_phone() -> None:
    """Beside their lines they took most of the drawing; in the legend of a phone they ran out of it."""
    names = [f"yarn x{n} (beta_fast=16) · Llama-3.2-1B-Instruct, after 1.5M tokens  35.92" for n in (4, 8)]

    def drawn(names: list[str]) -> Any:
        lines = [Line(name, [1.0, 2.0], [1.0, at + 2.0], PLAIN) for at, name in enumerate(names)]
        return draw_chart(Chart("title", "x", "y", lines, [(1.0, "1"), (2.0, "2")]))

    long, short = drawn(names), drawn(["yarn", "linear"])
    narrow = re.findall("<!-- (.*?) -->", long.narrow.decode())
    assert max(map(len, narrow)) <= 36
    assert all(name.replace("  ", " ") in " ".join(narrow).replace("  ", " ") for name in names)
    ends = [
        float(re.findall(r'<g id="line-0">.*?<path d="M [\d.]+ [\d.]+ \s*L ([\d.]+)', one.svg.decode(), re.DOTALL)[0])
        for one in (long, short)
    ]
    assert ends[0] >= ends[1]  # the line is as long as with short names
