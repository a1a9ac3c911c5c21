"""Numbers as people write them: ``32k`` tokens of context, a budget of ``1M`` tokens."""

from __future__ import annotations

import re
from typing import Self

_NUMBER = re.compile(r"^\s*(\d+(?:[._]?\d+)*)\s*([kKmM]?)\s*$")


def _parse(text: str, kilo: int, example: str) -> int:
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(f"expected a number of tokens such as {example}, got {text!r}")
    value = float(match[1].replace("_", "")) * {"": 1, "k": kilo, "m": kilo**2}[match[2].lower()]
    if value != int(value):
        raise ValueError(f"expected a whole number of tokens, got {text!r}")
    return int(value)


class ContextLength(int):
    """A length in tokens; ``k`` means 1024, so ``32k``, ``32K`` and ``32768`` are the same."""

    def __new__(cls, value: str | int) -> Self:
        return super().__new__(cls, _parse(value, 1024, "32768 or 32k") if isinstance(value, str) else value)


class TokenCount(int):
    """An amount of tokens; ``k`` means 1000 and ``M`` a million, as training budgets are written."""

    def __new__(cls, value: str | int) -> Self:
        return super().__new__(cls, _parse(value, 1000, "300000, 300k or 1M") if isinstance(value, str) else value)
