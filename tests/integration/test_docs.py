"""Every Python and shell block of README.md and docs/ runs on the tiny model, or a comment in the page says why not.

Flags of all commands are checked, also of those inside sentences and of blocks that are not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, HfArgumentParser

from documents import (
    LANGUAGES,
    RUN_ELSEWHERE,
    Block,
    Page,
    all_pages,
    blocks_of,
    commands_in_sentences,
    commands_of,
    missing_files,
    run_page,
    set_out,
    words_of,
)
from folders import ROOT
from hf_posenc import describe
from hf_posenc.assets import tiny_model_path
from hf_posenc.cli.demo import run_demo
from hf_posenc.cli.main import COMMANDS, main

PAGES = all_pages()
# Their blocks take from 4 to 30 seconds, so they run with --slow; those of all other pages run in the fast suite.
SLOW = (
    "how-to/add-a-method.md",
    "how-to/evaluate-perplexity.md",
    "how-to/fine-tune.md",
    "how-to/fit-a-method.md",
    "how-to/measure-retrieval.md",
    "results/zero-shot.md",
    "start/choosing-a-method.md",
    "understand/positional-encodings.md",
    "understand/staged-and-distance-methods.md",
)
# Names of commands inside sentences, without the arguments that they need.
NAMES = {f"hf-posenc {name}" for name in COMMANDS}

with_run_blocks = [page for page in PAGES if page.is_run and any(block.is_run for block in page.blocks)]
parameters = [
    pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name.endswith(SLOW) else [])
    for page in with_run_blocks
]


@pytest.mark.parametrize("page", parameters)
def test_the_blocks_of_a_page_run(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_out(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path)


@pytest.mark.slow
def test_the_demo_runs_on_one_document_and_a_small_token_budget(tmp_path: Path) -> None:
    run_demo(tmp_path / "demo", token_budget=8192, num_documents=1)
    assert describe(AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "yarn-x4"))["factor"] == 4
    assert "yarn x4" in (tmp_path / "demo" / "report" / "report.md").read_text()


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert len(text.split()) <= 1500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_says_of_its_blocks(page: Page) -> None:
    assert {block.language for block in page.blocks} <= set(LANGUAGES)
    assert len(page.blocks) == len(re.findall(r"^ *(?:```|~~~)", page.text, re.MULTILINE)) / 2
    for block in page.blocks:
        assert not block.not_run or len(block.not_run) > 5, block  # a reason
        assert missing_files(block.not_run) == []
    said = re.findall(r"^ *<!-- (?:not run: |exits with 1 |numbers differ between machines )", page.text, re.MULTILINE)
    assert len(said) == sum(bool(block.not_run or block.exit_code or block.numbers_differ) for block in page.blocks)
    if page.is_run:
        outputs = [(before, block) for before, block in pairwise(page.blocks) if block.is_output]
        assert [block for before, block in outputs if not before.is_run] == []
        assert page.blocks == [] or not page.blocks[0].is_output
    code = "\n".join(block.code for block in page.blocks)
    assert [
        substitution
        for substitution in page.substitutions
        if substitution not in " ".join(code.replace("\\\n", " ").split())
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_of_all_commands_are_known(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_out(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    for block in page.blocks:
        if block.title and block.language == "toml":
            Path(block.title).write_text(page.substituted(block.code), encoding="utf-8")
    for command in page.commands():
        if " ".join(words_of(command)) not in {*NAMES, "hf-posenc --help"}:
            parse_only(page.substituted(command))


def test_blocks_and_commands_are_found() -> None:
    text = "a `hf-posenc\nmethods` b\n```sh\n$ a 'b c' \\\n  d  # e\n\nf > g\n```\n- list\n  ~~~\n  x\n   y\n  ~~~\n"
    first, second = blocks_of(text)
    assert (first.language, first.line) == ("sh", 3)
    assert [words_of(command) for command in commands_of(first.code)] == [["a", "b c", "d"], ["f", ">", "g"]]
    assert second == Block("", "", "x\n y\n", 10)
    assert commands_in_sentences(text) == ["hf-posenc methods"]
    (block,) = blocks_of("a\n\n<!-- not run: needs a GPU -->\n\n```sh\nls\n```\n")
    assert block == Block("sh", "", "ls\n", 5, "needs a GPU")
    assert not block.is_run
    assert blocks_of("```sh\nls\n```\n")[0].is_run
    (block,) = blocks_of("<!-- exits with 1 -->\n\n```sh\nls\n```\n")
    assert (block.exit_code, block.is_run, block.numbers_differ) == (1, True, False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_reader_sees_a_note_on_tests(page: Page) -> None:
    """Titles of blocks are file names; notes for the tests are comments, which neither GitHub nor the site shows."""
    shown = re.sub(r"<!--.*?-->", "", page.text, flags=re.DOTALL)
    assert [block.title for block in page.blocks if not re.fullmatch(r"[\w.-]*", block.title)] == []
    assert page.name == "CONTRIBUTING.md" or not re.search(r"by our tests|the tests install", shown)


def test_a_reason_names_files_that_exist() -> None:
    assert [reason for reason in RUN_ELSEWHERE.values() if missing_files(reason)] == []
    assert (
        missing_files("test_docs.py and `scripts/test` and `tests/unit/test_errors.py`; `hf-posenc eval` tests it")
        == []
    )
    assert missing_files("`scripts/no-such`, see test_no_such.py") == ["scripts/no-such", "test_no_such.py"]


def test_a_wrong_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Page, "name", "wrong.md")
    page = Page(tmp_path / "wrong.md")
    for text in (
        "```python\nprint(1)  # -> 2\n```\n",
        "```sh\nfalse\n```\n",
        "<!-- exits with 1 -->\n\n```sh\ntrue\n```\n",
        "```sh\nhf-posenc list methods --no\n```\n",
        "```sh\nprintf 'a\\nb 1\\n'\n```\n```text\na\nb 2\n```\n",
        "```python\nprint('a\\nb')\n```\n```text\nb\na\n```\n",
        "```sh\nprintf 'a\\nb 1\\n'\n```\n<!-- numbers differ between machines -->\n\n```text\nc 1\n```\n",
    ):
        page.path.write_text(text, encoding="utf-8")
        with pytest.raises((AssertionError, SystemExit)):
            run_page(page, tmp_path)
    for text in (
        "<!-- exits with 1 -->\n\n```sh\nfalse\n```\n",
        "```sh\nprintf 'a\\nb 1\\nc\\n'\n```\n```text\na\nb 1\n```\n",
        "```sh\nprintf 'b 1.5\\n'\n```\n<!-- numbers differ between machines -->\n\n```text\nb -2\n```\n",
    ):
        page.path.write_text(text, encoding="utf-8")
        run_page(page, tmp_path)


def test_the_record_that_is_shown_is_what_its_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(ROOT / "docs" / "pages" / "reference" / "records.md")
    [block] = [block for block in page.blocks if block.language == "json"]
    shown = json.loads(block.code.replace(", ...", ""))
    set_out(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    Path("MODEL").symlink_to(tiny_model_path())
    assert main(shlex.split(shown["command"])[1:]) == 0
    written = json.loads(Path("r.jsonl").read_text(encoding="utf-8"))
    assert list(shown) == list(written)
    assert shown["versions"].keys() == written["versions"].keys()
    for name in set(shown) - {"seconds", "peak_memory_bytes", "run_key", "versions"}:
        value = written[name]
        if isinstance(value, list):
            assert shown[name] == pytest.approx(value[: len(shown[name])], rel=1e-3), name
        else:
            assert shown[name] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), name


def test_wrong_flags_are_found() -> None:
    with pytest.raises(ValueError, match="--no-such-flag"):
        parse_only("hf-posenc eval MODEL --context-lengths 4k --no-such-flag 1")
    with pytest.raises(SystemExit):
        parse_only("python scripts/study_budget.py --no-such-flag")
    with pytest.raises(SystemExit):
        parse_only("python examples/train_with_trl.py --no-such-flag")
    with pytest.raises(AssertionError):
        parse_only("python examples/encodings_by_hand.py --no-such-flag")


class _ParsedError(BaseException):
    """Raised instead of what a command does with its flags; no command catches it."""


def parse_only(command: str) -> None:
    """Parse the flags of a command of this project, and run nothing.

    Raises:
        AssertionError, SystemExit, ValueError: There is no such command or script, or it does not know these flags.
    """
    program, *words = shlex.split(command.partition("|")[0].partition(" > ")[0], comments=True)
    with pytest.MonkeyPatch.context() as patch:
        if program == "hf-posenc":
            parse = stopping(HfArgumentParser.parse_args_into_dataclasses)
            patch.setattr(HfArgumentParser, "parse_args_into_dataclasses", parse)
            patch.setattr(sys, "argv", [program, *words])
            with pytest.raises(_ParsedError):
                COMMANDS[words[0]](words[1:])
        elif program == "python" and is_notebook(ROOT / words[0]):
            assert not words[1:]  # it has no flags
        elif program == "python" and len(words) > 1:
            patch.syspath_prepend(ROOT / "scripts")  # as python does; runpy does not
            patch.setattr(sys, "argv", words)
            patch.setattr(argparse.ArgumentParser, "parse_args", stopping(argparse.ArgumentParser.parse_args))
            with pytest.raises(_ParsedError):
                runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        else:  # a script of the shell, whose flags no parser knows
            path = words[0] if program == "python" else program
            assert os.access(ROOT / path, os.R_OK if path.endswith(".py") else os.X_OK)


def is_notebook(path: Path) -> bool:
    return path.suffix == ".py" and path.read_text(encoding="utf-8").startswith("# %%")


def stopping(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_and_stop(*args: Any, **kwargs: Any) -> None:
        parse(*args, **kwargs)
        raise _ParsedError

    return parse_and_stop
