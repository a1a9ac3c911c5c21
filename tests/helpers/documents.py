"""The Markdown files that a reader sees: their fenced blocks, and how a test runs these on the tiny model.

The blocks of README.md and of the pages of docs/ run in their order, in one folder and one Python namespace for a page,
as a reader would type them. Of examples/README.md and CONTRIBUTING.md, only the flags of commands are checked;
test_example_programs.py runs the examples. What a page does otherwise in a test is written in it:

- ``<!-- not run: needs a GPU -->`` before a block: it is not run; the flags of its commands are checked all the same.
  A file that the reason names has to exist. No reader sees the reason: what a reader should know, such as how long the
  command takes, is in the block as a comment, or in the text.
- ```` ```toml title="run.toml" ````: a block with the name of a file as its title is a file that the reader has. So is
  ```` ```python title="my_rope.py" ````, which is not run where it stands.
- ``<!-- test: 32k => 512 -->``: in tests, the text to the right replaces the text to the left, in the blocks of this
  page.

``# -> TEXT`` after a line of Python is what it prints. A block of the language ``text`` is what the block before it
prints, or some adjacent lines of that:

- ``<!-- exits with 1 -->`` before a block of commands: they say by their exit code that something is wrong.
- ``<!-- numbers differ between machines -->`` before a block of text: its numbers are not compared.
- ``<!-- not run: ... -->`` before a block of text: it is not compared.

A page in which something is replaced by SMOLLM2 has a model of this name in its folder, of the real shape, with random
weights.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from folders import ROOT
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.cli.main import main

PAGES = ROOT / "docs" / "pages"
TINY = str(tiny_model_path())
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
LANGUAGES = ("python", "sh", "toml", "yaml", "json", "ini", "text")
SMOLLM2_CONFIG = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
)
# Commands that are not run where they stand, on any page.
RUN_ELSEWHERE = {
    "./scripts/demo": "takes minutes; test_docs.py runs it among the slow tests",
    "./scripts/test": "would run this test again, and all others",
    "./scripts/docs": "the checks of every change run it",
}
# On every page that does not say otherwise.
SUBSTITUTIONS = {
    SMOLLM2: TINY,
    ".cache/smollm2-135m-instruct": TINY,
    "MODEL": TINY,
    "--dtype bfloat16": "--dtype float32",
    "--token-budget 1M": "--token-budget 1k",
}


_HOW = r"not run: (?P<not_run>[^\n]+)|(?P<fails>exits with 1)|(?P<rough>numbers differ between machines)"
_BLOCK = re.compile(
    rf"(^ *<!-- ({_HOW}) -->\n\n)?"
    r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<head>[^\n]*)\n(?P<code>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, title and code, the line of its page where it begins, and how it is run."""

    language: str
    title: str
    code: str
    line: int
    not_run: str = ""
    exit_code: int = 0
    numbers_differ: bool = False

    @property
    def is_file(self) -> bool:
        return bool(self.title) and self.language not in ("sh", "text")

    @property
    def is_run(self) -> bool:
        return self.language in ("python", "sh") and not self.not_run and not self.is_file

    @property
    def is_output(self) -> bool:
        return self.language == "text" and not self.not_run


@dataclass(frozen=True)
class Page:
    """A Markdown file of the repository."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def blocks(self) -> list[Block]:
        return blocks_of(self.text)

    @property
    def substitutions(self) -> dict[str, str]:
        """Of this page alone."""
        return dict(re.findall(r"<!-- test: (.+?) => (.*?) -->", self.text))

    @property
    def is_run(self) -> bool:
        return self.path == ROOT / "README.md" or self.path.is_relative_to(PAGES)

    def substituted(self, code: str) -> str:
        own = self.substitutions  # they come first, and win
        for said, instead in {**own, **SUBSTITUTIONS, **own}.items():
            code = code.replace(said, instead)
        return code

    def commands(self) -> list[str]:
        """Return all commands of ``hf-posenc`` and of our scripts: in blocks, run or not, and in sentences."""
        shell = [command for block in self.blocks if block.language == "sh" for command in commands_of(block.code)]
        return [command for command in [*shell, *commands_in_sentences(self.text)] if is_ours(command)]


def all_pages() -> list[Page]:
    others = [Page(ROOT / name) for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")]
    return [*others, *map(Page, sorted(PAGES.rglob("*.md")))]


def missing_files(reason: str) -> list[str]:
    """Return the files that a reason names, in backquotes or as a test, and that the repository does not have."""
    quoted = re.findall(r"`([^` ]*[./][^` ]*)`", reason)
    named = dict.fromkeys([*quoted, *re.findall(r"\b[\w/]*test_\w+\.py\b", reason)])
    return [name for name in named if not (ROOT / name).exists() and not any((ROOT / "tests").rglob(name))]


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text, also those inside lists."""
    blocks = []
    for match in _BLOCK.finditer(text):
        language, _, rest = match["head"].strip().partition(" ")
        title = re.search(r'title="([^"]*)"', rest)
        line = text.count("\n", 0, match.start("indent")) + 1
        code = textwrap.dedent(match["code"])
        how = (match["not_run"] or "", int(match["fails"] is not None), match["rough"] is not None)
        blocks.append(Block(language, title[1] if title else "", code, line, *how))
    return blocks


def commands_of(code: str) -> list[str]:
    """Return the commands of a shell block, without prompts, each on one line; comments stay."""
    lines = (line.removeprefix("$ ") for line in code.replace("\\\n", " ").splitlines())
    return [line for line in lines if words_of(line)]


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def commands_in_sentences(text: str) -> list[str]:
    """Return the text between backquotes, outside of blocks, that begins as a command of this project does."""
    outside = re.sub(r"^ *(```+)[^\n]*\n.*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside))
    return [span for span in dict.fromkeys(spans) if is_ours(span)]


def is_ours(command: str) -> bool:
    return re.match(r"(hf-posenc|(python )?(\./)?(scripts|examples)/\S+)( |$)", command) is not None


def set_out(folder: Path, page: Page) -> None:
    """Give a reader the texts and the model that a page names."""
    (folder / "book.txt").write_text(load_novel("persuasion")[:6000], encoding="utf-8")
    (folder / "books").mkdir()
    for name in ("emma", "sensesensibility"):
        (folder / "books" / f"{name}.txt").write_text(load_novel(name)[:6000], encoding="utf-8")
    if SMOLLM2 in page.substitutions.values():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(SMOLLM2_CONFIG, dtype=torch.bfloat16).save_pretrained(folder / SMOLLM2)
        AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / SMOLLM2)


def run_page(page: Page, folder: Path) -> dict[str, Any]:
    """Run the blocks of a page in their order, in the working folder ``folder``; return the namespace of its Python.

    Raises:
        AssertionError: A block prints something else than the page says, a command fails, or does not write what it
            names after ``--output`` or ``--output-dir``.
    """
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for block in page.blocks:
        if block.is_file:
            (folder / block.title).write_text(page.substituted(block.code), encoding="utf-8")
        elif block.is_run and block.language == "python":
            printed = run_python(page, block, namespace)
        elif block.is_run:
            commands = [one for one in commands_of(block.code) if shlex.join(words_of(one)) not in RUN_ELSEWHERE]
            printed = "".join(run_command(page, block, command, folder) for command in commands)
        elif block.is_output:
            compare_output(page, block, printed)
    return namespace


def run_python(page: Page, block: Block, namespace: dict[str, Any]) -> str:
    code = compile("\n" * block.line + page.substituted(block.code), str(page.path), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)
    said = [line.partition("# -> ")[2] for line in block.code.splitlines() if "# -> " in line]
    assert not said or printed.getvalue().splitlines() == said, f"{page.name}, line {block.line}"
    return printed.getvalue()


def compare_output(page: Page, block: Block, printed: str) -> None:
    said = page.substituted(block.code)
    if block.numbers_differ:
        said, printed = (re.sub(r"[+-]?\d[\d.,]*", "N", text) for text in (said, printed))
    lines, found = said.splitlines(), printed.splitlines()
    adjacent = [found[start : start + len(lines)] for start in range(len(found))]
    assert lines in adjacent, f"{page.name}, line {block.line}: the block before it prints\n{printed}\nand not\n{said}"


def run_command(page: Page, block: Block, command: str, folder: Path) -> str:
    where, substituted = f"{page.name}, line {block.line}: {command}", page.substituted(command)
    words = words_of(substituted)
    if words[0] == "hf-posenc" and not set(words) & {"|", ">", "&&", ";"}:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exit_code = main(words[1:])
        printed = output.getvalue()
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path}
        done = subprocess.run(["bash", "-c", substituted], cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
        exit_code, printed = done.returncode, done.stdout
    assert exit_code == block.exit_code, where
    for flag, name in pairwise(words):
        if flag in ("--output", "--output-dir", ">"):
            written = folder / name
            assert any(written.iterdir()) if written.is_dir() else written.stat().st_size > 0, where
    return printed
