"""A method in words, for people: from the file ``NAME.toml`` beside the file of its class."""

from __future__ import annotations

import inspect
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from hf_posenc.methods.base import Method


@dataclass(frozen=True)
class MethodWords:
    """The words in the file of a method; line ends in it count as blanks.

    Attributes:
        explanation: What the method does and why that helps; of an encoding, how positions enter.
        on_short_texts: What texts up to the original length pay for it.
        kv_cache: Whether a KV cache stays right.
        formula: The definition in LaTeX.
        symbols: What the formula's own symbols mean, in sentences with LaTeX between dollar signs.
        title: For an encoding, its name as papers write it.
        absolute_or_relative: For an encoding, which of the two it is.
        trained: For an encoding, its parameters.
        extrapolates: For an encoding, whether it reads further than it was trained, and why.
        properties: What holds of the method, each sentence with the test that holds it.
    """

    explanation: str = "No words are written for this method yet; below are its numbers."
    on_short_texts: str = "See the numbers below."
    kv_cache: str = ""
    formula: str = ""
    symbols: str = ""
    title: str = ""
    absolute_or_relative: str = ""
    trained: str = ""
    extrapolates: str = ""
    properties: tuple[tuple[str, str], ...] = ()


def method_words(method: Method | type[Method]) -> MethodWords:
    """Return a method in words; of an instance, those for its options, where the file has a table for them.

    The table ``[scope.sequence]`` holds what is different with the option scope='sequence'.
    """
    cls = method if isinstance(method, type) else type(method)
    content = dict(_content_of(cls))
    for option in cls.option_fields() if isinstance(method, Method) else ():
        content |= content.get(option, {}).get(str(getattr(method, option)), {})
    names = {each.name for each in fields(MethodWords)} & content.keys() - {"properties"}
    held = tuple((_joined(row["sentence"]), row["test"]) for row in content.get("properties", ()))
    return MethodWords(**{name: _joined(content[name]) for name in names}, properties=held)


@cache
def _content_of(cls: type[Method]) -> dict[str, Any]:
    try:
        file = Path(inspect.getfile(cls)).with_suffix(".toml")
    except (OSError, TypeError):  # a class that was typed in
        return {}
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _joined(text: str) -> str:
    return " ".join(text.split())
