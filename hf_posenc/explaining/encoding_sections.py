"""How an encoding works, as sections."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hf_posenc.explaining.encoding_numbers import encoding_numbers
from hf_posenc.explaining.encodings_facts import ENCODING_FACTS
from hf_posenc.explaining.sections import Section
from hf_posenc.explaining.subject import Subject
from hf_posenc.gallery.canvas import Picture
from hf_posenc.gallery.curves import draw_decay, draw_xpos
from hf_posenc.gallery.maps import Shape, draw_maps
from hf_posenc.gallery.spirals import draw_dials, draw_spirals
from hf_posenc.gallery.tables import draw_alibi_bias, draw_alibi_slopes, draw_sinusoidal_table, draw_t5_buckets
from hf_posenc.patching.extension import plain_spec

_NEAR = 100  # tokens of the first heat map


def encoding_sections(name: str, subject: Subject, options: dict[str, Any], target: int) -> list[Section]:
    """Return all sections of an encoding on a model of this shape; arguments as ``encoding_numbers``'s."""
    facts = ENCODING_FACTS[name]
    about = [
        f"How positions enter: {facts.enters}",
        f"Absolute or relative: {facts.kind}",
        f"KV cache: {facts.cache}",
        f"Parameters: {facts.parameters}",
        f"Reads further than trained? {facts.extrapolates}",
        f"Source: {facts.paper}.",
    ]
    sentences, heads, rows = encoding_numbers(name, subject, options, target)
    pictures = partial(_pictures, name, subject, options, target)
    sections = [
        Section("idea", "What it is", about),
        Section("model", "On this model", sentences, heads, rows, pictures=pictures),
    ]
    if facts.properties:
        held = [f"{sentence} ({test})" for sentence, test in facts.properties]
        sections.append(Section("properties", "Held by tests/test_encoding_properties.py", held))
    return sections


def model_shape(subject: Subject, options: dict[str, Any]) -> Shape:
    """Return the numbers of a model that pictures are drawn from."""
    rotary: dict[str, Any] = {}
    if subject.has_rope:
        spec = plain_spec(subject.config)
        rotary = {"num_pairs": spec.rotated_pairs, "base": spec.rope_theta}
    return Shape(num_heads=subject.num_heads, width=subject.width, rows=subject.length, options=options, **rotary)


def _pictures(name: str, subject: Subject, options: dict[str, Any], target: int) -> Sequence[Picture]:
    shape = model_shape(subject, options)
    lengths = sorted({min(_NEAR, subject.length), subject.length, target})
    found: list[Picture | None] = [draw_maps(name, shape, lengths)]
    if name == "rope":
        spec = plain_spec(subject.config)
        found += [draw_decay(shape), draw_spirals(spec), draw_dials(spec, target)]
    elif name == "xpos":
        found += [draw_xpos(shape)]
    elif name == "sinusoidal":
        found += [draw_sinusoidal_table(shape)]
    elif name == "alibi":
        found += [draw_alibi_bias(shape), draw_alibi_slopes(sorted({8, subject.num_heads}))]
    elif name == "t5_bias":
        found += [draw_t5_buckets(shape)]
    return [picture for picture in found if picture is not None]
