"""The runner of the studies (``scripts/study.py``): what is done is not done again, and what is done differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.checkpoint.manifest import MANIFEST
from hf_posenc.evaluation.records import append_line, read_retrieval_records
from report_records import make_retrieval_record
from study import Questions, Row, Study, Texts, passkeys_right, select

ROWS = [
    Row("none"),
    Row("ntk", {"method": "ntk", "context_length": 512}),
    Row("trained", training={"method": "ntk", "context_length": 512, "token_budget": 1024, "eval_documents": 0}),
]
NAMES = [row.name for row in ROWS]


@pytest.mark.slow
def test_a_row_is_trained_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts_and_questions() -> tuple[Study, Texts, Questions]:
        novel = load_novel("persuasion")
        study = Study(tmp_path, tiny_model_path(), [load_novel("emma")], {"target": 512}, dtype="float32")
        texts = Texts(tmp_path / "texts.jsonl", [novel], [512], {"cut": True, "max_tokens": 512, "progress": False})
        return study, texts, Questions(tmp_path / "questions.jsonl", ["passkey"], [512], 1, 2, [novel])

    study, texts, questions = texts_and_questions()
    assert all(one.left(name) for one in (texts, questions) for name in NAMES)
    for row in ROWS:
        study.run(row, texts, questions)
    study.write({"table": texts.lines(ROWS), "empty": []})
    assert (tmp_path / "runs" / "trained" / MANIFEST).is_file()
    table = (tmp_path / "table.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table] == ["name", *NAMES]
    assert len(set(table)) == 4  # no two rows have the same perplexity
    assert not (tmp_path / "empty.csv").exists()
    asked = [(record.label, record.question) for record in read_retrieval_records(questions.file)]
    assert sorted(asked) == [(name, number) for name in NAMES for number in (0, 1)]

    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for name in ("load_model", "finetune", "patched"):
        monkeypatch.setattr(f"study.{name}", pytest.fail)
    study, texts, questions = texts_and_questions()
    for row in ROWS:
        study.run(row, texts, questions)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    with pytest.raises(SystemExit, match="other settings"):
        Study(tmp_path, tiny_model_path(), [], {"target": 1024})


def test_unknown_rows_are_refused() -> None:
    assert [row.name for row in select(ROWS, ["trained", "none"])] == ["none", "trained"]
    assert select(ROWS, None) == ROWS
    with pytest.raises(SystemExit, match=r"no such row: yarn\. Known: none, ntk, trained"):
        select(ROWS, ["yarn", "ntk"])


def test_of_a_question_that_was_asked_again_the_last_answer_counts(tmp_path: Path) -> None:
    """As after an upgrade of torch in the middle of a cell: records with other run keys are in the same file."""
    questions = Questions(tmp_path / "questions.jsonl", ["passkey"], [512], 1, 2)

    def write(question: int, right: bool) -> None:
        facts: dict[str, Any] = {"label": "ntk", "questions_per_text": 2, "question": question}
        record = make_retrieval_record("ntk", 512, None, 0, right, run_key=json.dumps([question, right]), **facts)
        append_line(questions.file, record.to_json())

    write(0, False)
    write(0, True)
    assert questions.left("ntk")  # the other question is not answered yet
    write(1, True)
    assert not questions.left("ntk")
    assert passkeys_right(questions.file, 512, "ntk") == "2/2"
