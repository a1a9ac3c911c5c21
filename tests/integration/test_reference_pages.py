"""The reference pages name everything there is: methods, options, commands, flags, model types, names, fields."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

import hf_posenc
import reference_pages
from documents import PAGES, words_of
from folders import ROOT
from hf_posenc.cli.main import COMMANDS
from hf_posenc.evaluation.records import JsonRecord, Record, RetrievalRecord
from hf_posenc.explain.method_words import method_words
from hf_posenc.families.family_data import attention_capabilities, capabilities
from hf_posenc.methods.registry import methods
from hooks import picture

REFERENCE = ROOT / "docs" / "pages" / "reference"


def section(page: str, name: str) -> str:
    """Return the part of a page under the heading with an anchor."""
    return page.partition(f"{{ #{name} }}\n")[2].partition("{ #")[0]


def test_every_method_has_a_section_with_its_formula_and_options() -> None:
    page = reference_pages.methods_page()
    for name, cls in methods().items():
        assert f"[`{name}`](#{name})" in page
        found = section(page, name)
        formula = method_words(cls).formula
        assert formula
        assert formula in found
        assert all(f"| `{option}` |" in found for option in cls.option_fields()), name
        assert all(f"`{alias}`" in found for alias in cls.aliases)
        assert f'patch_model(model, "{name}"' in found


@pytest.mark.parametrize("name", methods())
def test_formulas_are_latex_that_the_site_can_show(name: str) -> None:
    words = method_words(methods()[name])
    assert words.symbols.count("$") % 2 == 0
    for formula in (words.formula, *re.findall(r"\$([^$]*)\$", words.symbols)):
        assert formula.count("{") == formula.count("}")
        assert "\\" not in re.sub(r"<[^>]*>", "", convert(formula)), formula  # a command it does not know


def test_every_command_has_a_section_with_all_flags_that_its_help_shows() -> None:
    page = reference_pages.command_line_page()
    for name, run in COMMANDS.items():
        found, parser = section(page, name), reference_pages.parser_of(run)
        assert parser.usage in found
        flags = {
            flag for action in parser._actions if action.help != argparse.SUPPRESS for flag in action.option_strings
        }
        missing = {flag for flag in flags - {"-h", "--help", "--traceback"} if not re.search(rf"`{flag}[ `]", found)}
        assert not missing, name
        check_examples(name, run, parser, found)


def check_examples(name: str, run: Callable[..., object], parser: argparse.ArgumentParser, found: str) -> None:
    """Check that a command has examples, and that they are of this command and of flags that it knows."""
    examples = re.search(r"```sh\n(.*?)```", found, re.DOTALL)
    assert examples is not None, name
    for line in examples[1].splitlines():
        program, command, *words = words_of(line)
        assert (program, COMMANDS[command]) == ("hf-posenc", run)
        used = {word for word in words if word.startswith("--")}
        theirs = {"--tasks", "--limit", "--metadata"} if name == "lm-eval" else set()
        assert used - theirs <= parser._option_string_actions.keys(), line


def test_the_commands_in_messages_have_the_flags_they_name() -> None:
    """Those that doctor, export, report and refusals print; ``...`` and names in capitals are for the reader."""
    checked = 0
    for file in Path(hf_posenc.__file__).parent.rglob("*.py"):
        strings = (one.value for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.Constant))
        for text in (string for string in strings if isinstance(string, str)):
            for name, words in re.findall(r"hf-posenc ([a-z-]+)((?: [^\s`(;]+)*)", text):
                if name not in COMMANDS or name == "lm-eval":  # whose flags are those of another program too
                    continue
                known = reference_pages.parser_of(COMMANDS[name])._option_string_actions
                flags = set(re.findall(r"(?<= )--[a-z0-9-]+", words))
                assert flags <= known.keys(), f"{file}: hf-posenc {name}{words}"
                checked += len(flags)
    assert checked > 30


def test_every_model_type_has_a_row_with_what_extends_it() -> None:
    rows = {
        cells[1].strip(" `"): cells
        for line in reference_pages.families_page().splitlines()
        if (cells := line.split("|"))[1:]
    }
    for model_type, refusal in capabilities().items():
        static, in_attention, reason = (cell.strip() for cell in rows[model_type][2:5])
        assert static == ("no" if refusal else "yes")
        assert in_attention == ("yes" if not refusal and attention_capabilities()[model_type] is None else "no")
        assert bool(reason) == (in_attention == "no")


def test_every_public_name_is_documented() -> None:
    text = "".join((REFERENCE / f"{page}.md").read_text(encoding="utf-8") for page in ("python", "records"))
    documented = re.findall(r"^::: hf_posenc\.(\w+)$", text, re.MULTILINE)
    assert sorted(documented) == sorted(set(hf_posenc.__all__) - {"__version__"})
    errors = {name for name, one in inspect.getmembers(hf_posenc.errors, inspect.isclass) if name.endswith("Error")}
    assert errors <= set(re.findall(r"^::: hf_posenc\.(?:errors\.)?(\w+)$", text, re.MULTILINE))


@pytest.mark.parametrize("kind", [Record, RetrievalRecord])
def test_every_field_of_a_record_is_documented(kind: type) -> None:
    described = [
        name
        for one in (JsonRecord, kind)
        for name in re.findall(r"^    (\w+): ", inspect.getdoc(one) or "", re.MULTILINE)
    ]
    assert described == [one.name for one in fields(kind)]


@pytest.mark.parametrize("page", sorted(PAGES.rglob("*.md")), ids=lambda page: page.name)
def test_options_of_the_python_reference_belong_to_a_name(page: Path) -> None:
    assert lost_options(page.read_text(encoding="utf-8")) == []


def test_lost_options_are_found() -> None:
    right = "::: hf_posenc.patch_model\n    options:\n      members: false\n"
    assert lost_options(right) == []
    assert lost_options(right.replace("model\n", "model\n\n")) == ["hf_posenc.patch_model"]


def lost_options(text: str) -> list[str]:
    """Return the names after which an empty line makes a block of code of their options."""
    return re.findall(r"^::: (\S+)\n[ \t]*\n\s*options:", text, re.MULTILINE)


def test_a_picture_that_nothing_draws_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "drawn.svg").write_text('<svg viewBox="0 0 1 1"></svg>', encoding="utf-8")
    assert 'aria-label="words"' in picture(tmp_path, "drawn", "words")
    with pytest.raises(PluginError, match=r"missing\.svg.*drawn$"):
        picture(tmp_path, "missing", "words")
