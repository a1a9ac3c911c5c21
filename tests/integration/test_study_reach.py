"""``scripts/study_reach.py`` on a few tokens: its rows, its tables, and that what is there is not made again."""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_posenc.checkpoint.manifest import MANIFEST
from hf_posenc.evaluation.records import append_line, read_records, read_retrieval_records
from hf_posenc.methods.registry import get_method
from hf_posenc.mixtures import read_shares
from hf_posenc.patching.presets import get_preset
from hf_posenc.retrieving.tasks import get_task
from report_records import make_retrieval_record

FILES = ("perplexity.jsonl", "retrieval.jsonl")


@pytest.fixture
def script() -> Iterator[ModuleType]:
    import study_reach

    yield study_reach
    del sys.modules["study_reach"]


@pytest.fixture
def small(script: ModuleType) -> Any:
    """The study of the tiny model in seconds: two questions, and trainings of a step of each kind."""
    return replace(
        script.tiny_plan(),
        **{"target": 512, "lengths": (256, 512), "pieces": 3, "far": (512,), "tasks": ("passkey",), "seeds": (0,)},
        **{"samples": 1, "questions": 2, "token_budget": 3 * 512, "read_with": ("dca",)},
        fit={"max_texts": 1, "held_out": 0, "steps": 1, "block": 128},
    )


def test_the_rows_are_known_and_called_differently(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "read_tokenizer", lambda path: None)
    monkeypatch.setattr(script, "check_prompts", lambda *args, **counts: None)
    for plan in (script.tiny_plan(), script.smollm2_plan(Path("model"))):
        labels = [row.name for row in script.Reach(tmp_path / plan.name, plan).rows]
        assert len(set(labels)) == len(labels) == 6 + 3 * len(plan.seeds) * (1 + len(plan.read_with))
        assert plan.samples * plan.questions >= 100  # questions of a cell
        assert plan.token_budget <= 1_000_000
        assert plan.original in plan.lengths
        assert plan.target == max(plan.lengths) == max(plan.far)
        assert set(plan.tasks) <= {*script.FORMATS, *script.TASKS}
        assert plan.preset is None or get_preset(plan.preset).factor == plan.target / plan.original
    assert all(get_task(name).several_questions for name in (*script.FORMATS, *script.TASKS))
    assert all(get_method(name) for name in script.ZERO_SHOT)
    mixed = {kind for mix in script.MIXES.values() if mix for kind in read_shares(mix)}
    assert mixed == set(script.KINDS) | {"knots"}  # all its columns have a loss


@pytest.mark.slow
def test_wrong_rows_and_lengths_stop_before_anything_is_loaded(
    script: ModuleType, tmp_path: Path, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = script.Reach(tmp_path / "known", small).rows
    assert [row.name for row in script.select(known, ["both, seed 0", "ntk"])] == ["ntk", "both, seed 0"]
    assert script.select(known, None) == known
    with pytest.raises(SystemExit, match=r"no such row: mix, yran\. Known: unpatched, ntk, .*, task mix, seed 0"):
        script.select(known, ["yran", "mix", "dca"])
    shutil.rmtree(tmp_path / "known")
    monkeypatch.setattr("study.load_model", pytest.fail)
    monkeypatch.setattr(sys, "argv", ["study_reach.py", "--output-dir", str(tmp_path / "study"), "--samples", "0"])
    with pytest.raises(ValueError, match=r"1,.*0"):
        script.main()
    with pytest.raises(ValueError, match=r"'passkey'.*32"):
        script.Reach(tmp_path / "study", replace(small, far=(32,)))
    with pytest.raises(ValueError, match=r"2.*'cwe'"):
        script.Reach(tmp_path / "study", replace(small, far=(2000,), tasks=("passkey", "cwe")))
    assert not list(tmp_path.iterdir())
    study = script.Reach(tmp_path / "study", replace(small, token_budget=2 * 512))
    study.check_trainings(script.select(study.rows, ["ntk", "plain text, seed 0"]))
    with pytest.raises(ValueError, match=r"2.*knots=0\.3:.*token_budget.*1536"):
        study.check_trainings(script.select(study.rows, ["ntk", "task mix, seed 0"]))


@pytest.mark.slow
def test_what_is_measured_and_trained_is_not_repeated(
    script: ModuleType, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = script.Reach(tmp_path, small)
    wanted = script.select(study.rows, ["unpatched", "ntk", "task mix, seed 0", "task mix, seed 0, dca"])
    for row in wanted:
        study.run(row)
    study.show()
    labels = ["unpatched", "ntk", "task mix, seed 0", "task mix, seed 0, dca"]
    records = {(one.label, one.context_length): one for one in read_records(tmp_path / "perplexity.jsonl")}
    assert len({one.text_hash for (_, length), one in records.items() if length == 256}) == 1  # the same tokens
    found = {key: (one.method, one.tokens_trained) for key, one in records.items()}
    assert found.pop(("unpatched", 256)) == ("none", 0)  # and at no other length
    methods = [("ntk", 0), ("fitted", 3 * 512), ("dca", 3 * 512)]
    assert found == {
        (label, length): method for label, method in zip(labels[1:], methods, strict=True) for length in (256, 512)
    }
    answers = read_retrieval_records(tmp_path / "retrieval.jsonl")
    assert [answer.label for answer in answers] == [label for label in labels[1:] for _ in range(2)]
    assert len({answer.shared_text for answer in answers}) == 1  # the same text for all rows

    perplexities = table(tmp_path / "perplexity.csv")
    assert [row["name"] for row in perplexities] == labels
    assert perplexities[0]["512"] == ""
    measured = table(tmp_path / "retrieval.csv")
    assert [(row["measure"], row["name"]) for row in measured] == [
        (measure, label) for measure in ("right", "tokens", "loss") for label in labels[1:]
    ]
    losses = table(tmp_path / "training.csv")
    assert [(row["name"], row["steps"]) for row in losses] == [
        ("task mix, seed 0", "first fifth"),
        ("task mix, seed 0", "last fifth"),
    ]
    assert [row["text"] for row in losses] == ["", ""]  # not in this mix
    assert float(losses[0]["kv"]) > 0

    before = [(tmp_path / file).read_bytes() for file in FILES]
    with monkeypatch.context() as patch:
        for name in ("load_model", "finetune", "fit_method"):
            patch.setattr(f"study.{name}", pytest.fail)
        for row in wanted:
            study.run(row)
    more = script.Reach(tmp_path, replace(small, samples=2))  # more texts are added to those that are there
    more.run(more.rows[1])
    assert [(tmp_path / file).read_bytes()[: len(text)] for file, text in zip(FILES, before, strict=True)] == before
    assert len(read_retrieval_records(tmp_path / "retrieval.jsonl")) == len(answers) + 2
    assert {row["name"] for row in more.answers()} == {"ntk"}  # of the others, texts are missing
    (tmp_path / "runs" / "task-mix-seed-0" / MANIFEST).unlink()
    assert more.losses() == []  # as long as the training is not finished
    with pytest.raises(SystemExit, match="other settings"):
        script.Reach(tmp_path, replace(small, token_budget=4 * 512))


def test_of_a_question_that_was_asked_again_the_last_answer_counts(
    script: ModuleType, small: Any, tmp_path: Path
) -> None:
    """As after an upgrade of torch in the middle of a cell: records with other run keys are in the same file."""
    study = script.Reach(tmp_path, small)

    def write(question: int, right: bool) -> None:
        record = make_retrieval_record(
            "ntk", 512, None, 0, right, label="ntk", questions_per_text=2, question=question, run_key=f"{right}"
        )
        append_line(study.questions.file, record.to_json())

    write(0, False)
    assert study.questions.answered() == {}  # the other question is not answered yet
    write(0, True)
    write(1, True)
    assert [one.score() for one in study.questions.answered()["ntk", "passkey", 512]] == [1, 1]


def test_the_measures_by_hand(script: ModuleType) -> None:
    class Asked:
        def __init__(self, score: float, n_right: int, n_tokens: int, nll_sum: float, text: str) -> None:
            self.n_right, self.n_tokens, self.nll_sum, self.text = n_right, n_tokens, nll_sum, text
            self.score = lambda: score

    asked: Any = [Asked(1.0, 4, 4, 1.0, "a"), Asked(0.0, 1, 4, 5.0, "a"), Asked(0.0, 0, 2, 4.0, "b")]
    assert script.right(asked).startswith("33 % (")
    assert script.tokens_right(asked) == "50.0"
    assert script.loss(asked) == "1.00"
    steps = [{"kind": "kv", "loss": at, "tokens_in_loss": 1 + at} for at in range(6)] + [{"kind": "text"}]
    assert script.mean_loss(steps, "kv", 0) == pytest.approx((0 * 1 + 1 * 2) / 3)
    assert script.mean_loss(steps, "kv", -1) == pytest.approx((4 * 5 + 5 * 6) / 11)
    assert script.mean_loss(steps, "needles", 0) is None


def table(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
