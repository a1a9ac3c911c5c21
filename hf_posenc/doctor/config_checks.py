"""The meaning of a config.json and the problems of its rotary settings, a check each: JSON in, facts out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_posenc.doctor.config_meaning import (
    ORIGINAL,
    ConfigFacts,
    Known,
    canonical,
    from_mark,
    has_rope,
    is_misspelled,
    keys_of,
    meant,
    original_of,
    source_of,
    target_length,
)
from hf_posenc.doctor.transformers_readers import (
    MROPE_SECTION,
    VERSIONS,
    Refused,
    Rope,
    default_text,
    default_theta,
    effective,
    flat_parameters,
    full_label,
    is_nested,
    read_by,
    rope_type_of,
    text_part,
    top_level,
)
from hf_posenc.errors import InvalidRequestError
from hf_posenc.families.discovery import rope_label
from hf_posenc.families.family_data import family_of
from hf_posenc.methods.base import MANIFEST, encoding_of
from hf_posenc.methods.linear import Linear
from hf_posenc.methods.yarn import Yarn
from hf_posenc.patching.extension import (
    SCALING_KEYS,
    layer_types_words,
    read_mark,
    rule_is_elsewhere,
    scaled_layer_types,
)
from hf_posenc.patching.lengths import DECLARED, MARK, OriginalLength, is_scaled, limits_below

_ROTARY_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
_NO_SERIALIZATION = "No serialization helps there: take Transformers 4.57 or a newer 5."


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: A short name.
        severity: ``error`` (some reader gets other frequencies, or fails), ``warning`` (a limit or a reader that
            refuses) or ``note`` (worth knowing; nothing is wrong).
        what: What is wrong.
        why: Why it matters.
        todo: What to do.
        mendable: Whether ``mended`` can correct it.
    """

    code: str
    severity: str
    what: str
    why: str
    todo: str = "hf-posenc doctor --fix writes a config that is right."
    mendable: bool = True


def check_was_read(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Say where a config may rotate in a way that is not read: in parts of it, or in code of its own."""
    if text_part(config)[0] or any(config.get(key) for key in _ROTARY_KEYS):
        return
    todo = "Load the model, and call hf_posenc.describe and verify_model."
    if unread := [path for path, part in _parts(config) if any(part.get(key) for key in _ROTARY_KEYS)]:
        yield Finding(
            "not-read",
            "warning",
            f"parts of the config that are not read here say how the model rotates: {', '.join(unread)}",
            "Whether its positions are right is not known.",
            todo,
            mendable=False,
        )
    elif default_text(str(config.get("model_type"))) is None:
        yield Finding(
            "unknown-family",
            "warning",
            f"Transformers has no model_type {config.get('model_type')!r}",
            "Its code may be in the checkpoint, so whether and how it rotates is not known.",
            todo,
            mendable=False,
        )


def _parts(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the configs of parts inside a config, and of parts of these, each by its path."""
    for key, part in config.items():
        if isinstance(part, Mapping) and ("model_type" in part or "hidden_size" in part or key.endswith("_config")):
            yield f"{above}{key}", part
            yield from _parts(part, f"{above}{key}.")


def _check_words(facts: ConfigFacts) -> Iterator[Finding]:
    source, rope_type = facts.source, facts.parameters["rope_type"]
    one, other = source.get("rope_type"), source.get("type")
    if one and other and one != other and {one, other} != {"default", "mrope"}:  # the same: several axes, unscaled
        yield Finding(
            "two-types",
            "error",
            f"rope_type says {one!r} and type says {other!r}",
            "Transformers 4 goes by type, 5 by rope_type, so each loads another model.",
        )
    if source and not one and not other and set(source) & (SCALING_KEYS - {ORIGINAL}):
        yield Finding(
            "no-type",
            "error",
            "the scaling has no rope_type",
            "Transformers 5 takes it for no scaling at all, silently; 4 fails.",
            "Add rope_type." if rope_type == "default" else Finding.todo,
            mendable=rope_type != "default",
        )
    read = keys_of(rope_type)
    if read is None and (encoding := encoding_of(rope_type)):
        yield Finding(
            "encoding",
            "error",
            f"the model was trained with {encoding} in place of RoPE",
            "Transformers and servers cannot run it: they fail with an error that prints rope_type.",
            f"Load the checkpoint with hf_posenc.load_extended, which reads {MANIFEST} beside its config.",
            mendable=False,
        )
        return
    if read is None:
        yield Finding(
            "unknown-type",
            "error",
            f"rope_type {rope_type!r} is none of Transformers'",
            "It fails with a KeyError when the model is built.",
            "Take a rule of `hf-posenc list methods` with hf-posenc patch --on-scaled replace.",
            mendable=False,
        )
        return
    unread = {key for key in source if key in SCALING_KEYS or is_misspelled(key)}
    unread -= read | {"rope_type", "type", ORIGINAL, "finetuned"}
    if "attn_factor" in unread and source["attn_factor"] not in (1, 1.0):
        unread.discard("attn_factor")
        yield Finding(
            "attn-factor",
            "error",
            f"attn_factor {source['attn_factor']!r} is not read by Transformers",
            "YaRN's authors multiply the temperature by it; Transformers drops it with a warning.",
        )
    by_alpha = "alpha" in source and family_of(facts.text["model_type"]).base_by_alpha
    if unread and not by_alpha:  # HunYuan publishes it with keys of other rules beside it
        yield Finding(
            "unread-keys",
            "warning",
            f"{', '.join(sorted(unread))} {'is' if len(unread) == 1 else 'are'} not read by {rope_type}",
            "A typing mistake, another program's word or what an earlier rule left behind: it changes nothing.",
        )
    if "finetuned" in source:
        yield Finding(
            "finetuned-key",
            "note",
            "finetuned is a word of YaRN's own code",
            "Transformers warns and continues without it.",
            "hf-posenc doctor --fix removes it.",
        )


def _check_factor(facts: ConfigFacts) -> Iterator[Finding]:
    factor = facts.parameters.get("factor")
    needed = "factor" in rope_type_of(facts.parameters["rope_type"]).needed_keys
    if (factor is None and not needed) or (isinstance(factor, float) and factor >= 1):
        return
    yield Finding(
        "bad-factor",
        "error",
        f"factor is {factor!r}",
        "It is target / original length, a number of at least 1; llama.cpp's 0.25 is the inverse of 4.",
        "Correct it by hand.",
        mendable=False,
    )


def _check_original(facts: ConfigFacts) -> Iterator[Finding]:
    rope_type, stated = facts.parameters["rope_type"], facts.source.get(ORIGINAL)
    length = facts.text.get("max_position_embeddings")
    if facts.original is None and rope_type_of(rope_type).reads_original:
        yield Finding(
            "no-original-length",
            "error",
            f"{rope_type} has no {ORIGINAL}",
            f"Transformers takes max_position_embeddings ({length}) for it, silently: if that was raised, the "
            "frequencies are wrong.",
            "Pass: hf-posenc doctor ... --original-max-position-embeddings N --fix OUT.",
            mendable=False,
        )
    elif facts.original is None and rope_type == "linear":
        yield Finding(
            "original-not-recorded",
            "note",
            "the original length is not recorded",
            "The linear rule does not need it; extending the model further does.",
            "To extend it further: hf-posenc patch ... --original-max-position-embeddings N --on-scaled replace.",
        )
    elif rope_type_of(rope_type).reads_original and not stated and not facts.text.get(ORIGINAL) and not facts.mark:
        yield Finding(
            "no-original-length",
            "error",
            f"{rope_type} has no {ORIGINAL}; it is {facts.original}",
            f"Transformers takes max_position_embeddings ({length}) for it, silently.",
        )


def _check_lengths_stated(facts: ConfigFacts) -> Iterator[Finding]:
    lengths = facts.lengths
    if not lengths.others:
        return
    other = lengths.others[0].tokens
    if lengths.decided:
        yield Finding(
            "two-original-lengths",
            "note",
            f"more than one original length is stated: {lengths.stated}",
            f"Factors are counted from {lengths.tokens}, which is stated most specifically.",
            f"To count from {other}: hf-posenc patch ... --original-max-position-embeddings {other}.",
        )
    else:
        yield Finding(
            "two-original-lengths",
            "warning",
            f"more than one length is stated: {lengths.stated}",
            "Nothing says which of them the model was trained on, and servers stop at the smallest.",
            "Pass the right one to hf-posenc patch: --original-max-position-embeddings N.",
        )


def _check_theta(facts: ConfigFacts) -> Iterator[Finding]:
    given, top, text = flat_parameters(facts.text), top_level(facts.text, "rope_theta"), facts.text
    inner = given.get("rope_theta")
    if inner is not None and top is not None and inner != top and not is_nested(text):
        yield Finding(
            "two-bases",
            "error",
            f"rope_theta is {top:g} at the top level and {inner:g} in rope_parameters",
            "Transformers 4 reads the first, 5 the second: config.rope_theta = ... has no effect in 5.",
            f"--fix keeps {inner:g}, what Transformers 5 ran with; another: --rope-theta {top:g}.",
        )
    lost = "rope_theta" in facts.source and facts.source["rope_theta"] is None
    missing = bool(text.get("rope_parameters")) and facts.source.get("rope_theta") is None and inner is None
    missing = missing and top is None and not is_nested(text)
    if (lost or missing) and facts.known.rope_theta is None and top is None and not facts.mark:
        yield Finding(
            "base-lost",
            "error",
            "rope_parameters has no rope_theta",
            "Assigning config.rope_scaling or rope_parameters replaces the whole dict, base included; Transformers "
            + ("fails." if lost else f"takes {default_theta(text['model_type']):g}."),
            "Pass: hf-posenc doctor ... --rope-theta 500000 --fix OUT.",
            mendable=False,
        )


def _check_temperature(facts: ConfigFacts) -> Iterator[Finding]:
    source = facts.source
    if facts.parameters["rope_type"] != Yarn.rope_type or facts.mark:
        return
    if bool(source.get("mscale")) != bool(source.get("mscale_all_dim")):
        yield Finding(
            "half-mscale",
            "warning",
            "only one of mscale and mscale_all_dim is set",
            "Transformers uses them together or not at all; other programs use mscale alone.",
            "--fix takes it out, which Transformers reads the same; attention_factor says it to everyone.",
        )
    if source.get("attention_factor") in (1, 1.0):
        yield Finding(
            "temperature-off",
            "note",
            "attention_factor 1 switches YaRN's temperature off",
            "In YaRN's own code attn_factor 1 leaves it on, and the two are often confused.",
            "Remove it if it was attn_factor.",
        )
    as_pose = {"type", "factor", ORIGINAL} == set(source) and facts.text["model_type"] == "llama"
    if as_pose and facts.known.ramp is None:
        yield Finding(
            "pose-curve",
            "note",
            "PoSE's checkpoints are written like this one, and their YaRN has another curve",
            "Transformers has only the curve of YaRN's authors; a PoSE model reads worse with it.",
            "If it was trained with PoSE: hf-posenc doctor ... --ramp harmonic --fix OUT.",
        )


def check_lengths(facts: ConfigFacts, target: int | None) -> Iterator[Finding]:
    length = facts.text.get("max_position_embeddings")
    if isinstance(length, float):
        yield Finding(
            "float-length",
            "error",
            f"max_position_embeddings is {length!r}, a float",
            "Transformers 5.9 and newer refuse it, older ones compare it as it is.",
        )
    if length is None or target is None or int(length) == target:
        return
    if facts.parameters["rope_type"] == "dynamic":
        yield Finding(
            "dynamic-raised",
            "error",
            f"max_position_embeddings is {length:g}, the original length is {target}",
            "Transformers' dynamic rule reads it as the original length, so nothing is scaled up to there.",
        )
        return
    factor = facts.parameters.get("factor", 1.0)
    kept = int(length) == facts.original
    yield Finding(
        "length-not-raised" if kept else "factor-disagrees",
        "warning",
        f"max_position_embeddings is {length:g}, factor {factor:g} x original {facts.original} is {target}",
        "generate() and servers stop at max_position_embeddings."
        if kept
        else "Transformers 4.51 went by the lengths, 4.57 and 5 go by factor: one of them is wrong.",
    )


def check_servers_lengths(facts: ConfigFacts, target: int | None) -> Iterator[Finding]:
    """Look for keys beside ``max_position_embeddings`` at which servers stop before a rule's target."""
    if target is None or not (facts.mark or is_scaled(facts.parameters)):
        return
    below = {key: length for key, length in limits_below(facts.text, target).items() if key != DECLARED}
    if below and facts.parameters["rope_type"] != "dynamic":
        yield Finding(
            "length-key-below-target",
            "warning",
            f"{' and '.join(f'{key} is {length:g}' for key, length in below.items())}, and the rule is for {target}",
            "vLLM takes the smallest of such keys for the longest text, and SGLang the first.",
        )


def _check_layer_types(facts: ConfigFacts) -> Iterator[Finding]:
    """Look for a rule in layers besides those of full attention, where Transformers would put it."""
    default = default_text(facts.text["model_type"])
    try:
        if default is None or rope_label(default) is None:
            return
        scaled = scaled_layer_types(type(default).from_dict(copy.deepcopy(facts.text)))
    except Exception:  # what Transformers cannot build has findings of its own
        return
    if scaled:
        yield Finding(
            "rule-in-other-layers",
            "note",
            f"layers besides those of full attention are scaled: {layer_types_words(scaled)}",
            "They look no further than their window, and were rarely trained with a rule.",
            "patch_model(..., on_scaled='replace') makes them plain where their rule is that of full attention.",
        )


def _check_serializations(facts: ConfigFacts) -> Iterator[Finding]:
    """Compare the two serializations, where a config has both."""
    text = facts.text
    if not text.get("rope_scaling") or not flat_parameters(text):
        return
    old = canonical({k: v for k, v in text.items() if k != "rope_parameters"}, facts.known)
    new = canonical({k: v for k, v in text.items() if k != "rope_scaling"}, facts.known)
    differing = sorted(key for key in {*old, *new} if old.get(key) != new.get(key) and key != "rope_theta")
    if _reading(facts, old) == _reading(facts, new):  # what one leaves out is what Transformers takes there
        differing = [key for key in differing if key.startswith("mrope_")]
    if differing:
        key = differing[-1] if "rope_type" not in differing else "rope_type"
        yield Finding(
            "two-rules",
            "error",
            f"{key} is {old.get(key)!r} in rope_scaling and {new.get(key)!r} in rope_parameters",
            "Transformers 4 and 5 go by rope_scaling, other programs by rope_parameters.",
            "--fix keeps "
            + ("what save_extended noted beside them." if facts.mark else "rope_scaling. Delete it to keep the other."),
        )


def _reading(facts: ConfigFacts, parameters: Mapping[str, Any]) -> Rope | Mapping[str, Any]:
    """Return the rule that a flat dict comes to whatever its base is, or the dict if it comes to none."""
    length = facts.text.get("max_position_embeddings")
    family = {"model_type": facts.text["model_type"], "max_position_embeddings": length}
    try:
        return effective(family, parameters, 1e4, parameters.get("partial_rotary_factor"))
    except (Refused, TypeError, ValueError):
        return parameters


def _check_axes(facts: ConfigFacts) -> Iterator[Finding]:
    if family_of(facts.text["model_type"]).several_axes_in_layers and not facts.source.get("mrope_section"):
        fits = "mrope_section" in facts.parameters
        yield Finding(
            "no-mrope-section",
            "error",
            "the scaling has no mrope_section: how the axes of a position share a head",
            f"Transformers 4.57 and 5.0 fail when the model runs; 5.23 takes {MROPE_SECTION}.",
            Finding.todo if fits else "Copy it from the base model's config.json.",
            mendable=fits,
        )


def check_versions(facts: ConfigFacts, rope: Rope | None) -> Iterator[Finding]:
    for version in VERSIONS:
        try:
            read = read_by(version, facts.text)
        except Refused as refusal:
            severity = "error" if version == VERSIONS[-1] else "note" if refusal.for_good else "warning"
            yield Finding(
                f"refused-{version}",
                severity,
                f"Transformers {version} cannot load it: {refusal}",
                "It fails when the model is built or first runs.",
                _NO_SERIALIZATION if refusal.for_good else Finding.todo,
            )
            continue
        if read is not None and read.every_layer and replace(read, every_layer=False) == rope:
            yield Finding(
                f"one-rule-{version}",
                "note",
                f"Transformers {version} has one rule for all layers of {facts.text['model_type']}: {read}",
                "Its layers with a sliding window are scaled too, which nothing was trained with.",
                _NO_SERIALIZATION,
            )
            continue
        if read is not None and rope is not None and read != rope:
            yield Finding(
                f"read-otherwise-{version}",
                "error",
                f"Transformers {version} loads {read}; meant is {rope}",
                "It says nothing, and the model only reads worse.",
            )
    flat = facts.text.get("rope_parameters") and is_nested(facts.text) and full_label(facts.text) is None
    if flat:
        yield Finding(
            "flat-on-layers",
            "error",
            "rope_parameters is one dict, and each layer type of this family has its own",
            "Transformers 5 does not read it: it needs the settings under full_attention.",
        )


CHECKS = (
    _check_words,
    _check_factor,
    _check_original,
    _check_lengths_stated,
    _check_theta,
    _check_axes,
    _check_temperature,
    _check_serializations,
    _check_layer_types,
)


@dataclass(frozen=True)
class ConfigMeaning(ConfigFacts):
    """The meaning of a config.json.

    Attributes:
        rope: The rule it means; None if it has none or it cannot be read.
        target: What ``max_position_embeddings`` should say, in tokens.
        findings: What is wrong.
    """

    rope: Rope | None
    target: int | None
    findings: tuple[Finding, ...]


def read_meaning(config: Mapping[str, Any], known: Known | None = None) -> ConfigMeaning:
    """Return the meaning of a config.json and the problems in it.

    Args:
        config: Its JSON, in any serialization.
        known: What the user says about the model, which wins.

    Raises:
        ValueError: It is no model's config.
    """
    known = known or Known()
    text = text_part(config)[1]
    if not isinstance(text.get("model_type"), str):
        raise InvalidRequestError("the config has no model_type, so it is no Transformers model's config.json.")
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(text.get(key) or {}, Mapping):
            raise InvalidRequestError(f"{key} must be a dictionary, got {text[key]!r}.")
    mark, unknown = read_mark(text.get(MARK) or config.get(MARK)), []
    if not has_rope(text):
        nothing = OriginalLength(text.get("max_position_embeddings"), "")
        return ConfigMeaning(text, {}, {}, nothing, known, None, None, None, ())
    if mark and known.original is not None:
        mark = {**mark, ORIGINAL: known.original}
    parameters = canonical(text, known)
    lengths = original_of(text, parameters, mark, known)
    original = lengths.tokens
    if original is not None and (
        rope_type_of(parameters["rope_type"]).reads_original or parameters["rope_type"] == Linear.rope_type
    ):
        parameters[ORIGINAL] = original
    try:
        if mark and rule_is_elsewhere(mark):  # the config itself is the base model's
            mark = None
    except ValueError as error:
        why, todo = "Only the rest of the config is read below.", "Look at it with the version that wrote it."
        unknown = [Finding("unknown-extension", "error", str(error).rstrip("."), why, todo, mendable=False)]
        mark = None
    if mark:
        parameters = from_mark(text, parameters, mark)
    facts = ConfigFacts(text, parameters, source_of(text), lengths, known, mark or None)
    rope = meant(facts)
    target = target_length(facts)
    findings = [*unknown, *(finding for check in CHECKS for finding in check(facts))]
    findings += (*check_lengths(facts, target), *check_servers_lengths(facts, target))
    if all(finding.mendable for finding in findings):
        findings += check_versions(facts, rope)
    return ConfigMeaning(**vars(facts), rope=rope, target=target, findings=tuple(findings))
