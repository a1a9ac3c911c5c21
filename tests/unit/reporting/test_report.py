"""Reports: what is in them, what they refuse, and that nothing is fetched to show them."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ET
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.evaluation.intervals import bootstrap_interval
from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.rows import short_model_names
from hf_posenc.reporting import report, text_table
from hf_posenc.reporting.comparable import make_tables, perplexity_name
from hf_posenc.reporting.plot import spread_labels
from hf_posenc.utils.units import count_name
from report_records import make_record, make_retrieval_record, read_page

CURVES: dict[tuple[str, int], dict[int, float]] = {
    ("none", 0): {128: 60.0, 256: 50.0, 1024: 1234.5},
    ("linear", 0): {128: 160.0, 256: 140.0, 1024: 150.0},
    ("yarn", 0): {128: 75.0, 256: 60.0, 1024: 70.0},
    ("yarn", 300_000): {128: 61.5, 256: 49.0, 1024: 46.0},
}


def make_records(**changes: Any) -> list[Record]:
    return [
        make_record(method, length, perplexity, tokens_trained=tokens, **changes)
        for (method, tokens), curve in CURVES.items()
        for length, perplexity in curve.items()
    ]


def cells(markdown: str) -> list[list[str]]:
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_markdown_holds_every_number_once_with_interval_original_and_change(tmp_path: Path) -> None:
    paths = report(make_records(), tmp_path / "report")
    head, *rows = cells(paths.markdown.read_text())[:5]
    assert head == ["method", "fine-tuning", "short cost", "128", "256 (original)", "1k (x4)"]
    assert rows[0] == [
        "unpatched",
        "",
        "",
        "**60.00** tie (57.00–63.00)",
        "**50.00** tie (47.50–52.50)",
        "1,234 (1,173–1,296)",
    ]
    assert rows[1][:2] == ["linear x4", "zero-shot"]
    assert rows[1][4] == "140.0 (133.0–147.0) +180.0 %"
    assert rows[3][:2] == ["yarn x4", "after 300k tokens"]
    assert rows[3][3].endswith("+2.5 %")
    assert rows[3][4].startswith("**49.00** tie (")
    assert rows[3][4].endswith("-2.0 %")
    assert rows[3][5] == "**46.00** (43.70–48.30)"  # no change beyond the original length
    assert [row[2] for row in rows] == ["", "+180.0 % at 256", "+25.0 % at 128", "+2.5 % at 128"]


def test_page_loads_nothing_and_says_how_it_was_measured(tmp_path: Path) -> None:
    paths = report(make_records(), tmp_path, title="A <b>title</b> & more")
    page = paths.html.read_text()

    tags = read_page(page).tags
    links = [value for _, values in tags for name, value in values.items() if name in ("src", "href", "xlink:href")]
    assert links
    assert all(link.startswith("#") for link in links)
    names = [tag for tag, _ in tags]
    assert not {"link", "img", "b", "iframe", "object"} & set(names)
    assert {"svg", "table", "dl"} <= set(names)
    assert names.count("script") == 1
    assert not re.search(r"url\((?!#)|@import", page)
    assert "A &lt;b&gt;title&lt;/b&gt; &amp; more" in page
    assert all(fact in page for fact in ("truncated", "tok-1", "text-1024", "float32, sdpa", "torch 2.13.0", "2,040"))


def test_the_protocol_is_described_in_the_records_own_words(tmp_path: Path) -> None:
    words = "Windows of {} tokens begin every 64 <tokens>."
    records = [
        make_record(method, n, 40.0, protocol="pose", window=n, stride=64, scored=words.format(n))
        for method in ("none", "yarn")
        for n in (128, 256)
    ]
    paths = report(records, tmp_path)
    page = paths.html.read_text()
    assert "<dt>At 256 tokens</dt><dd>Windows of 256 tokens begin every 64 &lt;tokens&gt;.</dd>" in page
    assert "arXiv:2309.10400, table 1" in page
    assert "- Stride in tokens: 64 at 128, 64 at 256" in paths.markdown.read_text()


def test_plots_show_every_row_and_the_original_length(tmp_path: Path) -> None:
    paths = report(make_records(), tmp_path)
    png, svg = paths.plots
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    drawing = ET.parse(svg).getroot()
    # Text is drawn as paths, with the words in comments.
    words = re.findall(r"<!-- (.*?) -->", svg.read_text())
    shown = " ".join(words)
    for expected in (
        "trained on 256",
        "unpatched  1,234",
        "linear x4, zero-shot  150.0",
        "yarn x4, after 300k tokens  46.00",
    ):
        assert expected in shown
    assert drawing.tag.endswith("svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "perplexity_truncated.png",
        "perplexity_truncated.svg",
        "report.html",
        "report.md",
    ]


def test_same_records_give_the_same_files(tmp_path: Path) -> None:
    first, second = report(make_records(), tmp_path / "a"), report(make_records(), tmp_path / "b")
    for one, two in zip((first.html, *first.plots), (second.html, *second.plots), strict=True):
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text_hash", "other"),
        ("tokenizer_hash", "tok-2"),
        ("n_tokens", 99),
        ("bos", "prepended"),
        ("num_documents", 9),
        ("stride", 64),
        ("average", "windows"),
    ],
)
def test_what_cannot_be_compared_has_a_table_of_its_own(tmp_path: Path, field: str, value: Any) -> None:
    odd = dataclasses.replace(make_record("ntk", 256, 55.0), **{field: value})
    records = [*make_records(), odd]
    first, second = make_tables(records)
    assert "ntk x4" not in [row.name for row in first.rows]
    assert [row.name for row in second.rows] == ["ntk x4"]
    assert first.notes == ()
    (why,) = second.notes
    assert re.match(rf"ntk x4 is apart from the first table: the \w.* differ: .*{field} is .* and {value!r} for", why)
    text = report(records, tmp_path / "report").markdown.read_text()
    assert text.index(first.title) < text.index(second.title) < text.index(why)
    assert why in unescape((tmp_path / "report" / "report.html").read_text())


def test_the_reason_is_the_most_informative_one() -> None:
    """It said that weights, versions or seed differ, where the texts did."""
    first = make_record("none", 256, 40.0, run_key="a")
    again = dataclasses.replace(first, text_hash="other", n_tokens=99, num_documents=9, perplexity=50.0, run_key="b")
    _, second = make_tables([first, again])
    assert second.notes[0].startswith("unpatched is apart from the first table: the texts differ: at 256 tokens")


def test_all_numbers_of_another_text_are_in_one_table() -> None:
    """Of a row that was measured on two texts, none of the second is put beside the first."""
    texts = {
        text: [
            make_record(
                method, length, 40.0 + length / 100, text_hash=f"{text}{length}", run_key=f"{text}{method}{length}"
            )
            for method in ("none", "yarn")
            for length in lengths
        ]
        for text, lengths in (("a", (128, 256)), ("b", (256, 1024)))
    }
    first, second = make_tables([*texts["a"], *texts["b"]])
    for table, text, lengths in ((first, "a", (128, 256)), (second, "b", (256, 1024))):
        assert [row.name for row in table.rows] == ["unpatched", "yarn x4"]
        assert [tuple(row.records) for row in table.rows] == [lengths, lengths]
        assert {record.text_hash[0] for row in table.rows for record in row.records.values()} == {text}
    assert (second.slug, second.title) == ("truncated_2", "First N tokens, table 2")


def test_refuses_a_report_of_long_texts_only(tmp_path: Path) -> None:
    long_only = [record for record in make_records() if record.context_length > 256]
    with pytest.raises(ValueError, match="1024"):
        report(long_only, tmp_path)
    with pytest.raises(ValueError, match="no records"):
        report([], tmp_path)


def test_answers_are_reported_beside_perplexities_that_are_left_out(tmp_path: Path) -> None:
    """The whole report was refused because no row of perplexities had a short length."""
    records = [make_record("yarn", 1024), make_retrieval_record("yarn", 256, 0.0, 0, True)]
    made = report(records, tmp_path)
    for text in (made.markdown.read_text(), unescape(made.html.read_text())):
        assert "yarn x4, zero-shot is left out: the shortest length evaluated is 1024 tokens" in text
        assert "Retrieval: passkey" in text


def test_notes_name_the_model_where_there_are_several() -> None:
    """Two rows of two models were left out in the same words."""
    models = {"model": "runs/a/model"}, {"model": "runs/b/model"}
    records = [make_record("none", 256, **one) for one in models]
    records += [make_record("yarn", 1024, **one) for one in models]
    records += [make_record("ntk", 256, **one, text_hash=one["model"]) for one in models]
    tables = make_tables(records)
    names = [f"{rule} · {model}" for rule in ("yarn x4", "ntk x4") for model in ("a/model", "b/model")]
    notes = [note for table in tables for note in table.notes]
    assert [[name for name in names if note.startswith(name)] for note in notes] == [[name] for name in names]
    assert [row.name for row in tables[0].rows] == ["unpatched · a/model", "unpatched · b/model"]


def test_short_names_of_models_tell_them_apart() -> None:
    """Models that were trained in two runs are both in a folder called model."""
    models = ("/out/run1/model", "/out/run2/model", "hub/Small-1B", "tiny", "x/tiny", ".")
    assert list(short_model_names(models).values()) == ["run1/model", "run2/model", "Small-1B", "tiny", "x/tiny", "."]
    assert short_model_names(["/out/run1/model"]) == {"/out/run1/model": "model"}


def test_every_row_has_to_show_what_short_texts_pay(tmp_path: Path) -> None:
    baseline = [make_record("none", length) for length in (256, 1024)]
    (table,) = make_tables([*baseline, make_record("yarn", 1024)])
    assert [row.name for row in table.rows] == ["unpatched"]
    (note,) = table.notes
    assert note.startswith("yarn x4, zero-shot is left out: the shortest length evaluated is 1024 tokens, above the")
    assert "Evaluate it at 256 tokens or fewer too (truncated)." in note
    assert note in report([*baseline, make_record("yarn", 1024)], tmp_path).markdown.read_text()
    longer = {"model": "big", "original_max_position_embeddings": 1024}
    (table,) = make_tables([*baseline, make_record("none", 1024, **longer)])  # each row has its own original length
    assert [row.name for row in table.rows] == ["unpatched · tiny", "unpatched · big"]


def test_two_runs_of_one_row_are_apart_and_a_repeat_replaces(tmp_path: Path) -> None:
    runs = [
        make_record("yarn", 256, perplexity, tokens_trained=100, run_key=key)
        for key, perplexity in (("rate 1e-4", 40.0), ("rate 2e-5", 41.5))
    ]
    first, second = make_tables(runs)
    assert (first.rows[0].records[256].perplexity, second.rows[0].records[256].perplexity) == (40.0, 41.5)
    assert "one has perplexity 40 and the other 41.5 on the same text, so weights, versions or seed" in second.notes[0]
    assert "--label" in second.notes[0]
    (only,) = make_tables([runs[0], dataclasses.replace(runs[0], perplexity=39.0)])
    assert only.rows[0].records[256].perplexity == 39.0
    (table,) = make_tables([runs[0], dataclasses.replace(runs[1], label="2e-5")])
    assert [row.records[256].perplexity for row in table.rows] == [40.0, 41.5]


def test_a_file_is_no_folder_for_a_report(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="file' is"):
            report(make_records(), folder)


def test_each_protocol_has_its_own_table_and_unique_ids(tmp_path: Path) -> None:
    last = make_records(protocol="last_k", last_k=64, n_tokens=8 * 64, text_hash="same")
    paths = report([*make_records(), *last], tmp_path)
    assert [path.name for path in paths.plots if path.suffix == ".png"] == [
        "perplexity_truncated.png",
        "perplexity_last_64.png",
    ]
    page = paths.html.read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    assert "Last 64 of N tokens" in page


def test_rows_are_named_by_what_differs_and_later_records_replace_earlier_ones() -> None:
    bf16 = [dataclasses.replace(record, dtype="bfloat16") for record in make_records()[:3]]
    (table,) = make_tables([*make_records()[:3], *bf16])
    assert [row.name for row in table.rows] == ["unpatched · float32", "unpatched · bfloat16"]
    (table,) = make_tables([make_record(perplexity=40.0), make_record(perplexity=41.0)])
    assert [row.records[256].perplexity for row in table.rows] == [41.0]
    (table,) = make_tables([make_record("yarn", options={"beta_fast": 16}, label="mine")])
    assert table.rows[0].name == "yarn x4 (beta_fast=16) · mine"


def test_change_is_only_against_the_same_model_when_there_are_several() -> None:
    other = [dataclasses.replace(r, model="other", perplexity=2 * r.perplexity) for r in make_records()]
    (table,) = make_tables([*make_records(), *other])
    changes = {row.name: table.change(row, 256) for row in table.rows if row.first.method == "linear"}
    assert changes == {"linear x4 · tiny": pytest.approx(180.0), "linear x4 · other": pytest.approx(180.0)}


def test_the_unpatched_model_is_compared_with_itself_only(tmp_path: Path) -> None:
    records = [make_record("none", model="small", perplexity=50.0), make_record("yarn", model="big", perplexity=30.0)]
    (table,) = make_tables(records)
    assert [table.change(row, 256) for row in table.rows] == [None, None]
    text = report(records, tmp_path).markdown.read_text()
    assert "perplexity 30.00." in text
    assert "%" not in text[text.index("## Perplexity") :].replace("95 %", "")


def test_headline_is_about_the_target_length_not_beyond_it(tmp_path: Path) -> None:
    beyond = [make_record("none", 2048, 2000.0), make_record("yarn", 2048, 900.0, tokens_trained=300_000)]
    text = report([*make_records(), *beyond], tmp_path).markdown.read_text()
    assert "At 1k tokens, yarn x4 (after 300k tokens) has perplexity 46.00 and the unpatched model 1,234" in text
    assert "at 256 tokens it ties with the unpatched model (-2.0 %)." in text


def test_headline_does_not_call_equal_better_or_worse(tmp_path: Path) -> None:
    for perplexity in (49.99, 50.02):
        records = [make_record("none", 256, 50.0), make_record("yarn", 256, perplexity)]
        assert "it ties with the unpatched model" in report(records, tmp_path).markdown.read_text()


def test_terminal_table_refuses_nothing() -> None:
    lines = text_table([make_record(length=1024, perplexity=70.0), make_record("yarn", 1024, 46.0)]).splitlines()
    assert [line.split() for line in lines] == [
        ["1k"],
        ["truncated", "unpatched", "70.00"],
        ["truncated", "yarn", "x4,", "zero-shot", "46.00"],
    ]


def test_labels_move_apart_in_order_and_no_further_than_needed() -> None:
    assert spread_labels([0.0, 100.0], gap=10) == [0.0, 100.0]
    assert spread_labels([50.0, 50.0], gap=10) == [45.0, 55.0]
    assert spread_labels([50.0, 0.0, 50.0], gap=10, lowest=40) == [50.0, 40.0, 60.0]
    moved = spread_labels([3.0, 0.0, 1.0, 40.0], gap=10)
    assert moved[1] < moved[2] < moved[0] < moved[3]
    assert sorted(moved)[1] - sorted(moved)[0] == pytest.approx(10)
    assert sum(moved[:3]) / 3 == pytest.approx(4 / 3)
    assert moved[3] == 40.0


def test_numbers_as_people_read_them() -> None:
    assert [perplexity_name(x) for x in (5.726, 28.333, 730.12, 12345.6)] == ["5.73", "28.33", "730.1", "12,346"]
    assert [count_name(n) for n in (500, 300_000, 303_104, 999_936, 1_500_000)] == [
        *("500", "300k", "303k", "1M", "1.5M")
    ]


def test_a_model_whose_training_nobody_recorded_is_not_zero_shot(tmp_path: Path) -> None:
    """Transformers' own save_pretrained does not know how many tokens a model was trained on."""
    records = [make_record("none", 256, 50.0), make_record("yarn", 256, 60.0, tokens_trained=None)]
    paths = report(records, tmp_path / "report")
    rows = cells(paths.markdown.read_text())
    assert rows[2][:2] == ["yarn x4", "trained or not is not recorded"]
    assert "zero-shot" not in paths.markdown.read_text()


def with_units(method: str, shift: float, noise: float = 0.0, length: int = 256) -> Record:
    """A row of ten documents, some easy and some hard, ``shift`` nats worse than the text, give or take ``noise``."""
    tokens = [100] * 10
    nats = [100 * (3 + 0.2 * at + shift + noise * (-1) ** at) for at in range(10)]
    low, high = bootstrap_interval(nats, tokens)
    mean = math.fsum(nats) / 1000
    units = {"unit_nll": nats, "unit_tokens": tokens, "nll_sum": math.fsum(nats), "n_tokens": 1000}
    return make_record(method, length, math.exp(mean), ci_low=low, ci_high=high, **units)


def test_rows_that_cannot_be_distinguished_from_the_lowest_tie_with_it(tmp_path: Path) -> None:
    records = [
        with_units("none", 0.02),  # its interval holds the lowest, but every document is harder for it
        with_units("linear", 0.01, noise=0.2),  # which of the two is better depends on the document
        with_units("ntk", 0.0),
        with_units("yarn", 0.003),  # surely worse, by less than 0.5 %
    ]
    assert all(record.ci_low < other.ci_high for record in records for other in records)
    (table,) = make_tables(records)
    assert [row.first.method for row in table.leaders[256]] == ["ntk", "yarn", "linear"]
    paths = report(records, tmp_path)
    cell = {row[0]: row[3] for row in cells(paths.markdown.read_text())[1:5]}
    numbers = {row.name: perplexity_name(row.first.perplexity) for row in table.rows}
    assert cell["unpatched"].startswith(f"{numbers['unpatched']} (")
    for name in ("linear x4", "ntk x4", "yarn x4"):
        assert cell[name].startswith(f"**{numbers[name]}** tie (")
    page = paths.html.read_text()
    assert page.count('<span class="badge">tie</span>') == page.count('<span class="best">') == 3
    assert (
        "the 95 % interval of their difference on the same text holds zero, or the difference is below 0.5 %." in page
    )
    assert "At 256 tokens yarn x4 (zero-shot) and linear x4 (zero-shot) tie with it." in page


def test_one_winner_is_no_tie(tmp_path: Path) -> None:
    page = report([with_units("none", 0.5), with_units("yarn", 0.0)], tmp_path / "clear").html.read_text()
    assert page.count('<span class="best">') == 1
    assert 'class="badge"' not in page
    assert "tie" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)[: page.index("How it was measured")]
