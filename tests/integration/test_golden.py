"""Comparing two recordings of ``golden``: every kind of difference is reported with its path, and nothing else is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import golden
from golden import compare, main

RECORDED: dict[str, Any] = {
    "yarn": {"rotary": {"inv_freq": [1.0, 0.25, 1e-3]}, "loss": 0.1, "steps": 20, "nothing": None, "is_nan": math.nan},
    "files": {"config.json": {"factor": 4.0}, "README.md": ["# A model", "It reads 256 tokens."]},
    "records": [{"perplexity": 30.5}, {"perplexity": 31.5}],
}


def recording(folder: Path, job: dict[str, Any] | None = None, machine: str = "this one") -> Path:
    """Write what ``record`` would leave: one job of the name ``llama``."""
    (folder / "jobs").mkdir(parents=True)
    (folder / "jobs" / "llama.json").write_text(json.dumps(RECORDED if job is None else job))
    (folder / "environment.json").write_text(json.dumps({"comparable": machine}))
    (folder / "about.json").write_text(json.dumps({"comparable": ["llama"], "commit": folder.name}))
    return folder


def changed(**parts: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(RECORDED)), **parts}


def test_equal_recordings_have_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = recording(tmp_path / "before"), recording(tmp_path / "after")
    assert compare(before, after) == []
    assert main(["compare", str(before), str(after)]) == 0
    assert "0 differences" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "path", "message"),
    [
        ({"yarn": {**RECORDED["yarn"], "loss": math.nextafter(0.1, 1)}}, "llama/yarn/loss", "0.10000000000000002"),
        ({"yarn": {**RECORDED["yarn"], "steps": 20.0}}, "llama/yarn/steps", "20 -> 20.0"),
        ({"yarn": {**RECORDED["yarn"], "is_nan": 0.0}}, "llama/yarn/is_nan", "nan -> 0.0"),
        ({"yarn": {**RECORDED["yarn"], "nothing": 1}}, "llama/yarn/nothing", "None -> 1"),
        (
            {"yarn": {**RECORDED["yarn"], "rotary": {"inv_freq": [1.0, 0.5, 1e-3]}}},
            "llama/yarn/rotary/inv_freq",
            "1 of 3 numbers, first at 1: 0.25 -> 0.5 (relative 2.5e-01)",
        ),
        ({"records": [{"perplexity": 30.5}, {"perplexity": 31.0}]}, "llama/records/1/perplexity", "31.5 -> 31.0"),
        (
            {"files": {**RECORDED["files"], "README.md": ["# A model", "It reads 512 tokens."]}},
            "llama/files/README.md",
            "-It reads 256 tokens.",
        ),
    ],
)
def test_a_changed_value_is_reported_with_its_path(
    tmp_path: Path, part: dict[str, Any], path: str, message: str
) -> None:
    before, after = recording(tmp_path / "before"), recording(tmp_path / "after", changed(**part))
    (only,) = compare(before, after)
    assert only.startswith(f"{path}: ")
    assert message in only
    assert main(["compare", str(before), str(after)]) == 1


def test_a_missing_and_an_added_entry_are_reported(tmp_path: Path) -> None:
    job = changed(files={"config.json": {"factor": 4.0, "rope_type": "yarn"}})
    before, after = recording(tmp_path / "before"), recording(tmp_path / "after", job)
    assert compare(before, after) == [
        "llama/files/README.md: missing in the second, was ['# A model', 'It reads 256 tokens.']",
        "llama/files/config.json/rope_type: added in the second, is 'yarn'",
    ]
    fewer = recording(tmp_path / "fewer", changed(records=RECORDED["records"][:1]))
    assert compare(before, fewer) == [
        "llama/records/1: missing in the second, was 1 values",
        "llama/records/count: 2 -> 1 (relative 5.0e-01)",
    ]


def test_a_whole_part_that_is_missing_or_added_is_reported_once(tmp_path: Path) -> None:
    before = recording(tmp_path / "before")
    less = {name: value for name, value in RECORDED.items() if name != "yarn"}
    after = recording(tmp_path / "after", {**less, "ntk": {"loss": {"first": 0.1, "last": [0.2]}}})
    assert compare(before, after) == [
        "llama/ntk: added in the second, is 2 values",
        "llama/yarn: missing in the second, was 5 values",
    ]


def test_what_was_agreed_on_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = changed(
        yarn={{"steps": "max_steps"}.get(name, name): value for name, value in RECORDED["yarn"].items()},
        files={"config.json": {"factor": 2.0}, "README.md": ["# A model", "It has 256 tokens."]},
    )
    before, after = recording(tmp_path / "before"), recording(tmp_path / "after", job)
    assert len(compare(before, after)) == 4
    monkeypatch.setattr(golden, "RENAMED_PATHS", [("/yarn/steps$", "/yarn/max_steps")])
    monkeypatch.setattr(golden, "RENAMED_WORDS", [(r"\breads\b", "has")])
    assert [one.partition(":")[0] for one in compare(before, after)] == ["llama/files/config.json/factor"]
    monkeypatch.setattr(golden, "MAY_DIFFER", {"config.json/factor$": "half as far is enough"})
    assert compare(before, after) == []


def test_words_for_people_can_be_left_out(tmp_path: Path) -> None:
    files = {"config.json": {"factor": 2.0}, "README.md": ["# Another model"]}
    before, after = recording(tmp_path / "before"), recording(tmp_path / "after", changed(files=files))
    assert len(compare(before, after)) == 2
    assert compare(before, after, numbers=True) == ["llama/files/config.json/factor: 4.0 -> 2.0 (relative 5.0e-01)"]


def test_a_recording_of_some_jobs_is_compared_by_them_alone(tmp_path: Path) -> None:
    before, after = recording(tmp_path / "before"), recording(tmp_path / "after", changed(records=[]))
    (before / "jobs" / "calls.json").write_text("{}")
    (before / "about.json").write_text(json.dumps({"comparable": ["calls", "llama"]}))
    with pytest.raises(ValueError, match="other jobs"):
        compare(before, after)
    assert len(compare(before, after, only=["llama"])) == 4  # the empty list, its length, and the two records
    with pytest.raises(ValueError, match="job calls"):
        compare(before, after, only=["calls"])


def test_recordings_of_two_machines_and_unfinished_ones_are_refused(tmp_path: Path) -> None:
    before, other = recording(tmp_path / "before"), recording(tmp_path / "after", machine="another")
    with pytest.raises(ValueError, match="another machine"):
        compare(before, other)
    assert main(["compare", str(before), str(other)]) == 2
    (other / "about.json").unlink()
    with pytest.raises(ValueError, match="finished recording"):
        compare(before, other)
    with pytest.raises(ValueError, match="a checkout"):
        golden.record(tmp_path, tmp_path / "out", [], 1)
