"""The folder of a PEFT adapter: what its base has to be extended by, and whether it says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.extended import TOKENIZER_CONFIG
from hf_posenc.checkpoint.manifest import ADAPTER_CONFIG, CONFIG, MANIFEST, read_manifest
from hf_posenc.doctor.attention_rule import check_tokenizer_limit
from hf_posenc.doctor.family_facts import text_config
from hf_posenc.doctor.findings import Finding
from hf_posenc.errors import InvalidRequestError
from hf_posenc.patching.extension import MARK, read_mark
from hf_posenc.utils.files import read_json

_WHY = "PEFT puts the adapter on the plain base model, for whose positions it was not trained: it reads wrong."
_TODO = "Save it again from the patched model; or patch the base as in training, put the adapter on, and save_extended."
UNLIMITED = 1e9  # Transformers writes 1e30 for a tokenizer without a limit


def look_at_adapter(path: Path) -> tuple[list[tuple[str, str]], list[Finding]]:
    """Return what an adapter's folder declares, by topic, and what is wrong with it.

    Raises:
        ValueError: Its manifest is damaged.
    """
    settings = _read(path / ADAPTER_CONFIG)
    base, limit = settings.get("base_model_name_or_path"), _read(path / TOKENIZER_CONFIG).get("model_max_length")
    manifest = read_manifest(path)
    if manifest is not None:
        said = f"{manifest['method']} x{manifest['factor']:g}, {manifest['context_length']} tokens, in its manifest"
        return [("declared", f"{said}, for {base}")], check_tokenizer_limit(limit, manifest)
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
    """Return how far a base model in a local folder says that it reads."""
    config: Mapping[str, Any] = _read(Path(base).expanduser() / CONFIG)
    length = text_config(dict(config))[1].get("max_position_embeddings") if config else None
    return length if isinstance(length, int) else None


def _read(file: Path) -> dict[str, Any]:
    content = read_json(file) if file.is_file() else {}
    if not isinstance(content, dict):
        raise InvalidRequestError(f"{str(file)!r} is no config: it holds a {type(content).__name__}.")
    return content
