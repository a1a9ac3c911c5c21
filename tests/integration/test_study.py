"""The runner of the studies (``scripts/study.py``): what is done is not done again, and what is done differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import study_adapt
import study_budget
import study_fit
from compare_encodings import Comparison
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.checkpoint.manifest import MANIFEST
from hf_posenc.evaluation.records import append_line
from report_records import make_retrieval_record
from study import Row, Study, Texts

ROWS = [
    Row("none"),
    Row("ntk", {"method": "ntk", "context_length": 512}),
    Row("trained", training={"method": "ntk", "context_length": 512, "token_budget": 1024, "eval_documents": 0}),
]
NAMES = [row.name for row in ROWS]


@pytest.mark.slow
def test_a_row_is_trained_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts_of(study: Path) -> tuple[Texts, Texts]:
        protocol = {"cut": True, "max_tokens": 512, "progress": False}
        novels = [load_novel(name) for name in ("persuasion", "emma")]
        return Texts(study / "short.jsonl", novels[:1], [256], protocol), Texts(
            study / "long.jsonl", novels[1:], [512], protocol
        )

    def started() -> Study:
        return Study(tmp_path, tiny_model_path(), [load_novel("emma")], {"target": 512}, dtype="float32")

    study, (short, long) = started(), texts_of(tmp_path)
    assert all(one.left(name) for one in (short, long) for name in NAMES)
    for row in ROWS:
        study.run(row, short)
        before = short.file.read_bytes()
        study.run(row, short, long)
        assert short.file.read_bytes() == before
    study.write({"table": long.lines(ROWS), "empty": []})
    assert (tmp_path / "runs" / "trained" / MANIFEST).is_file()
    table = (tmp_path / "table.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table] == ["name", *NAMES]
    assert len(set(table)) == 4  # no two rows have the same perplexity
    assert not (tmp_path / "empty.csv").exists()
    assert {name: list(of) for name, of in short.records().items()} == {name: [256] for name in NAMES}

    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for name in ("load_model", "finetune", "patched"):
        monkeypatch.setattr(f"study.{name}", pytest.fail)
    for row in ROWS:
        started().run(row, *texts_of(tmp_path))
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    with pytest.raises(SystemExit, match="other settings"):
        Study(tmp_path, tiny_model_path(), [], {"target": 1024})


def test_unknown_rows_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for script in (study_fit, study_budget, study_adapt):
        texts = ["--fitted", "a.txt", "--held-out", "b.txt"] if script is study_adapt else []
        monkeypatch.setattr("sys.argv", ["study", *texts, "--rows", "jarn"])
        with pytest.raises(SystemExit):
            script.main()
        assert "invalid choice: 'jarn' (choose from" in capsys.readouterr().err


def test_rows_are_run_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[str] = []
    monkeypatch.setattr(Study, "run", lambda _, row, *texts, **facts: run.append(row.name))
    monkeypatch.setattr("sys.argv", ["study", "--output-dir", str(tmp_path), "--rows", "yarn", "monotone", "none"])
    study_fit.main()
    assert run == ["none", "yarn", "monotone"]


def test_of_a_passkey_that_was_asked_again_the_last_answer_counts(tmp_path: Path) -> None:
    """As after an upgrade of torch in the middle of a cell: records with other run keys are in the same file."""
    comparison = Comparison(tmp_path, 8192, 0)

    def write(seed: int, right: bool) -> None:
        record = make_retrieval_record("rope", 256, None, seed, right, run_key=json.dumps([seed, right]))
        append_line(comparison.passkey_file("rope"), record.to_json())

    assert comparison.passkeys("rope") == "ends, ends"
    write(0, False)
    write(1, False)
    assert comparison.passkeys("rope") == "0/2, ends"
    write(0, True)
    assert comparison.passkeys("rope") == "1/2, ends"
