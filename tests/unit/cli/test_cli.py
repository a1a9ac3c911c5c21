"""The commands as a user types them: what they do, and what they say when something is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc import save_extended
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.cli import shared_arguments
from hf_posenc.cli.main import COMMANDS, main
from hf_posenc.cli.shared_arguments import parse_options
from hf_posenc.evaluation import perplexity, read_records
from hf_posenc.families.family_data import attention_capabilities, capabilities
from hf_posenc.patching.api import describe, patch_model, patched
from hf_posenc.patching.presets import presets


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(c) for c in torch.randint(32, 127, (600,), generator=generator).tolist()))
    return path


def facts(folder: Path) -> tuple[str, float, int]:
    manifest = read_manifest(folder) or {}
    return manifest["method"], manifest["factor"], manifest["tokens_trained"]


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


def test_tokens_trained_are_counted_on(tiny_checkpoint: Path, text_file: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(tiny_checkpoint)
    source = save_extended(patch_model(model, "yarn", 2), tmp_path / "trained", tokenizer, tokens_trained=4096)
    replaced, further = tmp_path / "replaced", tmp_path / "further"
    argv = ["patch", str(source), str(replaced), "--method", "ntk", "--factor", "4", "--on-scaled", "replace"]
    assert main(argv) == 0
    assert facts(replaced) == ("ntk", 4.0, 4096)
    argv = ["finetune", str(source), "--documents", str(text_file), "--output-dir", str(further)]
    assert main([*argv, "--token-budget", "128", "--seq-len", "64", "--eval-lengths", "32"]) == 0
    assert facts(further) == ("yarn", 2.0, 4096 + 128)


def test_finetune_trains_and_saves(tiny_checkpoint: Path, text_file: Path, tmp_path: Path) -> None:
    argv = ["finetune", str(tiny_checkpoint), "--documents", str(text_file), "--output-dir", str(tmp_path / "trained")]
    argv += ["--method", "yarn", "--factor", "2", "--option", "beta_fast=16", "--token-budget", "0.2k"]
    assert main([*argv, "--seq-len", "64", "--eval-lengths", "32", "64"]) == 0
    model, _ = load_model(tmp_path / "trained")
    manifest = json.loads((tmp_path / "trained" / "context_extension.json").read_text())
    assert describe(model)["options"] == {"beta_fast": 16.0}
    assert manifest["tokens_trained"] == 192  # 200, rounded down to blocks of 64


def test_finetune_with_skipped_positions_on_a_streamed_dataset(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts = [f"Letter {number} came to her sister on a morning in May. " * 2 for number in range(30)]
    datasets.Dataset.from_dict({"body": texts}).to_parquet(tmp_path / "train.parquet")
    argv = ["finetune", str(tiny_checkpoint), "--documents", str(tmp_path / "train.parquet"), "--text-field", "body"]
    argv += ["--streaming", "--position-schedule", "pose", "--factor", "4", "--token-budget", "640"]
    argv += ["--output-dir", str(tmp_path / "trained"), "--eval-lengths", "32", "64"]
    with caplog.at_level(logging.INFO, "hf_posenc"):
        assert main([*argv, "--short-share", "0.2"]) == 0
    assert facts(tmp_path / "trained") == ("yarn", 4.0, 640)  # in blocks of the original 64
    assert "read 8 documents, 7" in caplog.text
    assert "10 blocks, 2 of them as windows of 64 tokens" in caplog.text


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
    drawings = ("perplexity_truncated", "positions_truncated", "frequencies")
    names = [f"{name}{suffix}" for name in drawings for suffix in (".png", ".svg")]
    assert [path.name for path in written] == ["report.html", "report.md", *names]
    table = written[1].read_text()
    assert "| unpatched |  |" in table
    assert "| ntk x2 | zero-shot |" in table


def test_methods_lists_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "methods"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name}" in f"\n{shown}" for name in ("linear (or pi)", "ntk", "yarn", "llama3", "longrope", "abf"))


def test_presets_are_listed_and_applied(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "presets"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name}\n" in f"\n{shown}" for name in presets())
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    (tiny_checkpoint / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    assert main(["patch", str(tiny_checkpoint), str(tmp_path / "out"), "--preset", "smollm2-yarn-2x"]) == 0
    assert "yarn x2: 8192 -> 16384 tokens" in capsys.readouterr().out


def test_methods_families_lists_every_type_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "families"]) == 0
    every_method, rest = capsys.readouterr().out.split("By all but the methods that run in attention")
    rotary_only, refused = rest.split("Refused:")
    attention = attention_capabilities()
    for part, expected in (
        (every_method, [name for name, reason in attention.items() if reason is None]),
        (rotary_only, [name for name, reason in attention.items() if reason is not None]),
        (refused, [name for name, reason in capabilities().items() if reason is not None]),
    ):
        names = [name.strip() for line in part.splitlines() for name in line.split(",")]
        assert sorted(name for name in names if name in capabilities()) == expected
        assert f"{len(expected)}" in part.splitlines()[0 if part is not every_method else 2]
    assert "multi-head latent attention keeps the part" in rotary_only
    assert "Static rules" not in rotary_only
    assert "attention layer" in refused.replace("\n          ", " ")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_works_and_has_no_empty_defaults(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "default: None" not in shown
    assert not [word for word in shown.split() if word.startswith("--") and "_" in word]


def shown_flags(text: str) -> set[str]:
    """Return the flags that a help lists: one or more at the beginning of an indented line."""
    lines = [line.split("  ")[1] for line in text.splitlines() if line.startswith("  -")]
    return {word for line in lines for word in line.replace(",", " ").split() if word.startswith("--")}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_help_all_lists_every_flag(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    parsers: list[tuple[Any, Any]] = []
    group = shared_arguments._group_flags

    def note_and_group(parser: Any, kinds: Any) -> None:
        parsers.append((parser, kinds))
        group(parser, kinds)

    monkeypatch.setattr(shared_arguments, "_group_flags", note_and_group)
    printed = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([command, flag])
        printed[flag] = capsys.readouterr().out
    assert printed["--help"].count("\n") <= 50
    assert "lists every flag" in printed["--help"].splitlines()[-1]
    common, every = shown_flags(printed["--help"]), shown_flags(printed["--help-all"])
    assert {"--help", "--help-all"} <= common < every
    for parser, kinds in parsers:
        hidden = {name for kind in kinds for name in getattr(kind, "HELP_HIDDEN", ())}
        suppressed = {
            one.name
            for kind in kinds
            for one in dataclasses.fields(kind)
            if one.metadata.get("help") == argparse.SUPPRESS
        }
        flags = [action for action in parser._actions if action.dest not in hidden | suppressed]
        assert every >= {flag for one in flags for flag in one.option_strings if flag.startswith("--")}
        for kind in kinds:
            documented = {one.name for one in dataclasses.fields(kind) if one.metadata.get("help")}
            assert documented >= set(getattr(kind, "HELP_COMMON", ()))


def test_version_is_the_packages() -> None:
    run = [sys.executable, "-m", "hf_posenc", "--version"]
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


HELP = """
import contextlib, io, sys
from hf_posenc.cli.main import COMMANDS, main
for command in sorted(COMMANDS, key="finetune".__eq__):  # last: what it imports says nothing of the others
    if command == "finetune":
        import transformers.training_args
        brought = set(sys.modules)
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        main([command, "--help"])
    assert said.getvalue().startswith("usage: hf-posenc " + command), command
    late = {"peft", "bitsandbytes", "transformers.trainer", "transformers.modeling_utils", "torch._dynamo"}
    if command == "finetune":
        # The flags are the fields of TrainingArguments, whose module imports peft where it is installed, as of
        # Transformers 5.23 (transformers.trainer_utils), and peft imports the models. Trainer itself has to wait.
        late = {"transformers.trainer", "datasets", "accelerate.accelerator"} - brought
    assert not late & sys.modules.keys(), command
"""
LISTINGS = """
import contextlib, io, sys
from transformers import HfArgumentParser
from hf_posenc.cli.main import main
alone = set(sys.modules)  # Transformers 5.0 brings PyTorch with anything of it
for what in ("presets", "checkpoints", "recipes", "tasks", "families"):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["list", what]) == 0
    assert said.getvalue().count("\\n") > 10, what
    assert "torch" not in sys.modules.keys() - alone, what
"""


@pytest.mark.parametrize("program", [HELP, LISTINGS], ids=["help", "listings"])
def test_help_and_listings_do_not_wait_for_what_they_do_not_need(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "bitsandbytes" not in done.stderr
