"""The reference pages name everything there is: methods, options, commands, flags, model types, names, fields."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import ModuleType

import pytest
from latex2mathml.converter import convert

import hf_posenc
from documents import words_of
from folders import ROOT
from hf_posenc.cli.main import COMMANDS
from hf_posenc.evaluation.records import Record, RetrievalRecord
from hf_posenc.families.family_data import attention_capabilities, capabilities
from hf_posenc.methods.registry import methods

REFERENCE = ROOT / "docs" / "pages" / "reference"


@pytest.fixture(scope="module")
def made() -> Iterator[ModuleType]:
    """The module that makes the pages."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        yield pytest.importorskip("reference_pages")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def section(page: str, name: str) -> str:
    """Return the part of a page under the heading with an anchor."""
    return page.partition(f"{{ #{name} }}\n")[2].partition("{ #")[0]


def test_every_method_has_a_section_with_its_formula_and_options(made: ModuleType) -> None:
    page = made.methods_page()
    for name, cls in methods().items():
        assert f"[`{name}`](#{name})" in page
        found = section(page, name)
        assert cls.formula
        assert cls.formula in found
        assert all(f"| `{option}` |" in found for option in cls.option_fields()), name
        assert all(f"`{alias}`" in found for alias in cls.aliases)
        assert f'patch_model(model, "{name}"' in found


@pytest.mark.parametrize("name", methods())
def test_formulas_are_latex_that_the_site_can_show(name: str) -> None:
    cls = methods()[name]
    assert cls.symbols.count("$") % 2 == 0
    for formula in (cls.formula, *re.findall(r"\$([^$]*)\$", cls.symbols)):
        assert formula.count("{") == formula.count("}")
        assert "\\" not in re.sub(r"<[^>]*>", "", convert(formula)), formula  # a command it does not know


def test_every_command_has_a_section_with_all_flags_that_its_help_shows(made: ModuleType) -> None:
    page = made.command_line_page()
    for name, run in COMMANDS.items():
        found, parser = section(page, name), made.parser_of(run)
        assert parser.usage in found
        flags = {flag for one in parser._actions if one.help != argparse.SUPPRESS for flag in one.option_strings}
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
        theirs = {"--tasks", "--limit"} if name == "lm-eval" else set()
        assert used - theirs <= parser._option_string_actions.keys(), line


def test_every_model_type_has_a_row_with_what_extends_it(made: ModuleType) -> None:
    rows = {cells[1].strip(" `"): cells for line in made.families_page().splitlines() if (cells := line.split("|"))[1:]}
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
    described = re.findall(r"^    (\w+): ", inspect.getdoc(kind) or "", re.MULTILINE)
    assert described == [one.name for one in fields(kind)]
