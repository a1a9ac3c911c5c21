"""Folders with a manifest: rules that no config can say, and PEFT adapters, whose base has to be extended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.extended import TOKENIZER_CONFIG
from hf_posenc.checkpoint.manifest import ADAPTER_CONFIG, CONFIG, MANIFEST, is_encoding, read_manifest
from hf_posenc.doctor.config_checks import Finding, read_meaning
from hf_posenc.doctor.transformers_readers import VERSIONS, text_part
from hf_posenc.methods.base import encoding_of, encoding_rope_type
from hf_posenc.patching.extension import read_mark, rule_is_elsewhere
from hf_posenc.patching.lengths import MARK
from hf_posenc.utils.files import read_json


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
        without = f"{versions} fail with a KeyError that names load_extended: with RoPE the weights would read as noise"
    return [
        ("manifest", f"{rule_in_words(manifest)}: the rule is in {MANIFEST}, no config can say it"),
        ("with it", "load_extended, hf-posenc eval and hf-posenc finetune run the rule"),
        ("without", without),
    ]


def check_manifest_exists(config: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> list[Finding]:
    """Return a finding if a config says that a rule is in a manifest, and the folder has none."""
    mark = read_mark(text_part(config)[1].get(MARK))
    try:
        if manifest is not None or mark is None or not rule_is_elsewhere(mark):
            return []
    except ValueError:  # read_meaning reports it
        return []
    what = f"{CONFIG} says that the model was extended: {rule_in_words(mark)}; and {MANIFEST}, which has it, is gone"
    why = "No config can say this rule, so everyone loads the base model."
    if is_encoding(mark):
        why = "No config can say this rule, so nobody can load the model."
    todo = "Save it again with save_extended, or patch it as it was and do so."
    return [Finding("manifest-lost", "error", what, why, todo, mendable=False)]


def check_mark(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[Finding]:
    """Return a finding if a config no longer says that its model was trained with another encoding than RoPE."""
    parameters = text_part(config)[1].get("rope_parameters") or {}
    sections = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    if any(encoding_of(section.get("rope_type")) == manifest["method"] for section in sections):
        return []
    what = f"{CONFIG} does not declare rope_type {encoding_rope_type(manifest['method'])!r}, as it was saved with"
    why = "Whoever loads it without hf_posenc runs the model with RoPE, which it was not trained with."
    return [
        Finding("encoding-unmarked", "error", what, why, "Save the model again with save_extended.", mendable=False)
    ]


def base_config(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json as it was saved: with the base model's rotary settings."""
    key, text = text_part(config)
    changed = ("rope_scaling", "rope_theta", MARK)
    restored = {k: v for k, v in text.items() if k not in changed} | manifest.get("base_config", {})
    return {**config, key: restored} if key else restored


def check_base(config: Mapping[str, Any], base: Mapping[str, Any]) -> list[Finding]:
    """Return the changes of the base model's positions since the folder was saved.

    Args:
        config: The config.json in the folder.
        base: What ``base_config`` returns for it.
    """
    found, expected = read_meaning(config), read_meaning(base)
    if found.rope != expected.rope:
        what = f"{CONFIG} declares {found.rope or 'no rule that can be read'}, and was saved with {expected.rope}"
        why = "load_extended puts the manifest's rule there; everyone else reads another model than the base."
        return [Finding("base-rescaled", "error", what, why)]
    length, saved = (text_part(one)[1].get("max_position_embeddings") for one in (config, base))
    if length == saved:
        return []
    what = f"{CONFIG} says {length} tokens, and was saved with the base model's {saved}"
    why = "The rule is not in it: past its own length the base model reads on, without a warning, and reads badly."
    return [Finding("base-enlarged", "error", what, why)]


def check_tokenizer_limit(limit: Any, manifest: Mapping[str, Any]) -> list[Finding]:
    """Return the findings about a tokenizer's ``model_max_length``."""
    target = manifest["context_length"]
    if not isinstance(limit, (int, float)) or limit >= target:
        return []
    what = f"the tokenizer's model_max_length is {limit:g}, the manifest's target {target}"
    why = "Texts are cut there, or a warning says that the model cannot read them."
    return [Finding("tokenizer-limit", "warning", what, why, f"Set it to {target}.", mendable=False)]


_WHY = "PEFT puts the adapter on the plain base model, for whose positions it was not trained: it reads wrong."
_TODO = "Save it again from the patched model; or patch the base as in training, put the adapter on, and save_extended."
UNLIMITED = 1e9  # Transformers writes 1e30 for a tokenizer without a limit


def look_at_adapter(path: Path) -> tuple[list[tuple[str, str]], list[Finding]]:
    """Return the statements of an adapter's folder, by topic, and the problems in it.

    Raises:
        ValueError: Its manifest is damaged.
    """
    settings = _read(path / ADAPTER_CONFIG)
    base, limit = settings.get("base_model_name_or_path"), _read(path / TOKENIZER_CONFIG).get("model_max_length")
    manifest = read_manifest(path)
    if manifest is not None:
        in_manifest = (
            f"{manifest['method']} x{manifest['factor']:g}, {manifest['context_length']} tokens, in its manifest"
        )
        return [("declared", f"{in_manifest}, for {base}")], check_tokenizer_limit(limit, manifest)
    if mark := read_mark(settings.get(MARK)):
        what = f"{ADAPTER_CONFIG} says it was trained with {mark['method']} x{mark['factor']:g}, and {MANIFEST} is gone"
        return [("declared", f"{mark['method']} x{mark['factor']:g}, for {base}")], [_lost(what)]
    length = _length_of(str(base))
    trained = limit if isinstance(limit, (int, float)) and limit < UNLIMITED else None
    own = _read(Path(str(base)).expanduser() / TOKENIZER_CONFIG).get("model_max_length")
    as_base = isinstance(own, (int, float)) and trained is not None and own >= trained  # Qwen's say more than the model
    if length is not None and trained is not None and trained > length and not as_base:
        what = f"its tokenizer was set to {trained:g} tokens, and its base model {base} reads {length}"
        return [("declared", f"nothing, for {base}")], [_lost(f"{what}: the base was extended in training")]
    against = f"its tokenizer says {trained or 'no length'}, its base {length or 'is not here to be looked at'}"
    note = Finding(
        "bare-adapter",
        "note",
        "the adapter says nothing about positions",
        f"Whether its base was extended in training cannot be known from it ({against}); if it was, it reads wrong on "
        "the plain one.",
        "Save it from the patched model, or with save_extended: a manifest beside it says what the base needs.",
    )
    return [("declared", f"nothing, for {base}")], [note]


def _lost(what: str) -> Finding:
    return Finding("adapter-without-extension", "error", what, _WHY, _TODO, mendable=False)


def _length_of(base: str) -> int | None:
    """Return ``max_position_embeddings`` of a base model in a local folder, in tokens; None if it is not known."""
    config = _read(Path(base).expanduser() / CONFIG)
    length = text_part(config)[1].get("max_position_embeddings") if config else None
    return length if isinstance(length, int) else None


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
