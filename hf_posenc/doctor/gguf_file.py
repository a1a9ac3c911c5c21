"""The positions that a .gguf file declares, next to those that Transformers loads from it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig

from hf_posenc.checkpoint.pretrained import gguf_rope, open_gguf
from hf_posenc.doctor.config_checks import ConfigMeaning, Finding, read_meaning
from hf_posenc.doctor.config_meaning import ORIGINAL, Known
from hf_posenc.doctor.transformers_readers import VERSIONS, flat_parameters, full_label, read_by, text_part

# What a version of Transformers reads from a config.json is no matter here.
_OF_CONFIGS = ("read-otherwise", "refused", "one-rule", "two-rules", "length-not-raised", "factor-disagrees")
# llama.cpp divides each frequency by its number here, whatever the length (Llama 3.1).
_DIVISORS = "rope_freqs.weight"


def look_at_gguf(
    path: Path, known: Known
) -> tuple[list[tuple[str, str]], list[Finding], ConfigMeaning, dict[str, Any]]:
    """Return lines, findings, the meaning, and the JSON of a config that says what the file says.

    Raises:
        ImportError: The gguf package is not installed.
        ValueError: It is no GGUF file.
    """
    declared, tensors = gguf_rope(path)
    metadata, divisors = _metadata(path)
    plain = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    loaded: dict[str, Any] = json.loads(plain.to_json_string(use_diff=False))
    config = {**copy.deepcopy(loaded), "rope_scaling": _scaling(declared)}
    if divisors and tensors == [_DIVISORS]:
        length = metadata.get("context_length") or text_part(loaded)[1].get("max_position_embeddings")
        attention = float(declared.get("attn_factor", 1.0))
        lists = {"short_factor": divisors, "long_factor": divisors, "attention_factor": attention, "factor": 1.0}
        config["rope_scaling"] = {"rope_type": "longrope", **lists, ORIGINAL: known.original or length}
    findings = list(_disagreements(metadata, config))
    meaning = read_meaning(config, known)
    findings += [finding for finding in meaning.findings if not finding.code.startswith(_OF_CONFIGS)]
    mendable = tensors in ([], [_DIVISORS])
    if tensors or config["rope_scaling"]:
        declarations = [*(f"{key} {value}" for key, value in declared.items()), *tensors]
        findings.append(
            Finding(
                "gguf-dropped",
                "error",
                f"Transformers drops the scaling of a .gguf file ({', '.join(declarations)})",
                "It loads the model unscaled and says nothing.",
                "Take the original safetensors checkpoint, or its weights with the config that --fix writes."
                if mendable
                else "Take the original safetensors checkpoint: the divisors are tensors here.",
                mendable=mendable,
            )
        )
    in_file = {**metadata, **{f"rope.scaling.{key}": value for key, value in declared.items()}}
    text = text_part(loaded)[1]
    reading = read_by(VERSIONS[-1], {**text, "rope_scaling": None})
    lines = [
        ("declared", f"{meaning.rope}, in the file's metadata" + (" and tensors" if tensors else "")),
        ("in file", ", ".join([*(f"{key} {value}" for key, value in in_file.items()), *tensors])),
        (f"{transformers.__version__} loads", f"{reading}, {text.get('max_position_embeddings')} tokens"),
        ("original", meaning.lengths.by),
    ]
    return lines, findings, meaning, config


def _metadata(path: Path) -> tuple[dict[str, Any], list[float] | None]:
    """Return length and base as the file states them, and Llama 3.1's divisors if it has those."""
    reader = open_gguf(path)
    family = reader.fields["general.architecture"].contents()
    stated = {key: reader.fields.get(f"{family}.{key}") for key in ("context_length", "rope.freq_base")}
    tensor = next((tensor for tensor in reader.tensors if tensor.name == _DIVISORS), None)
    divisors = None if tensor is None else [float(value) for value in tensor.data.reshape(-1)]
    return {key: field.contents() for key, field in stated.items() if field is not None}, divisors


def _disagreements(metadata: Mapping[str, Any], config: dict[str, Any]) -> Iterator[Finding]:
    """Compare length and base with what Transformers loads; the file's are put into ``config``."""
    text = text_part(config)[1]
    length, theta = metadata.get("context_length"), metadata.get("rope.freq_base")
    if length is not None and length != text.get("max_position_embeddings"):
        yield _otherwise("context_length", length, text.get("max_position_embeddings"))
        config["max_position_embeddings"] = int(length)
    loaded = flat_parameters(text).get("rope_theta")
    # float32 there; a base of Gemma's windowed layers is another key.
    if theta is not None and loaded is not None and abs(theta / loaded - 1) > 1e-6:
        yield _otherwise("rope.freq_base", theta, loaded)
        parameters = config["rope_parameters"]
        (parameters[full_label(text)] if full_label(text) else parameters)["rope_theta"] = float(theta)


def _otherwise(key: str, stated: Any, loaded: Any) -> Finding:
    return Finding(
        "gguf-otherwise",
        "error",
        f"{key} is {stated:g} in the file, and Transformers loads {loaded}",
        "The two programs run different models.",
        "--fix writes a config with what the file says.",
    )


def _scaling(declared: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return llama.cpp's metadata in Transformers' words; None if it says there is no scaling."""
    names = {"type": "rope_type", "factor": "factor", "original_context_length": ORIGINAL}
    scaling = {names.get(key, key): value for key, value in declared.items() if key in {*names, "attn_factor"}}
    if scaling.get("rope_type", "none") == "none" and scaling.get("factor", 1.0) in (0.0, 1.0):
        return None
    if scaling.get("rope_type", "none") == "none":
        scaling["rope_type"] = "linear"  # llama.cpp's reading of a factor alone
    return scaling
