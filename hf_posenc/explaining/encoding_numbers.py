"""The numbers of an encoding on a model: sentences, and a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hf_posenc.explaining.pairs import HEADS, number_name, pair_rows, pair_sentences
from hf_posenc.explaining.subject import Subject
from hf_posenc.methods.base import Unscaled
from hf_posenc.methods.encodings.alibi import alibi_slopes
from hf_posenc.methods.encodings.t5_bias import t5_buckets
from hf_posenc.methods.encodings.xpos import xpos_decay
from hf_posenc.patching.extension import plain_spec
from hf_posenc.report.frequencies import PairRule, wavelengths
from hf_posenc.spec import RopeSpec

# Sentences, the heads of a table and its rows; no heads for no table.
Numbers = tuple[list[str], list[str], list[list[str]]]


def encoding_numbers(name: str, subject: Subject, options: dict[str, Any], target: int) -> Numbers:
    """Return what an encoding is on a model of this shape.

    Args:
        name: Of ``ENCODING_FACTS``.
        subject: The model.
        options: All of the encoding's.
        target: Tokens that are asked for.

    Raises:
        ValueError: The encoding is rotary and the model's config has no rotary embedding.
    """
    return _OF[name](subject, options, target)


def _rope(subject: Subject, options: dict[str, Any], target: int) -> Numbers:
    spec = plain_spec(subject.config)
    rule = PairRule("rope", spec, Unscaled(), target)
    heads = [*HEADS[:2], f"turns in {spec.original_max_position_embeddings:,}"]
    return [*partial_sentence(subject, spec), *pair_sentences(rule)], heads, [row[:3] for row in pair_rows(rule)]


def partial_sentence(subject: Subject, spec: RopeSpec) -> list[str]:
    """Say how much of a head turns, where that is not all of it."""
    if spec.rotary_dim >= subject.head_dim:
        return []
    rest = subject.head_dim - spec.rotary_dim
    return [f"Of the {subject.head_dim} features of a head {spec.rotary_dim} turn; {rest} carry no position."]


def _xpos(subject: Subject, options: dict[str, Any], target: int) -> Numbers:
    spec, scale_base = plain_spec(subject.config), options["scale_base"]
    decay = xpos_decay(spec.num_pairs)
    rows = []
    for pair, tokens in enumerate(wavelengths(spec)):
        one = float(decay[pair])
        left = [f"{one ** (length / scale_base):.3g}" for length in (spec.original_max_position_embeddings, target)]
        rows.append([str(pair), number_name(tokens), f"{one:.3f}", *left])
    at = f"left after {spec.original_max_position_embeddings:,}"
    largest = float(decay[0]) ** (-target / scale_base)
    sentences = [
        f"Each pair's part of the score shrinks by its decay once in {scale_base:g} tokens: the fastest by "
        f"{float(decay[0]):.3f}, the slowest by {float(decay[-1]):.3f}.",
        f"Keys are multiplied by the inverse: at position {target:,} the fastest pair's by {largest:.3g}, where "
        "float16 ends at 65,504 and bfloat16 keeps two to three digits.",
    ]
    return sentences, ["pair", "wavelength", "decay", at, f"after {target:,}"], rows


def _sinusoidal(subject: Subject, options: dict[str, Any], target: int) -> Numbers:
    width, base = subject.width, options["base"]
    tokens = [2 * math.pi * base ** (2 * pair / width) for pair in range(width // 2)]
    never = [sum(one > length for one in tokens) for length in (subject.length, target)]
    sentences = [
        f"A row has {width:,} features, {len(tokens):,} waves of {number_name(tokens[0])} to "
        f"{number_name(tokens[-1])} tokens.",
        f"{never[0]:,} waves are longer than {subject.length:,} tokens, {never[1]:,} longer than {target:,}.",
        "The row of p + k is that of p turned by k, wave by wave, whatever p is.",
    ]
    rows = [
        [f"{2 * at}, {2 * at + 1}", number_name(one), number_name(subject.length / one)]
        for at, one in enumerate(tokens)
    ]
    return sentences, ["features", "wavelength", f"waves in {subject.length:,}"], rows


def _alibi(subject: Subject, options: dict[str, Any], target: int) -> Numbers:
    slopes = alibi_slopes(subject.num_heads).tolist()
    reach = [math.log(100) / slope for slope in slopes]
    inside = sum(one < subject.length for one in reach)
    sentences = [
        f"{subject.num_heads} heads, slopes from {max(slopes):.4g} to {min(slopes):.4g}: a weight falls to a hundredth "
        f"after {number_name(min(reach))} tokens in the nearest-sighted head and after {number_name(max(reach))} in "
        "the farthest-sighted.",
        f"In {inside} of {subject.num_heads} heads that is nearer than the {subject.length:,} tokens the model reads; "
        f"at {target:,} tokens nothing changes for them.",
    ]
    rows = [
        [str(at + 1), f"{slope:.4g}", number_name(far)]
        for at, (slope, far) in enumerate(zip(slopes, reach, strict=True))
    ]
    return sentences, ["head", "slope", "tokens to 1/100"], rows


def _t5(subject: Subject, options: dict[str, Any], target: int) -> Numbers:
    buckets, farthest = options["num_buckets"], options["max_distance"]
    found = t5_buckets(-torch.arange(farthest + 1), num_buckets=buckets, max_distance=farthest)
    rows = []
    for bucket in sorted(set(found.tolist())):
        inside = torch.nonzero(found == bucket).flatten()
        first, last = int(inside[0]), int(inside[-1])
        rows.append([str(bucket), f"{first:,} and more" if last == farthest else _span(first, last)])
    begins = int(torch.nonzero(found == found[-1])[0])
    sentences = [
        f"{buckets} buckets, of which {buckets // 2} hold one distance each; from {begins:,} tokens on all keys share "
        "the last.",
        f"{buckets * subject.num_heads:,} numbers are trained: {buckets} for each of {subject.num_heads} heads.",
        f"Of the {target:,} distances asked for, {max(target - begins, 0):,} are in the last bucket.",
    ]
    return sentences, ["bucket", "distances"], rows


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _relative(subject: Subject, options: dict[str, Any], target: int) -> Numbers:
    farthest = options["max_distance"]
    sentences = [
        f"{(farthest + 1) * subject.num_heads:,} numbers are trained: one for each of {subject.num_heads} heads and "
        f"the distances 0 to {farthest:,}.",
        f"Of the {target:,} distances asked for, {max(target - farthest, 0):,} share the last.",
    ]
    return sentences, [], []


def _learned(subject: Subject, options: dict[str, Any], target: int) -> Numbers:
    rows, missing = subject.length, max(target - subject.length, 0)
    sentences = [
        f"A table of {rows:,} rows of {subject.width:,} features: {rows * subject.width:,} numbers are trained.",
        f"Of the {target:,} positions asked for, {missing:,} have no row." if missing else "Every position has a row.",
    ]
    return sentences, [], []


def _nope(subject: Subject, options: dict[str, Any], target: int) -> Numbers:
    sentences = [
        f"The last of {subject.length:,} tokens spreads its attention over as many keys, that of {target:,} over "
        f"{target / subject.length:.3g} times as many."
    ]
    if subject.has_rope:
        spec = plain_spec(subject.config)
        sentences.append(
            f"This model has {spec.rotated_pairs} pairs that turn; without positions all of them stand still."
        )
    return sentences, [], []


_OF: dict[str, Callable[[Subject, dict[str, Any], int], Numbers]] = {
    "rope": _rope,
    "xpos": _xpos,
    "sinusoidal": _sinusoidal,
    "alibi": _alibi,
    "t5_bias": _t5,
    "relative_bias": _relative,
    "learned": _learned,
    "nope": _nope,
}
