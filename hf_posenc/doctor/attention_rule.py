"""Checkpoints whose rule is in the manifest alone, since no config can say it: ``config.json`` is the base model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_posenc.checkpoint.manifest import CONFIG, MANIFEST, is_encoding
from hf_posenc.doctor.diagnosis import read_dialect
from hf_posenc.doctor.dialects import VERSIONS
from hf_posenc.doctor.family_facts import text_config
from hf_posenc.doctor.findings import Finding
from hf_posenc.methods.base import ENCODING_MARK
from hf_posenc.patching.extension import MARK, read_mark, rule_is_elsewhere


def rule_in_words(manifest: Mapping[str, Any]) -> str:
    """Return method, factor, lengths and options."""
    options = "".join(f", {name} {value}" for name, value in manifest["options"].items())
    lengths = f"{manifest['original_max_position_embeddings']} -> {manifest['context_length']} tokens"
    return f"{manifest['method']} x{manifest['factor']:g}, {lengths}{options}"


def manifest_lines(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the topics and facts of a rule that is in the manifest alone."""
    versions = f"Transformers {', '.join(VERSIONS)}"
    without = f"{versions} and servers read the base model, as {CONFIG} has it"
    if is_encoding(manifest):
        without = f"{versions} fail with a KeyError that names it: with RoPE the weights would read as noise"
    return [
        ("manifest", f"{rule_in_words(manifest)}: the rule is in {MANIFEST}, no config can say it"),
        ("with it", "load_extended, hf-posenc eval and hf-posenc finetune run the rule"),
        ("without", without),
    ]


def check_manifest_is_there(config: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> list[Finding]:
    """Return whether a config says that a rule is in a manifest that is not there."""
    mark = read_mark(text_config(config)[1].get(MARK))
    try:
        if manifest is not None or mark is None or not rule_is_elsewhere(mark):
            return []
    except ValueError:  # read_dialect tells that
        return []
    what = f"{CONFIG} says that the model was extended: {rule_in_words(mark)}; and {MANIFEST}, which has it, is gone"
    why = "No config can say this rule, so everyone loads the base model."
    todo = "Save it again with save_extended, or patch it as it was and do so."
    return [Finding("manifest-lost", "error", what, why, todo, mendable=False)]


def check_mark(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[Finding]:
    """Return whether a config no longer says that its model was trained with another encoding than RoPE."""
    expected = ENCODING_MARK + manifest["method"]
    parameters = text_config(config)[1].get("rope_parameters") or {}
    sections = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    if any(section.get("rope_type") == expected for section in sections):
        return []
    what = f"{CONFIG} does not declare rope_type {expected!r}, as it was saved with"
    why = "Whoever loads it without hf_posenc runs the model with RoPE, which it was not trained with."
    return [
        Finding("encoding-unmarked", "error", what, why, "Save the model again with save_extended.", mendable=False)
    ]


def base_config(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json as it was saved: with the base model's rotary settings."""
    key, text = text_config(config)
    changed = ("rope_scaling", "rope_theta", MARK)
    restored = {k: v for k, v in text.items() if k not in changed} | manifest.get("base_config", {})
    return {**config, key: restored} if key else restored


def check_base(config: Mapping[str, Any], base: Mapping[str, Any]) -> list[Finding]:
    """Return what was changed of the base model's positions since the folder was saved.

    Args:
        config: The config.json there is.
        base: What ``base_config`` makes of it.
    """
    found, expected = read_dialect(config), read_dialect(base)
    if found.rope != expected.rope:
        what = f"{CONFIG} declares {found.rope or 'no rule that can be read'}, and was saved with {expected.rope}"
        why = "load_extended puts the manifest's rule there; everyone else reads another model than the base."
        return [Finding("base-rescaled", "error", what, why)]
    length, saved = (text_config(one)[1].get("max_position_embeddings") for one in (config, base))
    if length == saved:
        return []
    what = f"{CONFIG} says {length} tokens, and was saved with the base model's {saved}"
    why = "The rule is not in it: past its own length the base model reads on, without a warning, and reads badly."
    return [Finding("base-enlarged", "error", what, why)]


def check_tokenizer_limit(limit: Any, manifest: Mapping[str, Any]) -> list[Finding]:
    """Return what is wrong with a tokenizer's ``model_max_length``."""
    target = manifest["context_length"]
    if not isinstance(limit, (int, float)) or limit >= target:
        return []
    what = f"the tokenizer's model_max_length is {limit:g}, the manifest's target {target}"
    why = "Texts are cut there, or a warning says that the model cannot read them."
    return [Finding("tokenizer-limit", "warning", what, why, f"Set it to {target}.", mendable=False)]
