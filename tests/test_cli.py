"""The commands as a user types them: what they do, and what they say when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc.arguments import PROTOCOLS, parse_options
from hf_posenc.cli import COMMANDS, main
from hf_posenc.evaluation import perplexity, read_records
from hf_posenc.evaluation.plans import PROTOCOLS as KNOWN_PROTOCOLS
from hf_posenc.loading import load_model
from hf_posenc.patching import describe, patch_model, patched


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(c) for c in torch.randint(32, 127, (600,), generator=generator).tolist()))
    return path


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a command that must fail as a user's mistake does, and return its one message."""
    assert main([str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("hf-posenc: error: ")]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]


def test_patch_writes_what_plain_transformers_loads_extended(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "longer"
    argv = ["patch", str(tiny_checkpoint), str(output), "--method", "yarn", "--context-length", "1k"]
    assert main([*argv, "--option", "beta_fast=16", "--option", "truncate=False"]) == 0
    assert "yarn x16: 64 -> 1024 tokens" in capsys.readouterr().out
    config = json.loads((output / "config.json").read_text())
    assert config["max_position_embeddings"] == 1024
    assert config["rope_parameters"]["beta_fast"] == 16
    assert config["rope_parameters"]["truncate"] is False
    expected = patch_model(load_model(tiny_checkpoint)[0], "yarn", 16, beta_fast=16, truncate=False)
    ids = torch.arange(90).unsqueeze(0)
    with torch.no_grad():
        actual = AutoModelForCausalLM.from_pretrained(output)(input_ids=ids).logits
        torch.testing.assert_close(actual, expected(input_ids=ids).logits, rtol=0, atol=0)


def test_flags_are_spelled_with_dashes_or_underscores(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for number, flag in enumerate(("--context-length", "--context_length")):
        assert main(["patch", str(tiny_checkpoint), str(tmp_path / f"{number}"), "--method", "pi", flag, "128"]) == 0
        assert describe(load_model(tmp_path / f"{number}")[0])["context_length"] == 128


def test_eval_gives_the_librarys_numbers_for_each_method_and_resumes(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results.jsonl"
    argv = [
        "eval",
        str(tiny_checkpoint),
        "--documents",
        str(text_file),
        "--context-lengths",
        "32",
        "64",
        "128",
        "--cut",
    ]
    argv += ["--method", "none", "linear", "--factor", "2", "--protocol", "truncated", "last_k", "--last-k", "16"]
    argv += ["--output", str(output), "--hide-progress", "--label", "run 1", "--model-name", "tiny"]
    assert main(argv) == 0
    records = read_records(output)
    assert [(r.method, r.protocol, r.context_length) for r in records] == [
        (method, protocol, length)
        for method in ("none", "linear")
        for protocol in ("truncated", "last_k")
        for length in (32, 64, 128)
    ]
    model, tokenizer = load_model(tiny_checkpoint)
    with patched(model, "linear", 2):
        (expected,) = perplexity(model, [text_file.read_text()], [128], tokenizer=tokenizer, cut=True, progress=False)
    shown = capsys.readouterr().out
    assert records[8].perplexity == pytest.approx(expected.perplexity, rel=1e-6)
    assert f"{expected.perplexity:.1f}" in shown
    assert {(r.label, r.model, r.tokens_trained) for r in records} == {("run 1", "tiny", 0)}
    assert main(argv) == 0
    assert read_records(output) == records


def test_eval_of_a_trained_checkpoint_says_how_long_it_was_trained(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    from hf_posenc.checkpoint import save_extended

    model, tokenizer = load_model(tiny_checkpoint)
    save_extended(patch_model(model, "yarn", 2), tmp_path / "trained", tokenizer, tokens_trained=4096)
    output = tmp_path / "r.jsonl"
    argv = [
        "eval",
        str(tmp_path / "trained"),
        "--documents",
        str(text_file),
        "--context-lengths",
        "64",
        "--hide-progress",
    ]
    assert main([*argv, "--output", str(output)]) == 0
    (record,) = read_records(output)
    assert (record.method, record.factor, record.tokens_trained) == ("yarn", 2.0, 4096)


def test_finetune_trains_and_saves(tiny_checkpoint: Path, text_file: Path, tmp_path: Path) -> None:
    argv = ["finetune", str(tiny_checkpoint), "--documents", str(text_file), "--output-dir", str(tmp_path / "trained")]
    argv += ["--method", "yarn", "--factor", "2", "--option", "beta_fast=16", "--token-budget", "0.2k"]
    assert main([*argv, "--seq-len", "64", "--eval-lengths", "32", "64"]) == 0
    model, _ = load_model(tmp_path / "trained")
    manifest = json.loads((tmp_path / "trained" / "context_extension.json").read_text())
    assert describe(model)["options"] == {"beta_fast": 16.0}
    assert manifest["tokens_trained"] == 192  # 200, rounded down to blocks of 64


def test_report_reads_several_files(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["eval", str(tiny_checkpoint), "--documents", str(text_file), "--context-lengths", "64", "128"]
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert main([*base, "--output", files[0], "--hide-progress"]) == 0
    assert main([*base, "--output", files[1], "--hide-progress", "--method", "ntk", "--factor", "2"]) == 0
    capsys.readouterr()
    assert main(["report", *files, "--output-dir", str(tmp_path / "report")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.suffix for path in written] == [".html", ".md", ".png", ".svg"]
    table = written[1].read_text()
    assert "| unpatched | zero-shot |" in table
    assert "| ntk x2 | zero-shot |" in table


def test_methods_lists_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name}" in f"\n{shown}" for name in ("linear (or pi)", "ntk", "yarn", "llama3", "longrope", "abf"))


def test_mistakes_are_one_line_with_exit_code_2(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    patch = ("patch", tiny_checkpoint, out)
    measure = ("eval", tiny_checkpoint, "--documents", text_file, "--context-lengths", "64")
    assert "Did you mean 'yarn'" in refused(capsys, *patch, "--method", "yran", "--factor", 4)
    assert "Did you mean 'yarn'" in refused(capsys, *measure, "--method", "yran", "--factor", 4)
    assert "factor must be >= 1, got 0.25" in refused(capsys, *patch, "--factor", 0.25)
    assert "takes no option 'beta_fast'" in refused(
        capsys, *patch, "--method", "linear", "--factor", 4, "--option", "beta_fast=1"
    )
    assert "name=value" in refused(capsys, *patch, "--factor", 4, "--option", "beta_fast")
    assert "the model's own" in refused(capsys, "patch", tiny_checkpoint, tiny_checkpoint, "--factor", 4)
    assert "invalid float value: 'four'" in refused(capsys, *patch, "--factor", "four")
    assert "no file or folder" in refused(capsys, "patch", tmp_path / "nowhere", out, "--factor", 4)
    assert "need a --method" in refused(capsys, *measure, "--factor", 4)
    assert "'trunc'" in refused(capsys, *measure, "--protocol", "trunc")
    assert "nothing.txt" in refused(capsys, *measure[:3], tmp_path / "nothing.txt", *measure[4:])
    assert "no file" in refused(capsys, "report", tmp_path / "none.jsonl")
    assert "arguments are required: MODEL, OUTPUT" in refused(capsys, "patch")
    assert not out.exists()


def test_a_bug_is_not_hidden_and_traceback_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        main(["--traceback", "report", str(tmp_path / "none.jsonl")])

    def broken(argv: Sequence[str]) -> None:
        """Call something wrongly."""
        parse_options(wrong_name=1)  # type: ignore[call-arg]

    monkeypatch.setitem(COMMANDS, "methods", broken)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        main(["methods"])


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_works_and_has_no_empty_defaults(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "default: None" not in shown
    assert not [word for word in shown.split() if word.startswith("--") and "_" in word]


def test_version_is_the_packages() -> None:
    run = [sys.executable, "-m", "hf_posenc.cli", "--version"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.startswith("hf-posenc 0.1.0")


def test_options_are_json_or_words() -> None:
    given = ["beta-fast=16", "ramp=paper", "truncate=False", "long_factor=[1, 2.5]", "mscale=1e-1"]
    assert parse_options(given) == {
        "beta_fast": 16,
        "ramp": "paper",
        "truncate": False,
        "long_factor": [1, 2.5],
        "mscale": 0.1,
    }
    with pytest.raises(ValueError, match="twice"):
        parse_options(["a=1", "a=2"])


def test_protocols_are_those_of_the_library() -> None:
    assert PROTOCOLS == KNOWN_PROTOCOLS
