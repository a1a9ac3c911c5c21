"""What the command line says of mistakes: in one line, of flags, before anything is loaded."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc import FinetuneConfig
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.cli.eval import EvalArguments
from hf_posenc.cli.main import main
from hf_posenc.cli.shared_arguments import parse
from hf_posenc.data.reading import DocumentStream
from hf_posenc.errors import argument, arguments_named_as_flags


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    return line.removeprefix("hf-posenc: error: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "m", "--metod", "yarn"], "there is no flag --metod. Did you mean --method?"),
        (["patch", "m", "o", "--factr=2"], "there is no flag --factr. Did you mean --factor?"),
        (["finetune", "m", "--lerning_rate", "1"], "there is no flag --lerning-rate. Did you mean --learning-rate?"),
        (["eval", "m", "--context-lengths", "64", "--qqqq"], "there is no flag --qqqq. (hf-posenc eval --help"),
        (["evaal", "m"], "unknown command 'evaal'. Did you mean 'eval'? Known: patch, eval,"),
        (["eval", "m"], "the following arguments are required: --context-lengths (hf-posenc eval --help"),
    ],
)
def test_typos_get_a_suggestion(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *words).startswith(message)


def test_an_abbreviated_flag_is_taken() -> None:
    _, what = parse("eval", "", ["m", "--context-len", "64"], (EvalArguments,), {"model": ""})
    assert what.context_lengths == [64]


@pytest.mark.parametrize(
    ("given", "in_python", "as_flag"),
    [
        (("text_field",), "text_field", "--text-field"),
        (("text_field", ["a", "b c"]), "text_field=['a', 'b c']", "--text-field a 'b c'"),
        (("template", "Q: {q}\nA: {a}"), r"template='Q: {q}\nA: {a}'", r"--template 'Q: {q}\nA: {a}'"),
        (("sliding_window", "off"), "sliding_window='off'", "--sliding-window off"),
        (("max_tokens", 0), "max_tokens=0", "--max-tokens 0"),
        (("hide_progress", True), "hide_progress=True", "--hide-progress"),
        (("hide_progress", False), "hide_progress=False", "--hide-progress false"),
        # An option of a method, and a flag of other commands, are none of this one's.
        (("beta_fast", 16), "beta_fast=16", "beta_fast=16"),
        (("learning_rate",), "learning_rate", "learning_rate"),
    ],
)
def test_arguments_are_named_as_flags_in_a_command(given: tuple[Any, ...], in_python: str, as_flag: str) -> None:
    from hf_posenc.cli.shared_arguments import DocumentArguments
    from hf_posenc.patching.extension_config import ExtensionConfig

    words = ["m", "--context-lengths", "64"]
    with arguments_named_as_flags():
        parse("eval", "", words, (EvalArguments, ExtensionConfig, DocumentArguments), {"model": ""})
        assert argument(*given) == as_flag
    assert argument(*given) == in_python


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["patch", "m", "o", "--context-length", "64", "--rope-scaling", "{}"],
            "--rope-scaling has no rope_type (or type). One of",
        ),
        (
            ["patch", "m", "o", "--sliding-window", "x"],
            "--sliding-window must be 'keep', 'off' or a number",
        ),
        (["eval", "m", "--context-lengths", "1"], "--context-lengths must be one or more numbers of tokens, each"),
        (["eval", "m", "--context-lengths", "64", "--min-tokens", "0"], "--min-tokens must be at least 1 token"),
    ],
)
def test_mistakes_name_flags(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *words).startswith(message)


def test_a_missing_field_is_named_as_the_flag(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "qa.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    line = said(
        capsys, "eval", str(tiny_checkpoint), "--documents", str(tmp_path / "qa.jsonl"), "--context-lengths", "64"
    )
    assert line.endswith("; it has: question, answer. Give --text-field question answer.")


@pytest.mark.parametrize(
    "words",
    [
        ["patch", "nowhere/model", "{file}/out"],
        ["finetune", "nowhere/model", "--documents", "novel:persuasion", "--output-dir", "{file}/out"],
        ["report", "{results}", "--output-dir", "{file}"],
        ["demo", "--output-dir", "{file}/out"],
    ],
)
def test_an_output_folder_that_cannot_be_is_found_first(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "results").write_text("")
    paths = {name: tmp_path / name for name in ("file", "results")}
    line = said(capsys, *(word.format(**paths) for word in words))
    assert f"cannot be a folder, because '{tmp_path / 'file'}' is a file" in line


def test_a_folder_of_others_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root, which tests may run as, may write anywhere
    line = said(capsys, "patch", "nowhere/model", str(tmp_path / "out"))
    assert line.startswith(f"'{tmp_path}' cannot be written to by this user. Give another folder than")


def test_no_number_of_the_system_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, "patch", str(tiny_model_path()), "/proc/no/folder", "--factor", "4")
    assert line == "'/proc/no' cannot be used: no such file or directory."


def test_too_little_memory_of_a_device_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def full(words: list[str]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr("hf_posenc.cli.main._command", full)
    line = said(capsys, "eval", "model")
    assert line.startswith("the device has too little memory: CUDA out of memory. Tried to allocate 2.00 GiB. ")


def test_a_factor_beyond_all_numbers_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "infinity" in said(capsys, "list", "methods", "yarn", "--factor", "1e308")


def test_results_that_this_user_may_not_write_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hf_posenc.evaluation.records import check_output

    check_output(tmp_path / "new/results.jsonl")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ValueError, match="cannot be written to by this user"):
        check_output(tmp_path / "new/results.jsonl")


def test_the_hub_in_offline_mode_is_not_said_to_lack_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "offline mode is set" in said(capsys, "doctor", "some/model")


def test_a_hub_that_cannot_be_reached_is_reported_within_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"  # where nothing listens
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", nobody + "/{repo_id}/{filename}")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nobody)
    commands = [
        ["plan", "some/model", "--context-length", "64k"],
        ["patch", "some/model", "/tmp/never-written"],
        ["doctor", "some/model"],
        ["doctor", "some/model-2.5-7b"],
        ["finetune", "some/model", "--documents", "novel:persuasion", "--output-dir", "/tmp/never-written"],
    ]
    for words in commands:
        line = said(capsys, *words)
        assert line.startswith(f"{words[1]!r} cannot be read: ")


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_of_other_systems_are_read_as_line_feeds(end: str, tmp_path: Path) -> None:
    lines = ["A line.", "Another line.", "", "And a third."]
    plain, other = tmp_path / "plain.txt", tmp_path / "other.txt"
    plain.write_bytes("\n".join(lines).encode())
    other.write_bytes("\ufeff".encode() + end.join(lines).encode())
    assert DocumentStream(other).texts() == DocumentStream(plain).texts() == list(DocumentStream(other))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"text": "A line.{repr(end)[1:-1]}Another line."}}\n')
    assert DocumentStream(rows).texts() == ["A line.\nAnother line."]


def test_perplexity_does_not_depend_on_line_ends(tmp_path: Path) -> None:
    """It was 4,662 instead of 28.7 on the tiny model, for a text with Windows' line ends."""
    from hf_posenc import perplexity
    from hf_posenc.checkpoint.loading import load_model

    model, tokenizer = load_model(tiny_model_path(), dtype="float32")
    found = []
    for name, end in (("unix", "\n"), ("windows", "\r\n")):
        file = tmp_path / f"{name}.txt"
        file.write_bytes(load_novel("persuasion")[:4000].replace("\n", end).encode())
        (record,) = perplexity(model, DocumentStream(file).texts(), [256], tokenizer=tokenizer, progress=False)
        found.append(record.perplexity)
    assert found[0] == found[1] < 60


def test_the_help_of_finetune_has_headings_for_all_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["finetune", "--help-all"])
    shown = capsys.readouterr().out
    headings = [line.rstrip(":") for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[2:] == [*FinetuneConfig.HELP_GROUPS, *headings[2 + len(FinetuneConfig.HELP_GROUPS) :]]
    options = shown[shown.index("options:") : shown.index("The run:")]
    assert [word for word in options.split() if word.startswith("--")] == ["--help", "--help-all", "--traceback"]


def test_every_setting_of_a_run_is_under_one_heading() -> None:
    listed = [name for names in FinetuneConfig.HELP_GROUPS.values() for name in names]
    shown = {one.name for one in dataclasses.fields(FinetuneConfig) if one.init} - FinetuneConfig.HELP_HIDDEN
    assert sorted(listed) == sorted(shown)


def test_what_is_decided_is_not_shown_and_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["finetune", "--help-all"])
    shown = capsys.readouterr().out
    assert "--optim-args" in shown
    assert "--eval-strategy" not in shown
    assert "--max-steps" not in shown
    assert main(["finetune", "m", "--output-dir", "o", "--max-steps", "100"]) == 2
    assert "token_budget" in capsys.readouterr().err


def test_memory_lines_name_the_method(caplog: pytest.LogCaptureFixture) -> None:
    from hf_posenc import patched, perplexity
    from tiny_llama import make_tiny_llama

    model = make_tiny_llama()
    documents = [torch.arange(200) % 90 + 2]
    with caplog.at_level("INFO", "hf_posenc"):
        perplexity(model, documents, [64], progress=False)
        with patched(model, "linear", 2):
            perplexity(model, documents, [64], progress=False)
    lines = [line.partition(": ")[0] for line in caplog.messages if line.startswith("memory in MB")]
    assert lines == ["memory in MB", "memory in MB", "memory in MB, linear", "memory in MB, linear"]


def test_a_folder_in_which_saving_was_killed_is_as_if_it_were_empty(tmp_path: Path) -> None:
    from hf_posenc.checkpoint.extended import UNFINISHED
    from hf_posenc.cli.output_folders import check_folder

    (tmp_path / UNFINISHED).mkdir()
    check_folder("some/model", tmp_path, may_hold_files=False)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"it holds notes\.txt\."):
        check_folder("some/model", tmp_path, may_hold_files=False)
