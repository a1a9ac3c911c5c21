"""The look of lines: a method has one colour and one marker in every chart of every report, a row its own dashes."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from hf_posenc.evaluation.records import AnyRecord
from hf_posenc.evaluation.rows import row_key

# Chosen by search near Okabe and Ito's, so that each has a contrast of at least 3 with its paper and every two of them
# differ for readers with any kind of colour vision; theirs have 2.3 on white.
COLOURS = ("#044d9e", "#cf2f3e", "#0ca870", "#c2609a", "#9c9002", "#0e78ff")
COLOURS_ON_DARK = ("#5382e7", "#fc7531", "#00dd6f", "#e476b6", "#f8ca0c", "#94c9ff")
INK = "#3b3f46"  # text, axes and the unpatched row; the page swaps it for the colour of its text
PAPER = "#fefefe"  # inside of hollow markers; the page swaps it for the colour of its paper
# Nobody has to know a colour: each method has a marker too, and each row of a method dashes of its own.
_MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "d", "*", "8", "H")
DASHES: tuple[Any, ...] = (
    *("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 2, 2)), (0, (4, 4))),
    *((0, (8, 2, 2, 2, 2, 2)), (0, (1, 3)), (0, (10, 3))),
)


# Numbers of the colours and markers of methods. The first six, which are compared most often, have six colours; a new
# method takes the next number, and one of another package a number made from its name.
_METHODS = (
    *("yarn", "linear", "ntk", "dynamic_yarn", "dynamic", "dca", "self_extend", "rerope", "leaky_rerope", "llama3"),
    *("ntk_by_parts", "longrope", "abf", "nope", "sinusoidal", "learned", "relative_bias", "t5_bias", "alibi", "rope"),
    *("xpos", "ntk_rcd", "yarn_rcd", "fitted"),
)
METHOD_LOOKS = {name: number for number, name in enumerate(_METHODS)}


class Look(NamedTuple):
    """The look of a line; a bold one is of a model that was trained. ``fill`` is matplotlib's ``fillstyle``."""

    colour: str
    marker: str
    dashes: Any = "solid"
    bold: bool = False
    fill: str = "full"


PLAIN = Look(INK, "o")  # of what is neither scaled nor trained
Looks = Mapping[tuple[object, ...], Look]


def numbered_look(number: int, variant: int = 0) -> Look:
    """Return the look of the line of a number: its colour, marker and dashes.

    Args:
        number: Two of them share a colour from six on, and no two of 14 a marker.
        variant: Which of the lines that share a number; they differ in their dashes.
    """
    dashes = DASHES[(number // len(COLOURS) + variant) % len(DASHES)]
    return Look(COLOURS[number % len(COLOURS)], _MARKERS[number % len(_MARKERS)], dashes)


def make_looks(records: Sequence[AnyRecord]) -> Looks:
    """Return the look of each row of a report in all of its charts, by ``row_key``.

    The colour and the marker are the method's. Its rows (factors, options, models, labels) differ in their dashes. What
    was trained is bold with a filled marker, what was not is thin with a hollow one. Past eight rows of a method, half
    of each marker is filled.
    """
    rows = {row_key(record): record for record in reversed(records)}
    numbers = _numbers(dict.fromkeys(record.method for record in records))
    looks: dict[tuple[object, ...], Look] = {}
    seen: dict[tuple[str, bool], int] = {}
    for key in dict.fromkeys(map(row_key, records)):
        method, trained = rows[key].method, rows[key].tokens_trained != 0
        variant = seen[method, trained] = seen.get((method, trained), -1) + 1
        if method == "none":
            look, usual = PLAIN._replace(dashes=DASHES[variant % len(DASHES)]), "full"
        else:
            look = numbered_look(numbers[method], variant)
            usual = "full" if trained else "none"
        fill = (usual, "left", "right", "bottom", "top")[variant // len(DASHES) % 5]
        looks[key] = look._replace(bold=trained, fill=fill)
    return looks


def _numbers(names: Collection[str]) -> dict[str, int]:
    """Return the number of each method: that of ``METHOD_LOOKS``, or one made from the name.

    One made from the name gives way to numbers and colours that are taken, as long as others are free: in all reports
    in which nothing else has its colour it is the same.
    """
    known = METHOD_LOOKS
    named = {name: known[name] for name in names if name in known}
    for name in names:
        if name in named or name == "none":
            continue
        free = set(range(len(COLOURS))) - {number % len(COLOURS) for number in named.values()}
        start = len(known) + zlib.crc32(name.encode()) % math.lcm(len(COLOURS), len(_MARKERS))
        named[name] = next(
            number
            for number in itertools.count(start)
            if number not in named.values() and (not free or number % len(COLOURS) in free)
        )
    return named
