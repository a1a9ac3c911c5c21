"""Texts that cannot be trained or measured on: one line that counts, and says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_posenc.cli.main import main


def documents(folder: Path, lengths: list[int]) -> Path:
    """Write documents of so many characters, each a token of the tiny model."""
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": "abcdefghij" * (n // 10) + "k" * (n % 10)}) + "\n" for n in lengths))
    return path


def words(base: Path, source: Path, output: Path, *flags: str) -> list[str]:
    given = ["finetune", str(base), "--documents", str(source), "--output-dir", str(output), "--factor", "2"]
    return [*given, "--token-budget", "128", *flags]


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    (line,) = [line for line in captured.err.splitlines() if line.startswith("hf-posenc: error: ")]
    return line.removeprefix("hf-posenc: error: ")


@pytest.mark.parametrize("kind", ["file", "folder", "jsonl", "blank"])
def test_an_empty_dataset(run_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    source = tmp_path / {"file": "a.txt", "folder": "books", "jsonl": "a.jsonl", "blank": "b.jsonl"}[kind]
    if kind == "folder":
        source.mkdir()
        (source / "a.txt").write_text("  \n")
    else:
        source.write_text('{"text": " "}\n' if kind == "blank" else "")
    said = refused(capsys, words(run_base, source, tmp_path / "run"))
    assert said.startswith(f"{str(source)!r} holds no text. Give ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("lengths", "flags", "message"),
    [
        (
            [30, 20, 9, 500],  # the last one is held out
            [],
            "the 3 documents to train on hold 59 tokens in all, 46.1 % of one block of 128: the model would read the "
            "same words over and over within a block. Give more text, or a smaller --seq-len.",
        ),
        (
            [200, 200, 31],
            [],
            "nothing can be measured: the longest held-out text has 31 tokens, the shortest length to be measured is "
            "32. Give longer documents, shorter --eval-lengths, or train without measuring: "
            "--eval-documents 0.",
        ),
        ([400, 60], ["--eval-lengths", "64"], "nothing can be measured: the longest held-out text has 60 tokens, "),
        ([1], ["--eval-lengths", "2"], "the 1 document to train on hold 1 tokens in all, 0.8 % of one block"),
        ([600], ["--eval-lengths", "256"], "nothing can be measured: the longest held-out text has 30 tokens, "),
    ],
)
def test_too_little_text(
    run_base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lengths: list[int],
    flags: list[str],
    message: str,
) -> None:
    said = refused(capsys, words(run_base, documents(tmp_path, lengths), tmp_path / "run", *flags))
    assert message in said
    assert not (tmp_path / "run").exists()


def test_documents_shorter_than_a_block_are_counted(
    run_base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = documents(tmp_path, [*[50, 96, 40] * 3, 10])
    said = (
        "all 10 documents are shorter than a block of 128 tokens: the longest has 96 and fills 75.0 % of one, the mean "
        "44.4 %. Blocks are packed from several, which do not see each other, and no distance beyond 96 tokens is "
        "learned. Give longer documents, or a smaller --seq-len."
    )
    argv = words(run_base, source, tmp_path / "run", "--eval-documents", "0")
    assert main(argv) == 0
    assert said in caplog.text
    caplog.clear()
    assert main([*words(run_base, source, tmp_path / "shorter", "--eval-documents", "0"), "--seq-len", "96"]) == 0
    assert "are shorter than a block" not in caplog.text
