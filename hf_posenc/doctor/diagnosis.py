"""``diagnose``: what a checkpoint or live model declares, what reads it how, what is wrong; the corrected config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_posenc.checkpoint.extended import TOKENIZER_CONFIG
from hf_posenc.checkpoint.manifest import (
    ADAPTER_CONFIG,
    CONFIG,
    MANIFEST,
    is_encoding,
    mark_from,
    read_manifest,
)
from hf_posenc.checkpoint.pretrained import check_may_read, folder_with, is_gguf
from hf_posenc.doctor.config_checks import Finding, check_was_read, read_meaning
from hf_posenc.doctor.config_meaning import Known, serialization_name
from hf_posenc.doctor.gguf_file import look_at_gguf
from hf_posenc.doctor.information_reach import look_at_reach
from hf_posenc.doctor.live_model import NOT_APPLIED, against_meaning, held_by_modules, load_live, look_at_modules
from hf_posenc.doctor.manifest_checks import (
    UNLIMITED,
    base_config,
    check_base,
    check_manifest_exists,
    check_mark,
    check_tokenizer_limit,
    look_at_adapter,
    manifest_lines,
)
from hf_posenc.doctor.mending import mended
from hf_posenc.doctor.transformers_readers import VERSIONS, Refused, read_by, rope_type_of, text_part
from hf_posenc.errors import InvalidRequestError, MissingFileError
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.methods.base import Extension
from hf_posenc.patching.extension import rule_is_elsewhere
from hf_posenc.patching.lengths import MARK
from hf_posenc.utils.files import read_json, write_whole
from hf_posenc.utils.hub import is_path


@dataclass(frozen=True)
class Diagnosis:
    """The result of a diagnosis.

    Attributes:
        source: What was looked at.
        model_type: The family.
        lines: Topic and fact, for people: what is declared, where the original length comes from, who loads what.
        findings: What is wrong, and what is worth knowing.
        config: The JSON that was read; None for a live model and an adapter.
        known: What the user said about it.
        file: The file it was read from, if it was.
    """

    source: str
    model_type: str
    lines: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]
    config: dict[str, Any] | None = None
    known: Known = field(default_factory=Known)
    file: Path | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong: at most notes."""
        return all(finding.severity == "note" for finding in self.findings)


def diagnose(source: Any, known: Known | None = None, *, live: bool = False) -> Diagnosis:
    """Look at a checkpoint, a config or a live model; nothing is changed.

    Args:
        source: A folder, a config.json, a .gguf file or a name on the Hub; the JSON of a config as a dict; a
            ``PreTrainedConfig``; or a loaded model, whose modules are compared with its config.
        known: What the config does not say; it wins.
        live: Load the model of a checkpoint too, on the CPU, and compare its modules with what the config means.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no model's config, or the Hub has no such model; or, with ``live``, it cannot be loaded.
    """
    known = known or Known()
    if known.name is None and isinstance(source, str):  # by which a published checkpoint is known
        known = replace(known, name=source)
    if isinstance(source, nn.Module):
        return _of_model(source)
    if isinstance(source, PreTrainedConfig):
        return _of_config("config", json.loads(source.to_json_string(use_diff=False)), known)
    if isinstance(source, Mapping):
        return _of_config("config", dict(source), known)
    if live:
        return _with_modules(diagnose(source, known), source)
    path = Path(source).expanduser()
    if is_gguf(path):
        return _of_gguf(path, known)
    if path.is_file():
        return _of_config(str(source), read_json(path), known, path)
    file = _config_file(path, str(source))
    if file.name == ADAPTER_CONFIG:
        lines, findings = look_at_adapter(file.parent)
        return Diagnosis(str(source), "adapter", tuple(lines), tuple(findings))
    return _of_config(str(source), read_json(file), known, file)


def _config_file(path: Path, given: str) -> Path:
    """Return the config of a model or an adapter, in a folder or, downloaded with its manifest, on the Hub."""
    if not path.is_dir():
        if is_path(given):
            raise MissingFileError(f"there is no file or folder {given!r}.")
        check_may_read(given, {})
    folder = folder_with(path if path.is_dir() else given, (CONFIG, ADAPTER_CONFIG, MANIFEST, TOKENIZER_CONFIG))
    for name in (CONFIG, ADAPTER_CONFIG):
        if folder is not None and (folder / name).is_file():
            return folder / name
    if path.is_dir():
        raise MissingFileError(f"folder {given!r} has no config.json.")
    raise InvalidRequestError(f"cannot read {given!r}: the Hugging Face Hub has no {CONFIG} in it.")


def _of_config(name: str, config: dict[str, Any], known: Known, file: Path | None = None) -> Diagnosis:
    findings: list[Finding] = []
    manifest = None
    if file is not None:
        try:
            manifest = read_manifest(file.parent)
        except ValueError as error:
            why = "load_extended and from_pretrained do not apply what it says; the config alone is read below."
            todo = f"Save the model again with save_extended, or remove {MANIFEST} if it is not extended."
            findings.append(Finding("manifest-refused", "error", str(error).rstrip("."), why, todo, mendable=False))
        else:
            findings += check_manifest_exists(config, manifest)
    if file is not None and manifest is not None and is_encoding(manifest):
        facts = (*manifest_lines(manifest), ("trained on", f"{manifest['context_length']} tokens"))
        wrong = (*check_mark(config, manifest), *check_tokenizer_limit(_tokenizer_limit(file), manifest))
        return Diagnosis(name, str(config.get("model_type")), facts, wrong, config, known, file)
    if file is not None and manifest is not None and rule_is_elsewhere(manifest):
        return _of_attention_rule(name, config, known, file, manifest)
    if manifest is not None and MARK not in text_part(config)[1]:
        marked = {key: manifest[key] for key in (*Extension.FACTS, "rope_theta")}
        config = {**config, MARK: marked}
    meaning = read_meaning(config, known)
    text, by = meaning.text, meaning.lengths.by
    tokens = f"{meaning.original} tokens, given by {by}" if meaning.original else by
    lines = [("declared", f"{meaning.rope or 'no rule that can be read'}, in {serialization_name(text)}")]
    if meaning.rope is None and not meaning.parameters:
        lines = [("declared", "no rotary embedding")]
    else:
        lines += [("original", tokens), ("target", f"{meaning.target} tokens")]
        lines += [(f"{version} loads", _reading(version, text)) for version in VERSIONS]
    if meaning.rope is not None and rope_type_of(meaning.rope.rope_type).reads_original:
        lines.append(("needs", "Transformers 4.43 or newer; older ones accept only a dictionary with two fields"))
    findings += [*meaning.findings, *check_was_read(config)]
    reach, hidden = look_at_reach(meaning)
    lines += reach
    findings += hidden
    if file is not None and meaning.rope is not None:
        findings += _check_tokenizer(_tokenizer_limit(file), meaning.rope.rope_type, meaning.target, meaning.model_type)
    return Diagnosis(name, meaning.model_type, tuple(lines), tuple(findings), config, known, file)


def _of_attention_rule(
    name: str, config: dict[str, Any], known: Known, file: Path, manifest: dict[str, Any]
) -> Diagnosis:
    """Look at a folder whose rule is in its manifest alone, and whose config.json is the base model's."""
    found, base = _of_config(name, config, known), base_config(config, manifest)
    limit = _tokenizer_limit(file)
    findings = (*found.findings, *check_base(config, base), *check_tokenizer_limit(limit, manifest))
    lines = (*manifest_lines(manifest), *found.lines)
    key, text = text_part(base)
    marked = text | mark_from(manifest)
    base = {**base, key: marked} if key else marked
    return replace(found, lines=lines, findings=findings, config=base, file=file)


def _tokenizer_limit(file: Path) -> Any:
    """Return ``model_max_length`` of the tokenizer beside a config.json; None if nothing says it."""
    tokenizer = file.parent / TOKENIZER_CONFIG
    return read_json(tokenizer).get("model_max_length") if tokenizer.is_file() else None


def _reading(version: str, text: dict[str, Any]) -> str:
    try:
        return str(read_by(version, text) or "not known for this family")
    except Refused as refusal:
        return f"nothing: {refusal}"


def _check_tokenizer(limit: Any, rope_type: str, target: int | None, model_type: str) -> Iterator[Finding]:
    if not isinstance(limit, (int, float)) or limit > UNLIMITED or target is None:
        return
    if rope_type not in ("default", "dynamic") and limit < target:
        yield Finding(
            "tokenizer-limit",
            "warning",
            f"the tokenizer's model_max_length is {limit:g}, the target {target}",
            "Texts are cut there, or a warning says that the model cannot read them.",
            f"--fix FOLDER writes {TOKENIZER_CONFIG} too.",
        )
    elif rope_type == "default" and limit > target and model_type == "llama":
        yield Finding(
            "longlora-merge",
            "warning",
            f"the tokenizer's model_max_length is {limit:g}, and the config is unscaled at {target}",
            "LongLoRA's merges look like this: its script does not write the linear rule it trained with.",
            f"If it is one: hf-posenc doctor ... --trained-length {limit:g} --fix OUT.",
            mendable=False,
        )


def _of_gguf(path: Path, known: Known) -> Diagnosis:
    if not path.is_file():
        raise MissingFileError(f"there is no file {str(path)!r}.")
    lines, findings, meaning, config = look_at_gguf(path, known)
    return Diagnosis(str(path), meaning.model_type, tuple(lines), tuple(findings), config, known, path)


def _with_modules(diagnosis: Diagnosis, source: Any) -> Diagnosis:
    """Add to a checkpoint's diagnosis what its modules hold when it is loaded."""
    if diagnosis.config is None:
        raise InvalidRequestError(
            f"{diagnosis.source} is an adapter, which holds no positions: look at its base model."
        )
    model = RotaryModel(load_live(source))
    _, holds, findings = look_at_modules(model)
    # Plain Transformers loads the base model of such a folder: that is no fault of the folder.
    findings = [replace(each, severity="note") if each.code == NOT_APPLIED else each for each in findings]
    lines = [("loaded", held) for held in held_by_modules(model)] or [("loaded", "no rotary module that is known")]
    if not any(finding.code == "gguf-dropped" for finding in diagnosis.findings):
        findings += against_meaning(model, read_meaning(diagnosis.config, diagnosis.known).rope)
    lines = [*diagnosis.lines, *lines, ("holds", holds)]
    return replace(diagnosis, lines=tuple(lines), findings=(*diagnosis.findings, *findings))


def _of_model(model: nn.Module) -> Diagnosis:
    rotary = RotaryModel(model)
    declared, holds, findings = look_at_modules(rotary)
    declarations = ", ".join(f"{key} {value}" for key, value in declared.items() if value not in ({}, None))
    loaded = [("loaded", held) for held in held_by_modules(rotary)]
    lines = (("declared", declarations or "nothing that can be read"), *loaded, ("holds", holds))
    return Diagnosis(type(rotary.model).__name__, rotary.model_type, lines, tuple(findings))


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as plain text, a topic a line."""
    lines = [f"{diagnosis.source}: {diagnosis.model_type}"]
    lines += [f"  {topic:<11}{fact}" for topic, fact in diagnosis.lines]
    for found in diagnosis.findings:
        lines += [f"\n{found.severity}: {found.what}.", f"  {found.why}", f"  {found.todo}"]
    count = sum(finding.severity != "note" for finding in diagnosis.findings)
    verdict = (
        "sound: nothing is wrong." if diagnosis.sound else f"{count} thing{'s are' if count > 1 else ' is'} wrong."
    )
    return "\n".join([*lines, "", verdict])


def write_mended(diagnosis: Diagnosis, out: str | Path) -> list[Path]:
    """Write the corrected config, and into a folder the tokenizer's with its limit raised, where that was too low.

    Args:
        diagnosis: Diagnosis of a checkpoint or a config.
        out: A folder, or a file that ends in ``.json``. The file that was read is replaced only after a copy of it
            was put beside it, with ``.bak`` after its name.

    Returns:
        The files written.

    Raises:
        ValueError: It cannot be corrected, or another file is in the way.
    """
    if diagnosis.config is None:
        raise InvalidRequestError(f"{diagnosis.source}: there is no config.json to correct.")
    target = Path(out).expanduser()
    fixed = mended(diagnosis.config, diagnosis.known)
    into_folder = target.suffix != ".json"
    contents = {target / CONFIG if into_folder else target: fixed}
    if into_folder and any(finding.code == "tokenizer-limit" for finding in diagnosis.findings) and diagnosis.file:
        tokenizer = read_json(diagnosis.file.parent / TOKENIZER_CONFIG)
        manifest = read_manifest(diagnosis.file.parent) or {}  # which knows the target where the config cannot say it
        limit = manifest.get("context_length", text_part(fixed)[1]["max_position_embeddings"])
        contents[target / TOKENIZER_CONFIG] = {**tokenizer, "model_max_length": limit}
    own = diagnosis.file.resolve().parent if diagnosis.file else None
    for file in contents:
        _make_room(
            file, (file.resolve().parent == own and file.name in (CONFIG, TOKENIZER_CONFIG)) or file == diagnosis.file
        )
    for file, content in contents.items():
        write_whole(file, json.dumps(content, indent=2) + "\n")
    return list(contents)


def _make_room(file: Path, is_input: bool) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        return
    backup = file.with_name(file.name + ".bak")
    if not is_input:
        raise InvalidRequestError(f"{str(file)!r} is there already. Give another path for the corrected config.")
    if backup.exists():
        raise InvalidRequestError(
            f"{str(backup)!r} is there already, so {file.name} is not replaced. Move it away first."
        )
    shutil.copy2(file, backup)
