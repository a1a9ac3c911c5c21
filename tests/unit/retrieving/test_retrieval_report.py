"""Retrieval from the command line to the report: the numbers in it, and what it refuses to put together."""

from __future__ import annotations

import dataclasses
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.assets import HELD_OUT_NOVEL, load_novel
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.cli.main import main
from hf_posenc.evaluation.intervals import share_interval
from hf_posenc.evaluation.records import RetrievalRecord, read_retrieval_records
from hf_posenc.patching.api import patched
from hf_posenc.reporting import report, text_table
from hf_posenc.reporting.comparable import make_grids
from hf_posenc.retrieving.measuring_retrieval import retrieval
from report_records import make_retrieval_record, read_page
from svg_values import line_values


def make_records() -> list[RetrievalRecord]:
    """Unpatched: right at 256, never at 1024. yarn: right but for one of the prompts at 1024, depth 50."""
    return [
        make_retrieval_record(method, length, depth, seed, right)
        for method in ("none", "yarn")
        for length in (256, 1024)
        for depth in (0.0, 50.0)
        for seed in (0, 1)
        if (right := length == 256 or (method == "yarn" and (depth, seed) != (50.0, 1))) in (True, False)
    ]


def test_the_page_holds_shares_intervals_and_a_map_for_each_row(tmp_path: Path) -> None:
    paths = report(make_records(), tmp_path)
    tables = read_page(paths.html.read_text()).tables
    by_length = tables["retrieval_passkey_table"]
    maps = {caption: rows for caption, rows in tables.items() if "_" not in caption}
    share = share_interval([1, 1, 1, 0], range(4))
    assert by_length[0] == ["method", "256", "1k"]
    assert by_length[1] == ["unpatched teacher-forced", "100 % 51–100", "0 % 0–49"]
    assert by_length[3][2] == f"75 % {100 * share.low:.0f}–{100 * share.high:.0f}" == "75 % 30–95"
    assert by_length[4] == ["yarn x4 zero-shot, written", "0 % 0–49", "0 % 0–49"]
    assert len(maps) == 4  # two rows, scored in two ways
    assert maps["yarn x4, zero-shot, teacher-forced"] == [
        ["depth", "256", "1k"],
        ["0 %", "100 of 2", "100 of 2"],
        ["50 %", "100 of 2", "50 of 2"],
    ]
    assert [path.name for path in paths.plots[:4:2]] == ["retrieval_passkey.png", "retrieval_passkey_by_length.png"]
    assert paths.plots[0].read_bytes().startswith(b"\x89PNG")
    markdown = paths.markdown.read_text()
    assert "| yarn x4 | zero-shot | teacher-forced | 100 % (51–100) | 75 % (30–95) |" in markdown
    assert "![Depth and length](retrieval_passkey.png)" in markdown
    assert "Perplexity" not in markdown


def test_shares_by_length_are_drawn_where_there_are_several_lengths(tmp_path: Path) -> None:
    report(make_records(), tmp_path)
    svg = (tmp_path / "retrieval_passkey_by_length.svg").read_text()
    for number, shares in enumerate(((100, 0), (100, 75))):
        assert line_values(svg, f"line-{number}", log_x=True) == [
            (pytest.approx(length, rel=1e-3), pytest.approx(share, abs=0.1))
            for length, share in zip((256, 1024), shares, strict=True)
        ]
    assert ["band-0" in svg, "band-1" in svg] == [True, True]
    one = [record for record in make_records() if record.context_length == 256]
    assert "retrieval_passkey_by_length" not in [path.stem for path in report(one, tmp_path / "one").plots]


def test_tasks_without_depths_or_an_order_show_no_more_than_there_is(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"task": "cwe", "answers": ["one", "two"], "num_forced": None, "num_written": 1}
    records = [make_retrieval_record("none", 256, None, seed, True, **changes) for seed in (0, 1)]
    paths = report(records, tmp_path)
    tables = read_page(paths.html.read_text()).tables
    assert set(tables) == {"retrieval_cwe_table", "cost_retrieval_cwe_table"}
    assert tables["retrieval_cwe_table"] == [
        ["method", "256"],
        ["unpatched written", "50 % 9–91"],
    ]
    assert text_table(records).splitlines()[1:] == [
        "cwe, written  unpatched     50 % (9–91)",
        "each of 2 prompts (interval over prompts)",
    ]


def test_the_terminal_shows_shares_by_length() -> None:
    lines = text_table(make_records()).splitlines()
    assert lines[0].split() == ["256", "1k"]
    assert lines[3].startswith("passkey, teacher-forced  yarn x4, zero-shot")
    assert lines[3].split("zero-shot")[1].split() == ["100", "%", "(51–100)", "75", "%", "(30–95)"]
    assert lines[-1] == "each of 4 prompts (interval over prompts)"


def make_shared(method: str, length: int, texts: int, right: int) -> list[RetrievalRecord]:
    """Twenty questions of each text; of the last text only so many are right."""
    return [
        make_retrieval_record(
            method,
            length,
            5 * at + 2.5,
            seed,
            seed < texts - 1 or at < right,
            question=at,
            questions_per_text=20,
            shared_text=f"text {length} {seed}",
            text_hash=f"{length} {seed} {at}",
            run_key=f"{method} {length} {seed} {at}",
        )
        for seed in range(texts)
        for at in range(20)
    ]


def test_questions_that_share_texts_have_intervals_over_texts_and_maps_of_all_depths(tmp_path: Path) -> None:
    asked = make_shared("none", 256, 5, 10) + make_shared("none", 1024, 5, 0)
    records = [*asked, *(make_retrieval_record("none", 256, None, seed, True, task="vt") for seed in (0, 1))]
    tables = read_page(report(records, tmp_path).html.read_text()).tables
    first, second = tables["retrieval_passkey_20_questions_table"][1][1:]
    # 80 of 100 in 5 texts: variance of the share 5/4 (4 x 4^2 + 16^2) / 100^2 = 0.04, 25 times that of 100 independent
    # questions, 0.8 x 0.2 / 100; so they are worth 4, with Student's 2.776 for 4 degrees of freedom.
    share, count, z2 = 0.8, 4, 2.776**2
    middle, spread = share + z2 / 2 / count, 2.776 * (share * 0.2 / count + z2 / 4 / count**2) ** 0.5
    low, high = ((middle + sign * spread) / (1 + z2 / count) for sign in (-1, 1))
    assert second == f"80 % {100 * low:.0f}–{100 * high:.0f}"
    assert first.startswith("90 % ")
    map_of = tables["unpatched, teacher-forced"]
    assert [row[0] for row in map_of[1:]] == [f"{low}–{low + 10} %" for low in range(0, 100, 10)]
    assert map_of[1][1:] == ["100 of 10", "80 of 10"]
    assert map_of[-1][1:] == ["80 of 10", "80 of 10"]
    matrix = tables["retrieval_tasks_table"]
    assert [row[0] for row in matrix[1:]] == [
        "unpatched passkey, 20 questions of a text, teacher-forced",
        "unpatched vt, teacher-forced",
    ]
    assert matrix[1][2] == f"{second} 100 questions in 5 texts"
    assert matrix[2][1:] == ["100 % 34–100 2 prompts", ""]
    assert "each of 100 questions in 5 texts (interval over texts)" in text_table(asked)
    alone = text_table([one for one in asked if one.seed == 0])
    assert "each of 20 questions in 1 text (interval over the questions of one text)" in alone


def test_one_question_and_several_of_a_text_are_two_tasks() -> None:
    single = [make_retrieval_record("none", 256, 50.0, seed, True) for seed in (0, 1)]
    grids = make_grids([*single, *make_shared("none", 256, 2, 5)])
    assert [(grid.slug, grid.title) for grid in grids] == [
        ("retrieval_passkey", "Retrieval: passkey"),
        ("retrieval_passkey_20_questions", "Retrieval: passkey, 20 questions of a text"),
    ]
    (only,) = make_grids(make_shared("none", 256, 2, 5) + make_shared("yarn", 256, 2, 7))
    assert [row.name for row in only.rows] == ["unpatched", "yarn x4"]


def test_what_was_not_asked_alike_stands_in_a_table_of_its_own(tmp_path: Path) -> None:
    records = make_records()
    at_1024 = "of the prompts at 1024 tokens differ between 'unpatched' and 'yarn x4, zero-shot'"
    for changed, message in (
        ([*records[:-1], dataclasses.replace(records[-1], text_hash="other")], f"the texts {at_1024}"),
        ([*records[:-1], dataclasses.replace(records[-1], tokenizer_hash="other")], "the tokenizers differ between"),
        ([*records[:-1], dataclasses.replace(records[-1], chat=True)], "the chat templates differ between"),
        (records[:-1], f"the depths or samples {at_1024}"),
    ):
        first, second = make_grids(changed)
        assert [row.name for row in first.rows] == ["unpatched"]
        assert [row.name for row in second.rows] == ["yarn x4"]
        assert (first.notes, first.slug, second.slug) == ((), "retrieval_passkey", "retrieval_passkey_2")
        (note,) = second.notes
        assert note.startswith(f"yarn x4, zero-shot is apart from the first table: {message}")
    paths = report(changed, tmp_path)
    for text in (paths.markdown.read_text(), unescape(paths.html.read_text())):
        assert text.index(first.title) < text.index(second.title) < text.index(note)


def test_another_run_of_a_row_is_apart_and_a_repeat_is_none() -> None:
    records = make_records()
    first, second = make_grids([*records, dataclasses.replace(records[-1], run_key="other")])
    assert [row.name for row in first.rows] == ["unpatched", "yarn x4"]
    assert "it is another run of the same row, so weights, versions or seed differ" in second.notes[0]
    (only,) = make_grids([*records, records[-1]])
    assert len(only.rows) == 2


def test_eval_asks_for_each_method_and_the_report_takes_both_kinds(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "r.jsonl"
    text.write_text(load_novel(HELD_OUT_NOVEL)[3000:9000].encode("ascii", "ignore").decode())
    common = ["eval", str(tiny_checkpoint), "--documents", str(text), "--output", str(output), "--hide-progress"]
    common += ["--method", "none", "yarn", "--factor", "8", "--model-name", "tiny"]
    tasks = ["--tasks", "passkey", "--context-lengths", "256", "0.5k", "--depths", "0", "100", "--samples", "2"]
    assert main([*common, *tasks, "--prefill-chunk", "128"]) == 0
    assert "passkey, teacher-forced  yarn x8" in capsys.readouterr().out
    records = read_retrieval_records(output)
    assert [(record.method, record.context_length, record.depth, record.seed) for record in records] == [
        (method, length, depth, seed)
        for method in ("none", "yarn")
        for length in (256, 512)
        for depth in (0, 100)
        for seed in (0, 1)
    ]
    model, tokenizer = load_model(tiny_checkpoint)
    with patched(model, "yarn", 8):
        expected = retrieval(
            model, tokenizer, context_lengths=[512], depths=[100], documents=[text.read_text()], progress=False
        )
    assert records[-2].nll_sum == pytest.approx(expected[0].nll_sum, rel=1e-5)
    assert records[-2].text_hash == expected[0].text_hash
    assert main([*common, "--context-lengths", "64", "128"]) == 0
    assert main(["report", str(output), "--output-dir", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "report.html").read_text()
    assert re.findall(r"<h2>(.*)</h2>", page) == [
        "In short",
        "Perplexity: First N tokens",
        "Loss by position: First N tokens",
        "Retrieval: passkey",
        "Frequencies",
        "Time and memory: First N tokens",
        "Time and memory: Retrieval: passkey",
        "Commands",
    ]
    assert sorted(path.name for path in (tmp_path / "page").glob("*.svg")) == [
        "cost_retrieval_passkey.svg",
        "frequencies.svg",
        "perplexity_truncated.svg",
        "positions_truncated.svg",
        "retrieval_passkey.svg",
        "retrieval_passkey_by_length.svg",
    ]


def test_mistakes_are_found_before_a_model_is_loaded(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hf_posenc.checkpoint.loading.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    argv = ["eval", str(tiny_checkpoint), "--context-lengths", "256"]
    for more, message in (
        (["--tasks", "passkey", "--stride", "64"], "--stride says how perplexity is measured"),
        (["--tasks", "passkey", "--protocol", "last_k"], "--protocol says how perplexity is measured"),
        (["--tasks", "passkey", "--depths", "120"], "percentage from 0"),
        (["--tasks", "passkye"], "argument --tasks: unknown value 'passkye'. Did you mean 'passkey'? Known: "),
        ([], "the following arguments are required: --documents"),
    ):
        assert main([*argv, *more]) == 2
        assert message in capsys.readouterr().err


def test_rules_that_have_one_name_are_rows_of_one_table(tmp_path: Path) -> None:
    """Two fitted rules of one factor differ in their lists alone, which no name shows."""
    records = [
        make_retrieval_record(
            "fitted", 256, depth, 0, True, options={"long_factor": [1.0, divisor]}, run_key=f"{divisor}"
        )
        for divisor in (2.0, 3.0)
        for depth in (0.0, 50.0)
    ]
    [grid] = make_grids(records)
    assert len(grid.rows) == 2
