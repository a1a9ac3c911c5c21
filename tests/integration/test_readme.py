"""Every Python and shell block of README.md runs, on the tiny model of the package, or is listed here with a reason.

Commands inside sentences are not run, but their flags are parsed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser

from folders import ROOT
from hf_posenc import describe, load_extended
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.checkpoint.standard_saving import plain_loading
from hf_posenc.cli.demo import run_demo
from hf_posenc.cli.main import COMMANDS, main

README = (ROOT / "README.md").read_text(encoding="utf-8")
TINY = str(tiny_model_path())

# What README.md says: what is run instead, so that a block takes seconds.
SUBSTITUTIONS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": TINY,
    ".cache/smollm2-135m-instruct": TINY,
    "MODEL": TINY,
    "--context-lengths 512 2k 8k 16k": "--context-lengths 64 288",
    "context_lengths=[512, 2048, 8192]": "context_lengths=[64, 128, 256]",
    "--token-budget 1M": "--token-budget 1k",
    "--dtype bfloat16": "--dtype float32",
}
# Commands of the shell blocks that are not run. What a reason names in backquotes has to be there.
NOT_RUN = {
    "./scripts/demo": "takes minutes; here, `tests/integration/test_readme.py` runs it among the slow tests",
    "./scripts/test": "would run this test again, and all others",
    "scripts/fetch_smollm2": "downloads 93 MB; `tests/integration/test_cli_scripts.py` runs all of it but the download",
    "hf-posenc gallery --output-dir gallery": "half a minute; `tests/unit/explain/test_gallery.py` draws all of it",
    "python scripts/from_sinusoids_to_yarn.py": "`tests/integration/test_walkthrough.py` runs it",
}
# Names of commands inside sentences, without the arguments that they need.
NAMES = {"hf-posenc finetune", "hf-posenc export --as yarn"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its code, and the line of README.md where it begins."""

    language: str
    code: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text, also those inside lists."""
    found = re.finditer(r"^( *)(```+|~~~+)([^\n]*)\n(.*?)^\1\2 *$", text, re.MULTILINE | re.DOTALL)
    return [Block(one[3].strip(), textwrap.dedent(one[4]), text.count("\n", 0, one.start()) + 1) for one in found]


def commands_of(code: str) -> list[str]:
    """Return the commands of a shell block, without prompts, each on one line; comments stay."""
    lines = (line.removeprefix("$ ") for line in code.replace("\\\n", " ").splitlines())
    return [line for line in lines if words_of(line)]


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def is_run(command: str) -> bool:
    return shlex.join(words_of(command)) not in NOT_RUN


def commands_in_sentences(text: str) -> list[str]:
    """Return the text between backquotes, outside of blocks, and begins as a command of this project does."""
    outside = re.sub(r"^ *(```+)[^\n]*\n.*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside))
    return [span for span in dict.fromkeys(spans) if re.match(r"(hf-posenc|python|(\./)?scripts/\S+)( |$)", span)]


BLOCKS = blocks_of(README)
SHELL_BLOCKS = [block for block in BLOCKS if block.language == "sh"]
PYTHON_BLOCKS = [block for block in BLOCKS if block.language == "python"]
SENTENCES = [command for command in commands_in_sentences(README) if command not in NAMES]


def substituted(code: str) -> str:
    for said, instead in SUBSTITUTIONS.items():
        code = code.replace(said, instead)
    return code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader who has the texts that README.md names; ``python`` is this one."""
    (tmp_path / "book.txt").write_text(load_novel("persuasion")[:6000])
    (tmp_path / "books").mkdir()
    for name in ("emma", "sensesensibility"):
        (tmp_path / "books" / f"{name}.txt").write_text(load_novel(name)[:6000])
    (tmp_path / "run.toml").write_text('method = "yarn"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


# ---- the tables -------------------------------------------------------------------------------------------------


def test_every_block_is_in_a_language_that_is_run() -> None:
    assert {block.language for block in BLOCKS} == {"sh", "python"}
    fences = re.findall(r"^ *(?:```|~~~)", README, re.MULTILINE)
    assert len(BLOCKS) == len(fences) / 2 >= 9


def test_every_entry_of_the_tables_is_in_the_readme() -> None:
    commands = [command for block in SHELL_BLOCKS for command in commands_of(block.code)]
    assert set(NOT_RUN) == {shlex.join(words_of(command)) for command in commands if not is_run(command)}
    code = "\n".join([*filter(is_run, commands), *(block.code for block in PYTHON_BLOCKS)])
    assert [said for said in SUBSTITUTIONS if said not in code] == []
    assert set(commands_in_sentences(README)) >= NAMES


@pytest.mark.parametrize("command", NOT_RUN)
def test_what_is_not_run_exists_and_is_covered_as_its_reason_says(command: str) -> None:
    for path in re.findall(r"`([^`]+)`", NOT_RUN[command]):
        assert (ROOT / path).is_file(), path
    parse_only(command)


def test_blocks_and_commands_are_found() -> None:
    text = "a `hf-posenc\nmethods` b\n```sh\n$ a 'b c' \\\n  d  # e\n\nf > g\n```\n- list\n  ~~~\n  x\n   y\n  ~~~\n"
    first, second = blocks_of(text)
    assert (first.language, first.line) == ("sh", 3)
    assert [words_of(command) for command in commands_of(first.code)] == [["a", "b c", "d"], ["f", ">", "g"]]
    assert second == Block("", "x\n y\n", 10)
    assert commands_in_sentences(text) == ["hf-posenc methods"]


# ---- Python -----------------------------------------------------------------------------------------------------


def test_python_blocks_run_one_after_the_other(folder: Path) -> None:
    namespace: dict[str, Any] = {}
    for block in PYTHON_BLOCKS:
        code = compile("\n" * block.line + substituted(block.code), str(ROOT / "README.md"), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        said = [line.partition("# -> ")[2] for line in block.code.splitlines() if "# -> " in line]
        assert printed.getvalue().splitlines() == said, f"README.md, line {block.line}"

    assert describe(AutoModelForCausalLM.from_pretrained("smollm2-16k"))["method"] == "yarn"
    assert describe(load_extended("smollm2-staged"))["method"] == "dynamic_yarn"
    with plain_loading():  # as without hf_posenc
        assert AutoModelForCausalLM.from_pretrained("smollm2-staged").config.max_position_embeddings == 256
    assert describe(load_extended("alibi-model"))["method"] == "alibi"
    with pytest.raises((ValueError, KeyError), match="hf_posenc_alibi"):
        AutoModelForCausalLM.from_pretrained("alibi-model")
    assert [record.method for record in namespace["records"]] == ["dynamic_yarn"] * 3
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(TINY)(ids).logits
        moved = namespace["pretrained"](ids).logits
    assert (moved - expected).abs().max() < 0.02 * expected.abs().max()  # weights in bfloat16


# ---- shell ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=lambda block: f"line-{block.line}")
def test_shell_block_runs_and_writes_what_it_names(block: Block, folder: Path) -> None:
    for command in commands_of(block.code):
        if not is_run(command):
            continue
        words = words_of(substituted(command))
        if words[0] == "hf-posenc":
            assert main(words[1:]) == 0, command
        else:
            subprocess.run(["bash", "-c", substituted(command)], check=True)
        for flag, path in pairwise(words):
            if flag in ("--output", "--output-dir", ">"):
                written = folder / path
                assert any(written.iterdir()) if written.is_dir() else written.stat().st_size > 0, command


@pytest.mark.slow
def test_the_demo_runs_on_one_document_and_a_small_token_budget(folder: Path) -> None:
    run_demo(folder / "demo", token_budget=8192, num_documents=1)
    assert describe(AutoModelForCausalLM.from_pretrained(folder / "demo" / "yarn-x4"))["factor"] == 4
    assert "yarn x4" in (folder / "demo" / "report" / "report.md").read_text()


# ---- commands inside sentences ----------------------------------------------------------------------------------


class _ParsedError(BaseException):
    """Raised instead of what a command does with its flags; no command catches it."""


def parse_only(command: str) -> None:
    """Parse the flags of a command of this project, and run nothing.

    Raises:
        AssertionError, SystemExit, ValueError: There is no such command or script, or it does not know these flags.
    """
    program, *words = shlex.split(command)
    with pytest.MonkeyPatch.context() as patch:
        if program == "hf-posenc":
            parse = stopping(HfArgumentParser.parse_args_into_dataclasses)
            patch.setattr(HfArgumentParser, "parse_args_into_dataclasses", parse)
            patch.setattr(sys, "argv", [program, *words])
            with pytest.raises(_ParsedError):
                COMMANDS[words[0]](words[1:])
        elif program == "python" and len(words) > 1:
            patch.syspath_prepend(ROOT / "scripts")  # as python does; runpy does not
            patch.setattr(sys, "argv", words)
            patch.setattr(argparse.ArgumentParser, "parse_args", stopping(argparse.ArgumentParser.parse_args))
            with pytest.raises(_ParsedError):
                runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        else:  # a script without flags
            (path,) = words if program == "python" else [program]
            assert os.access(ROOT / path, os.R_OK if path.endswith(".py") else os.X_OK)


def stopping(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_and_stop(*args: Any, **kwargs: Any) -> None:
        parse(*args, **kwargs)
        raise _ParsedError

    return parse_and_stop


@pytest.mark.parametrize("command", SENTENCES)
@pytest.mark.usefixtures("folder")
def test_flags_of_commands_inside_sentences_are_known(command: str) -> None:
    parse_only(command)


def test_wrong_flags_are_found() -> None:
    with pytest.raises(ValueError, match="--no-such-flag"):
        parse_only("hf-posenc eval MODEL --context-lengths 4k --no-such-flag 1")
    with pytest.raises(SystemExit):
        parse_only("python scripts/study_budget.py --no-such-flag")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_names_of_commands_inside_sentences_are_commands(name: str) -> None:
    assert name.split()[1] in COMMANDS
