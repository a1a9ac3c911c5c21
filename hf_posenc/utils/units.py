"""Numbers as people write them: ``32k`` tokens of context, ``1M`` tokens to train on, ``24GB``, ``1%``; columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Self

from hf_posenc.errors import InvalidRequestError

_BYTES = {"": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_NUMBER = re.compile(r"^\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([kKmM]?)\s*$")


def _parse(text: str, kilo: int, example: str) -> int:
    match = _NUMBER.match(text)
    if match is None:
        raise InvalidRequestError(f"expected a number of tokens such as {example}, got {text!r}")
    value = Decimal(match[1].replace("_", "")) * {"": 1, "k": kilo, "m": kilo**2}[match[2].lower()]  # 4.1M is whole
    if value != int(value):
        raise InvalidRequestError(f"expected a whole number of tokens, got {text!r}")
    return int(value)


class ContextLength(int):
    """A length in tokens; ``k`` means 1024, so ``32k``, ``32K`` and ``32768`` are the same."""

    def __new__(cls, value: str | int) -> Self:
        return super().__new__(cls, _parse(value, 1024, "32768 or 32k") if isinstance(value, str) else value)


def length_name(length: int) -> str:
    """Return ``32k`` for 32768, ``12.5k`` for 12800 and ``500`` for 500."""
    return f"{length / 1024:g}k" if length % 512 == 0 and length >= 1024 else str(length)


class TokenCount(int):
    """An amount of tokens; ``k`` means 1000 and ``M`` a million, as training budgets are written."""

    def __new__(cls, value: str | int) -> Self:
        return super().__new__(cls, _parse(value, 1000, "300000, 300k or 1M") if isinstance(value, str) else value)


def count_name(number: float) -> str:
    """Return ``300k`` for 300000, ``1.5M`` for 1500000 and ``7.24B`` for 7240000000."""
    rounded = float(f"{number:.3g}")  # 999,936 are 1M
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if rounded >= unit:
            return f"{rounded / unit:g}{name}"
    return f"{number:g}"


class Percent(float):
    """A share; ``1%`` and ``0.01`` are the same."""

    def __new__(cls, value: str | float) -> Self:
        return super().__new__(cls, _parse_percent(value) if isinstance(value, str) else value)


def _parse_percent(text: str) -> float:
    match = re.match(r"^\s*(\d*\.?\d+)\s*(%?)\s*$", text)
    if match is None:
        raise InvalidRequestError(f"expected a share such as 1% or 0.01, got {text!r}")
    return float(match[1]) / (100 if match[2] else 1)


class Duration(float):
    """A time in seconds; ``90s``, ``20m``, ``1.5h`` and plain seconds."""

    def __new__(cls, value: str | float) -> Self:
        return super().__new__(cls, _parse_duration(value) if isinstance(value, str) else value)


def _parse_duration(text: str) -> float:
    match = re.match(r"^\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*$", text)
    if match is None or not float(match[1]):
        raise InvalidRequestError(f"expected a time such as 90s, 20m or 1.5h, got {text!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def duration_name(seconds: float) -> str:
    """Return ``0.014 s``, ``7.4 s``, ``45 s``, ``2.1 min`` or ``1.4 h``."""
    if seconds < 90:
        return f"{seconds:.{'2g' if seconds < 1 else '1f' if seconds < 9.95 else '0f'}} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class MemorySize(int):
    """Bytes; ``24GB`` is 24 times 10^9, ``24GiB`` is 24 times 2^30, a plain number is bytes."""

    def __new__(cls, value: str | int) -> Self:
        return super().__new__(cls, _parse_bytes(value) if isinstance(value, str) else value)


def size_name(size: float) -> str:
    """Return bytes as ``1.46 GB`` or ``3.20 MB``, of 10^9 and 10^6 bytes."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _parse_bytes(text: str) -> int:
    match = re.match(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$", text)
    if match is None or match[2].upper() not in _BYTES or not float(match[1]):
        raise InvalidRequestError(f"expected an amount of memory such as 24GB or 80GiB, got {text!r}")
    return round(float(match[1]) * _BYTES[match[2].upper()])


def number_name(value: float) -> str:
    """Return a number with three digits that count, or whole from a thousand on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Return rows as lines of columns, numbers to the right and the given columns to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
