"""llama.cpp: the metadata and tensors of a GGUF file that say the rule, and the flags that do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hf_posenc.checkpoint.manifest import CONFIG
from hf_posenc.errors import InvalidRequestError
from hf_posenc.exports.folder import PLAIN, ExportFolder, check_one_list, check_rule, command, read_folder
from hf_posenc.exports.nearest import refuse_attention_rule
from hf_posenc.methods.base import STOPPED, plain_frequencies
from hf_posenc.methods.yarn import Yarn

# What convert_hf_to_gguf.py calls the families whose conversion was read (conversion/llama.py, conversion/qwen.py).
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Of these, the ones whose graph loads divisors per pair (src/models/llama.cpp).
_WITH_DIVISORS = frozenset({"llama"})
_CONVERTER_ORIGINAL = 8192


def gguf_metadata(path: str | Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file that make llama.cpp run the rule of a folder of ``save_extended``.

    llama3 and longrope are divisors per pair: they need the tensors of ``gguf_tensors`` besides. Metadata has floats
    in 32 bits. The ``yarn_beta_*`` keys, as the converter writes them, are read for two other architectures only
    (Grok, Mistral 3): for these the flags ``--yarn-beta-fast`` and ``--yarn-beta-slow`` count.

    Returns:
        ``{arch}.context_length`` and ``{arch}.rope.scaling.original_context_length`` in tokens (int),
        ``{arch}.rope.scaling.type`` (str), the others float.

    Raises:
        FileNotFoundError: There is no manifest, or no config.json.
        ValueError: llama.cpp cannot express the rule, or its reading of the family was not checked.
    """
    return metadata_of(read_folder(path))


def gguf_tensors(path: str | Path) -> dict[str, list[float]]:
    """Return the divisors per pair that the GGUF file needs as float32 tensors; empty if metadata say the rule.

    For llama3 the converter writes ``rope_freqs.weight`` (conversion/llama.py, ``generate_extra_tensors``); the lists
    of longrope it writes for Phi-3 only. Errors are those of ``gguf_metadata``.
    """
    folder = read_folder(path)
    metadata_of(folder)
    if folder.rope_type == "llama3":
        divisors = plain_frequencies(folder.spec) / folder.method.frequencies(folder.spec)[0]
        return {"rope_freqs.weight": divisors.tolist()}
    if folder.rope_type == "longrope":
        lists = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
        # A float32 tensor holds no divisor as large as that of a stopped pair: it is infinite there.
        return {
            tensor: [divisor if divisor < STOPPED else math.inf for divisor in folder.rope[name]]
            for tensor, name in lists.items()
        }
    return {}


def metadata_of(folder: ExportFolder) -> dict[str, Any]:
    """Return what ``gguf_metadata`` does, of a folder that is read already."""
    _check(folder)
    arch = ARCHITECTURES[folder.model_type]
    found = {f"{arch}.context_length": folder.context_length, f"{arch}.rope.freq_base": folder.spec.rope_theta}
    scaling = _scaling_keys(folder)
    return {**found, **{f"{arch}.rope.scaling.{key}": value for key, value in scaling.items()}}


def _scaling_keys(folder: ExportFolder) -> dict[str, Any]:
    """Return the keys below ``rope.scaling``.

    ``attn_factor`` multiplies what llama.cpp computes: ``0.1 ln(factor) + 1`` for yarn, else 1 (src/llama-context.cpp,
    where ``yarn_attn_factor`` is overwritten). With longrope a ``factor`` would divide all frequencies once more.
    """
    rope, kind = folder.rope, folder.rope_type
    if kind == "linear":
        return {"type": kind, "factor": float(rope["factor"])}
    if kind == "longrope":
        return {"type": kind, "original_context_length": folder.original, "attn_factor": folder.attention_factor}
    if kind != Yarn.rope_type:  # plain rules are a base, and llama3 a tensor
        return {}
    keys = {"type": kind, "factor": float(rope["factor"]), "original_context_length": folder.original}
    keys |= {f"yarn_{beta}": float(rope[beta]) for beta in ("beta_fast", "beta_slow") if beta in rope}
    usual = 0.1 * math.log(rope["factor"]) + 1.0
    if not math.isclose(folder.attention_factor, usual, rel_tol=1e-9):
        keys["attn_factor"] = folder.attention_factor / usual
    return keys


def _check(folder: ExportFolder) -> None:
    """Raise unless llama.cpp can run the rule from a file that says it."""
    if folder.model_type not in ARCHITECTURES:
        raise InvalidRequestError(
            f"how llama.cpp converts model_type {folder.model_type!r} has not been checked. Checked: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    if folder.rope_type == "dynamic":
        raise InvalidRequestError("llama.cpp cannot express Transformers' dynamic rule: it has no such scaling type.")
    refuse_attention_rule(folder, "llama.cpp")
    check_rule(folder)
    check_one_list(folder, "llama.cpp", "it takes long_factor for every text once -c exceeds the original length")
    if folder.rope_type in ("llama3", "longrope") and ARCHITECTURES[folder.model_type] not in _WITH_DIVISORS:
        raise InvalidRequestError(
            f"llama.cpp cannot express {folder.rope_type} for model_type {folder.model_type!r}: its divisors per pair "
            "are read for the llama architecture only. Save the model with yarn or ntk."
        )
    if folder.rope_type == Yarn.rope_type and not folder.rope.get("truncate", True):
        raise InvalidRequestError(
            "llama.cpp cannot express truncate=False: it always rounds the ends of yarn's ramp "
            "(ggml_rope_yarn_corr_dims). Save the model with truncate=True."
        )


def llama_cpp(folder: ExportFolder) -> list[str]:
    """llama.cpp: convert the folder, then serve the file with flags that say the whole rule.

    What the converter leaves out or writes where it is not read (conversion/base.py: the attention factor, the betas)
    is in the flags; so they are right for a file of the base model too.
    """
    metadata = metadata_of(folder)
    if folder.rope_type == "llama3" and folder.overrides:
        raise InvalidRequestError(
            f"llama.cpp has no flags for {folder.manifest['method']}, whose divisors per pair the converter takes from "
            f"{CONFIG}, and that of this folder is the base model's. Take --as yarn, ntk or linear."
        )
    if folder.rope_type == "longrope":
        raise InvalidRequestError(
            "llama.cpp has no flags for longrope, and convert_hf_to_gguf.py drops the lists of model_type "
            f"{folder.model_type!r}. Write what hf_posenc.exports.gguf_metadata and gguf_tensors return into the "
            "converted file with the gguf package, or save the model with yarn or ntk."
        )
    notes = ["# the flags say the whole rule: they serve a .gguf of the unextended base model as well"]
    if folder.rope_type == "llama3":
        notes = ["# the rule is the tensor rope_freqs.weight, which the converter writes: flags cannot say it"]
        if folder.original != _CONVERTER_ORIGINAL:
            notes.append(f"# converters that take the original length for {_CONVERTER_ORIGINAL} get it wrong: update")
    file = f"{Path(folder.path).resolve().name}.gguf"
    return [
        command("python", "convert_hf_to_gguf.py", folder.path, "--outfile", file),
        command("llama-server", "-m", file, "-c", folder.context_length, *_flags(folder, metadata)),
        *notes,
    ]


def _flags(folder: ExportFolder, metadata: dict[str, Any]) -> list[str]:
    """Return the flags besides ``-c``: the values of the metadata, which win over a file's (common/arg.cpp)."""
    arch = ARCHITECTURES[folder.model_type]
    if folder.rope_type == "llama3":
        return []
    flags = ["--override-kv", f"{arch}.context_length=int:{folder.context_length}"]  # else it caps at the base's
    if folder.rope_type == PLAIN:
        return ["--rope-freq-base", str(metadata[f"{arch}.rope.freq_base"]), *flags]
    names = {"type": "--rope-scaling", "factor": "--rope-scale", "original_context_length": "--yarn-orig-ctx"}
    names |= {"yarn_beta_fast": "--yarn-beta-fast", "yarn_beta_slow": "--yarn-beta-slow"}
    given = {name: metadata.get(f"{arch}.rope.scaling.{name}") for name in (*names, "attn_factor")}
    said = [word for name, flag in names.items() if given[name] is not None for word in (flag, str(given[name]))]
    if given["attn_factor"] is not None:  # --yarn-attn-factor is overwritten with yarn
        flags += ["--override-kv", f"{arch}.rope.scaling.attn_factor=float:{given['attn_factor']}"]
    return said + flags
