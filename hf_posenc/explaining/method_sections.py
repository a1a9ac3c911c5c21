"""What a method does to a model, as sections."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hf_posenc.explaining.encoding_numbers import partial_sentence
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
from hf_posenc.methods.base import DistanceMethod, Method, StagedMethod
from hf_posenc.methods.longrope import LongRope
from hf_posenc.patching.extension import Extension
from hf_posenc.report.frequencies import PairRule
from hf_posenc.utils.units import length_name


def method_title(extension: Extension) -> str:
    """Return what is explained, in a line."""
    method, original = extension.method, extension.spec.original_max_position_embeddings
    return f"{_name(method)}: {length_name(original)} -> {length_name(extension.context_length)} tokens"


def _name(method: Method) -> str:
    return f"{method.name} x{method.factor:.4g}"


def method_sections(subject: Subject, extension: Extension) -> list[Section]:
    """Return all sections of a method on a model."""
    spec, method, reach = extension.spec, extension.method, extension.context_length
    rule = PairRule(_name(method), spec, method, reach)
    words = method.words
    options = ", ".join(f"{name} {value}" for name, value in method.changed_options().items() if name != "long_factor")
    about = [words.explanation, f"On short texts: {words.on_short_texts}"]
    about += [f"KV cache: {words.kv_cache}"] if words.kv_cache else []
    about += [f"Source: {method.paper}.", *([f"Options: {options}."] if options else [])]
    sections = [
        Section("idea", "What it does", about),
        Section("model", "This model", [*partial_sentence(subject, spec), *pair_sentences(rule)]),
    ]
    if isinstance(method, DistanceMethod):
        return [*sections, _distances(rule, method)]
    if isinstance(method, StagedMethod) and method.runs_in_attention:
        sections.append(_stages(rule, method))
    return [*sections, _frequencies(rule)]


def _frequencies(rule: PairRule) -> Section:
    """Return what becomes of the pairs, at the target where the rule depends on the length."""
    spec, method = rule.spec, rule.method
    heads = list(HEADS)
    heads[2] = f"turns in {length_name(spec.original_max_position_embeddings)}"
    sentences = rule_sentences(rule)
    if method.latent_temperature != 1:
        softmax = method.latent_temperature**2
        sentences.append(f"The softmax scale besides times {softmax:.4g}, which reaches whole logits (mscale_all_dim).")
    if method.temperature_on_logits:
        sentences.append("The temperature is put on whole logits, by the softmax scale (temperature=logits).")
    sentences.append(
        "Wavelengths are tokens of a turn; kept, blended and stretched say how much of the factor a pair has; * marks "
        "pairs that complete no turn in training."
    )
    rows = [
        [cells[0] + ("*" if rule.turns[pair] < 1 else ""), *cells[1:]] for pair, cells in enumerate(pair_rows(rule))
    ]
    heading = "What it does to the pairs" + (f", at {rule.reach:,} tokens" if _by_length(method) else "")
    pictures = partial(_frequency_pictures, rule)
    return Section("pairs", heading, sentences, heads, rows, chosen_pairs(rule), (5,), pictures)


def _by_length(method: Method) -> bool:
    return isinstance(method, (StagedMethod, LongRope))


def _frequency_pictures(rule: PairRule) -> Sequence[Picture]:
    spec, method = rule.spec, rule.method
    stretched = Stretched(rule.name, *rule.frequencies)
    caption = (
        "How many times longer each pair's wavelength becomes, the fast pairs to the left. In the grey are those that "
        "complete no turn in training."
    )
    found = [
        draw_stretch(spec, [stretched], "stretch", "How far each pair is stretched", caption),
        draw_wavelengths(spec, stretched, rule.reach),
        draw_ramp(spec, method, stretched) if method.ramp_turns else None,
        None if method.runs_in_attention else draw_temperature(spec, method),
        draw_dials(spec, rule.reach, stretched.inv_freq, rule.name),
    ]
    return [picture for picture in found if picture is not None]


def _stages(rule: PairRule, method: StagedMethod) -> Section:
    spec, reach = rule.spec, rule.reach
    sentences = [*stage_sentences(spec, method, reach), *query_sentence(spec, method, reach)]
    rows = stage_rows(spec, method, reach)

    def pictures() -> Sequence[Picture]:
        every = (draw_stages(spec, method, reach), draw_query_factors(spec, method, reach))
        return [picture for picture in every if picture is not None]

    return Section("stages", "Stages", sentences, STAGE_HEADS, rows, left=(1,), pictures=pictures)


def _distances(rule: PairRule, method: DistanceMethod) -> Section:
    spec, reach = rule.spec, rule.reach
    sentences = [*distance_sentences(spec, method, reach), *query_sentence(spec, method, reach)]

    def pictures() -> Sequence[Picture]:
        named = [(rule.name, method)]
        every = (
            draw_told(spec, named, reach),
            draw_told_maps(spec, named, reach),
            draw_query_factors(spec, method, reach),
        )
        return [picture for picture in every if picture is not None]

    rows = distance_rows(spec, method, reach)
    return Section("distances", "What it does to distances", sentences, DISTANCE_HEADS, rows, pictures=pictures)
