"""What a method does to a model, as sections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from hf_posenc.explaining.encoding_numbers import partial_sentence
from hf_posenc.explaining.method_words import words_of
from hf_posenc.explaining.pairs import HEADS, chosen_pairs, pair_rows, pair_sentences, rule_sentences
from hf_posenc.explaining.places import (
    DISTANCE_HEADS,
    STAGE_HEADS,
    distance_rows,
    distance_sentences,
    query_sentence,
    stage_rows,
    stage_sentences,
)
from hf_posenc.explaining.sections import Section
from hf_posenc.explaining.subject import Subject
from hf_posenc.gallery.canvas import Picture
from hf_posenc.gallery.method_pictures import draw_query_factors, draw_ramp, draw_stages, draw_temperature
from hf_posenc.gallery.spirals import draw_dials
from hf_posenc.gallery.stretching import Stretched, draw_stretch, draw_wavelengths
from hf_posenc.gallery.told import draw_told, draw_told_maps
from hf_posenc.methods.registry import METHODS
from hf_posenc.patching.extension import Extension
from hf_posenc.report.frequencies import PairRule
from hf_posenc.spec import RopeScaling
from hf_posenc.utils.units import length_name


def method_title(extension: Extension) -> str:
    """Return what is explained, in a line."""
    scaling, original = extension.scaling, extension.spec.original_max_position_embeddings
    return f"{_name(scaling)}: {length_name(original)} -> {length_name(extension.context_length)} tokens"


def _name(scaling: RopeScaling) -> str:
    return f"{scaling.method} x{scaling.factor:.4g}"


def method_sections(subject: Subject, extension: Extension) -> list[Section]:
    """Return all sections of a method on a model."""
    spec, scaling, reach = extension.spec, extension.scaling, extension.context_length
    rule = PairRule(_name(scaling), spec, scaling, reach)
    words, method = words_of(scaling.method, scaling.scope), METHODS[scaling.method]
    options = ", ".join(f"{name} {value}" for name, value in scaling.changed_options().items() if name != "long_factor")
    about = [words.idea, f"On short texts: {words.short_texts}"]
    about += [f"KV cache: {words.cache}"] if words.cache else []
    about += [f"Source: {method.paper}.", *([f"Options: {options}."] if options else [])]
    sections = [
        Section("idea", "What it does", about),
        Section("model", "This model", [*partial_sentence(subject, spec), *pair_sentences(rule)]),
    ]
    if rule.changes_distances:
        return [*sections, _distances(rule)]
    if scaling.on_attention_door:
        sections.append(_stages(rule))
    return [*sections, _frequencies(rule)]


def _frequencies(rule: PairRule) -> Section:
    """Return what becomes of the pairs, at the target where the rule depends on the length."""
    spec, scaling = rule.spec, rule.scaling
    heads = list(HEADS)
    heads[2] = f"turns in {length_name(spec.original_max_position_embeddings)}"
    sentences = rule_sentences(rule)
    if scaling.mscale_all_dim is not None and scaling.factor > 1:
        softmax = (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2
        sentences.append(f"The softmax scale besides times {softmax:.4g}, which reaches whole logits (mscale_all_dim).")
    if scaling.temperature == "logits":
        sentences.append("The temperature is put on whole logits, by the softmax scale (temperature=logits).")
    sentences.append(
        "Wavelengths are tokens of a turn; kept, blended and stretched say how much of the factor a pair has; * marks "
        "pairs that complete no turn in training."
    )
    rows = [
        [cells[0] + ("*" if rule.turns[pair] < 1 else ""), *cells[1:]] for pair, cells in enumerate(pair_rows(rule))
    ]
    heading = "What it does to the pairs" + (f", at {rule.reach:,} tokens" if _by_length(scaling) else "")
    pictures = partial(_frequency_pictures, rule)
    return Section("pairs", heading, sentences, heads, rows, chosen_pairs(rule), (5,), pictures)


def _by_length(scaling: RopeScaling) -> bool:
    return scaling.method in ("dynamic", "dynamic_yarn", "longrope")


def _frequency_pictures(rule: PairRule) -> Sequence[Picture]:
    spec, scaling = rule.spec, rule.scaling
    stretched = Stretched(rule.name, *rule.frequencies)
    caption = (
        "How many times longer each pair's wavelength becomes, the fast pairs to the left. In the grey are those that "
        "complete no turn in training."
    )
    by_parts = scaling.method in ("yarn", "ntk_by_parts", "llama3", "dynamic_yarn")
    found = [
        draw_stretch(spec, [stretched], "stretch", "How far each pair is stretched", caption),
        draw_wavelengths(spec, stretched, rule.reach),
        draw_ramp(spec, scaling, stretched) if by_parts else None,
        None if scaling.on_attention_door else draw_temperature(spec, scaling),
        draw_dials(spec, rule.reach, stretched.inv_freq, rule.name),
    ]
    return [picture for picture in found if picture is not None]


def _stages(rule: PairRule) -> Section:
    spec, scaling, reach = rule.spec, rule.scaling, rule.reach
    sentences = [*stage_sentences(spec, scaling, reach), *query_sentence(spec, scaling, reach)]
    rows = stage_rows(spec, scaling, reach)

    def pictures() -> Sequence[Picture]:
        every = (draw_stages(spec, scaling, reach), draw_query_factors(spec, scaling, reach))
        return [picture for picture in every if picture is not None]

    return Section("stages", "Stages", sentences, STAGE_HEADS, rows, left=(1,), pictures=pictures)


def _distances(rule: PairRule) -> Section:
    spec, scaling, reach = rule.spec, rule.scaling, rule.reach
    sentences = [*distance_sentences(spec, scaling, reach), *query_sentence(spec, scaling, reach)]

    def pictures() -> Sequence[Picture]:
        named = [(rule.name, scaling)]
        every = (
            draw_told(spec, named, reach),
            draw_told_maps(spec, named, reach),
            draw_query_factors(spec, scaling, reach),
        )
        return [picture for picture in every if picture is not None]

    rows = distance_rows(spec, scaling, reach)
    return Section("distances", "What it does to distances", sentences, DISTANCE_HEADS, rows, pictures=pictures)
