"""``hf-posenc eval --method auto`` as a user runs it, on the tiny pretrained model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.cli.eval_auto import next_commands
from hf_posenc.cli.main import main
from hf_posenc.comparing.candidates import ROPE_SCALING, STATIC, UNPATCHED
from hf_posenc.comparing.config import CompareConfig
from hf_posenc.comparing.recommending import Recommendation
from hf_posenc.evaluation import read_records
from hf_posenc.evaluation.records import read_retrieval_records
from hf_posenc.utils.units import ContextLength
from tiny_llama import make_tiny_llama

HF_POSENC = [sys.executable, "-m", "hf_posenc"]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "my book.txt"
    path.write_text(load_novel(HELD_OUT_NOVEL)[:20_000], encoding="utf-8")
    return path


def ran(*words: object, cwd: Path) -> str:
    command = [*HF_POSENC, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def the_comparison(book: Path, *more: object) -> list[object]:
    where = [tiny_model_path(), "--documents", book, "--context-lengths", "512", "--dtype", "float32"]
    return ["eval", *where, "--cut", "--max-documents", "3", "--hide-progress", "--method", "auto", *more]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run a command in this process, which has imported everything, and return what it printed."""
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow  # half a minute: five commands, one after the other; comparing itself is tested below
def test_from_the_estimate_to_the_commands_that_make_what_it_recommends(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    comparison = the_comparison(book, "yarn", "dynamic_yarn", "--output", "r.jsonl")
    out = ran(*comparison, cwd=tmp_path)
    estimate, _, results = out.partition("total")
    for name in ("unpatched", "yarn", "dynamic_yarn"):
        assert re.search(rf"^  {name} +[\d.]+ (s|min)$", estimate, re.MULTILINE)
        assert re.search(rf"^{name}( x2)?: .*, retrieval not measured", results, re.MULTILINE)
    assert re.search(r"^measured in [\d.]+ (s|min) \(estimated [\d.]+ (s|min)\)$", results, re.MULTILINE)
    records = read_records(tmp_path / "r.jsonl")
    assert {record.method for record in records} == {"none", "yarn", "dynamic_yarn"}
    assert {record.context_length for record in records} == {64, 128, 256, 512}
    # Trained on 256 tokens: the staged rule leaves those alone, and no other is near it without training.
    longest = {record.method: record.perplexity for record in records if record.context_length == 512}
    assert min(longest, key=lambda method: longest[method]) == "dynamic_yarn"
    why = f"perplexity {longest['dynamic_yarn']:.2f} at 512 (unpatched {longest['none']:.2f}), the lowest"
    assert f"take dynamic_yarn: {why}" in results
    assert "servers cannot run dynamic_yarn; of what they can, yarn is the best: +" in results

    # What is there is not measured again, and the estimate knows it.
    again = run(capsys, *comparison)
    assert again.count("there already") == 3
    assert re.search(r"^  total +0 s$", again, re.MULTILINE)
    assert read_records(tmp_path / "r.jsonl") == records
    assert why in again

    # The commands are ready to run.
    patch, finetune, export = (shlex.split(line) for line in re.findall(r"^  hf-posenc (.*)$", results, re.MULTILINE))
    assert run(capsys, *patch).startswith("dynamic_yarn x2: 256 -> 512 tokens")
    assert (read_manifest(tmp_path / "tiny-512") or {})["method"] == "dynamic_yarn"
    assert "vllm serve" in run(capsys, *export)
    trained = [str(book) if word == "TRAINING_TEXTS" else word for word in finetune]
    few = ("--token-budget", "512", "--eval-documents", "0", "--warmup-steps", "0", "--bf16", "False")
    run(capsys, *trained, *few)
    assert (read_manifest(tmp_path / "tiny-512-tuned") or {})["method"] == "dynamic_yarn"


def test_a_dry_run_only_plans(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("ntk", "dca", "longrope", "--dry-run", "--tasks", "passkey", "niah_single_1")
    out = run(capsys, *the_comparison(book, *more, "--output", tmp_path / "r.jsonl"))
    assert "256 -> 512 tokens (x2), without training" in out
    assert "retrieval: 20 prompts a row, at 256, 512" in out  # two tasks, five depths
    estimate = out.partition("total")[0]
    for name in ("unpatched", "ntk", "dca"):
        assert re.search(rf"^  {name} +[\d.]+ (s|min)$", estimate, re.MULTILINE)
    assert out.rstrip().endswith("(one per pair).")  # longrope's reason: there is nothing after what is left out
    assert not (tmp_path / "r.jsonl").exists()


def test_retrieval_is_measured_in_the_users_text(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "r.jsonl"
    flags = ("ntk", "--tasks", "passkey", "--depths", "50", "--output", output)
    out = run(capsys, *the_comparison(book, *flags))
    answers = read_retrieval_records(output)
    assert [(answer.method, answer.context_length) for answer in answers] == [
        (method, length) for method in ("none", "ntk") for length in (256, 512)
    ]
    assert "retrieves at no length (passkey >= 85 %; at 256 0 % right" in out


def test_a_dictionary_is_one_more_row(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As vLLM takes it, beside our default of the same method."""
    output = tmp_path / "r.jsonl"
    dictionary = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 16}
    flags = ("yarn", "--rope-scaling", json.dumps(dictionary), "--output", output)
    out = run(capsys, *the_comparison(book, *flags))
    estimate = out.partition("total")[0]
    for name in ("unpatched", "yarn", "rope_scaling"):
        assert re.search(rf"^  {name} +[\d.]+ (s|min)$", estimate, re.MULTILINE)
    found = {(one.factor, tuple(one.options.items())): one for one in read_records(output) if one.context_length == 512}
    assert found.keys() == {(1.0, ()), (2.0, ()), (4.0, (("beta_fast", 16.0),))}
    # The same number as eval gives for it.
    measured = ("--documents", book, "--context-lengths", "512", "--cut", "--max-documents", "3", "--dtype", "float32")
    evaluated = tmp_path / "eval.jsonl"
    run(capsys, "eval", tiny_model_path(), *measured, "--rope-scaling", json.dumps(dictionary), "--output", evaluated)
    [alone] = read_records(evaluated)
    assert alone.nll_sum == pytest.approx(found[4.0, (("beta_fast", 16.0),)].nll_sum, rel=1e-6)
    assert run(capsys, *the_comparison(book, *flags, "--dry-run")).count("there already") == 3
    # One that is the method's own row is measured once.
    same = json.dumps({"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0})
    out = run(capsys, *the_comparison(book, "yarn", "--rope-scaling", same, "--dry-run"))
    assert "yarn: is the same as rope_scaling" in out
    for wrong, message in (
        ({"type": "yarn", "factor": 1.5}, "goes to 384 tokens only (factor 1.5 of 256)"),
        ({"type": "yarn", "rope_theta": 5e5}, "has rope_theta 500000.0, and the model has 10000.0"),
        ({"type": "yarm"}, "Did you mean 'yarn'"),
    ):
        assert message in refused(capsys, *the_comparison(book, "--rope-scaling", json.dumps(wrong)))


def test_a_model_whose_original_length_nobody_recorded(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model_path(), scaled := tmp_path / "scaled")
    config = json.loads((scaled / "config.json").read_text(encoding="utf-8"))
    config |= {"rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 512}
    config.pop("rope_parameters", None)
    (scaled / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = the_comparison(book, "--on-scaled", "replace", "--rope-scaling", '{"rope_type": "yarn", "factor": 4.0}')
    assert "pass --original-max-position-embeddings" in refused(capsys, "eval", scaled, *words[2:])


@pytest.mark.parametrize(("factor", "length"), [({"factor": 4.0}, []), ({}, ["--context-length", "512"])])
def test_the_commands_after_it_have_the_dictionary(
    factor: dict[str, float], length: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictionary = json.dumps({"rope_type": "yarn", **factor})
    what = CompareConfig(ContextLength(512), rope_scaling=dictionary)
    taken = Recommendation(ROPE_SCALING, ROPE_SCALING, (ROPE_SCALING,), ROPE_SCALING, (), True, STATIC)
    monkeypatch.chdir(tmp_path)
    assert f" . {tmp_path.name}-" in next_commands(".", what, make_tiny_llama(), taken)[1]
    _, patch, finetune, export = next_commands("my/model", what, make_tiny_llama(), taken)
    assert shlex.split(patch) == ["hf-posenc", "patch", "my/model", "model-512", "--rope-scaling", dictionary, *length]
    assert shlex.split(finetune)[5:7] == ["--rope-scaling", dictionary]
    assert shlex.split(export) == ["hf-posenc", "export", "model-512", "--to", "vllm"]


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-posenc: error: "))
    return line


def test_mistakes_are_found_before_anything_is_loaded(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_posenc.checkpoint.loading.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    comparison = the_comparison(book)
    assert "'yarn'" in refused(capsys, *comparison, "yran")
    assert "'passkey'?" in refused(capsys, *comparison, "--tasks", "pass")
    assert "90s, 20m" in refused(capsys, *comparison, "--budget", "soon")
    assert "--max-documents must be >= 1" in refused(capsys, *comparison, "--max-documents", "0")
    assert "--samples is for --tasks" in refused(capsys, *comparison, "--samples", "3")
    assert "is a folder" in refused(capsys, *comparison, "--output", tmp_path)
    auto = ("eval", tiny_model_path(), "--method", "auto", "--context-lengths")
    assert "required: --documents" in refused(capsys, *auto, "1k")
    assert "one length" in refused(capsys, *auto, "1k", "2k", "--documents", book)
    for flag in (("--factor", 2), ("--protocol", "last_k"), ("--option", "a=1"), ("--questions", 2), ("--label", "x")):
        assert f"{flag[0]}" in refused(capsys, *comparison, *flag)
    plain = ("eval", tiny_model_path(), "--documents", book, "--context-lengths", "1k")
    assert "--budget" in refused(capsys, *plain, "--budget", "20m")
    assert "--dry-run" in refused(capsys, *plain, "--dry-run")


@pytest.mark.parametrize("holds", [True, False])
def test_what_comes_next_where_the_model_is_best_as_it_is(holds: bool) -> None:
    taken = Recommendation("none", "none", ("none",), None, (), holds, UNPATCHED)
    first, command = next_commands("my/model", CompareConfig(ContextLength("8k")), make_tiny_llama(), taken)
    if holds:
        assert first == "nothing to do: it reads 8k as it is. For longer texts, compare there:"
        assert command == "  hf-posenc eval my/model --documents LONGER_TEXTS --context-lengths 16384 --method auto"
    else:
        assert first == "no method helps without training; training is what is left:"
        assert command.startswith("  hf-posenc finetune my/model --documents TRAINING_TEXTS --method yarn")


def test_a_budget_that_fits_nothing_is_refused_with_the_estimate(
    book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = the_comparison(book, "yarn", "--budget", "0.001s")
    assert "yarn alone" in refused(capsys, *comparison)
    assert "nothing has" in refused(capsys, *the_comparison(book, "--context-lengths", "256"))


def test_a_task_that_does_not_fit_is_refused_before_anything_is_measured(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the original length, of which the plan makes no prompt."""
    words = the_comparison(book, "yarn", "--tasks", "cwe", "--dry-run")
    assert "task 'cwe' does not fit into 256 tokens" in refused(capsys, *words)


def test_a_record_says_what_was_typed(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = list(map(str, the_comparison(book, "yarn", "--output", tmp_path / "r.jsonl")))
    run(capsys, *words)
    assert {record.command for record in read_records(tmp_path / "r.jsonl")} == {shlex.join(["hf-posenc", *words])}


def test_several_processes_are_refused(
    book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--method auto runs in one process" in refused(capsys, *the_comparison(book))
