"""llama.cpp and Ollama: the metadata and tensors of a GGUF file that say the rule, and the flags that do."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from hf_posenc.checkpoint.manifest import CONFIG
from hf_posenc.errors import InvalidRequestError
from hf_posenc.exports.folder import PLAIN, ExportFolder, command, has_two_lists
from hf_posenc.methods.base import plain_frequencies
from hf_posenc.methods.yarn import Yarn

# What convert_hf_to_gguf.py calls the families whose conversion was read (conversion/llama.py, conversion/qwen.py).
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Of these, the ones whose graph divides each frequency by a number of its own (src/models/llama.cpp passes the tensor
# to ggml_rope_ext; qwen2.cpp and qwen3.cpp pass nullptr). The converter's permutation of q and k moves features within
# pairs, not the order of the pairs, so that the divisors are in the order of the frequencies.
_WITH_DIVISORS = frozenset({"llama"})
# The version whose source says so, and the server with which files of this rule were run.
READ = "commit 0c1e570"
LLAMA_SERVER = "llama-server of xllamacpp 2026.10.11549"
DIVISORS = "rope_freqs.weight"
LISTS = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
_CONVERTER_ORIGINAL = 8192


def metadata_of(folder: ExportFolder) -> dict[str, Any]:
    """Return the result of ``gguf_metadata``, of a folder that llama.cpp may be able to run (``checked_for``)."""
    check_file(folder)
    arch = ARCHITECTURES[folder.model_type]
    if needs_tensors(folder):
        keys: dict[str, Any] = {} if folder.attention_factor == 1.0 else {"attn_factor": folder.attention_factor}
        if has_two_lists(folder):
            keys |= {"type": "longrope", "original_context_length": folder.original}
    else:
        keys = _scaling_keys(folder)
    metadata = {f"{arch}.context_length": folder.context_length, f"{arch}.rope.freq_base": folder.spec.rope_theta}
    return {**metadata, **{f"{arch}.rope.scaling.{key}": value for key, value in keys.items()}}


def tensors_of(folder: ExportFolder) -> dict[str, list[float]]:
    """Return the result of ``gguf_tensors``, of a folder that llama.cpp may be able to run."""
    check_file(folder)
    if not needs_tensors(folder):
        return {}
    if has_two_lists(folder):
        return {tensor: [_float32(divisor) for divisor in folder.rope[name]] for tensor, name in LISTS.items()}
    divisors = plain_frequencies(folder.spec) / folder.method.frequencies(folder.spec)[0]
    return {DIVISORS: [_float32(divisor) for divisor in divisors.tolist()]}


def needs_tensors(folder: ExportFolder) -> bool:
    """Return whether a file says the rule by divisors: llama.cpp has no keys for it, or reads them as flags only.

    The ``yarn_beta_*`` keys of a file are read for two other architectures (Grok, Mistral 3).
    """
    if folder.rope_type == Yarn.rope_type:
        betas = any(float(folder.rope.get(name, usual)) != usual for name, usual in _BETAS.items())
        return betas or not folder.rope.get("truncate", True)
    return folder.rope_type in ("llama3", "longrope")


def _float32(divisor: float) -> float:
    """Return a divisor as a float32 tensor holds it: that of a pair that does not rotate is infinite."""
    return divisor if divisor < float(torch.finfo(torch.float32).max) else math.inf


def _scaling_keys(folder: ExportFolder) -> dict[str, Any]:
    """Return the keys below ``rope.scaling``, also those that only flags give to llama.cpp; none for divisors.

    ``attn_factor`` multiplies what llama.cpp computes: ``0.1 ln(factor) + 1`` for yarn, else 1 (src/llama-context.cpp,
    where ``yarn_attn_factor`` is overwritten).
    """
    rope, rope_type = folder.rope, folder.rope_type
    if rope_type == "linear":
        return {"type": rope_type, "factor": float(rope["factor"])}
    if rope_type != Yarn.rope_type:  # plain rules are a base
        return {}
    keys = {"type": rope_type, "factor": float(rope["factor"]), "original_context_length": folder.original}
    keys |= {f"yarn_{beta}": float(rope[beta]) for beta in _BETAS if beta in rope}
    usual = 0.1 * math.log(rope["factor"]) + 1.0
    if not math.isclose(folder.attention_factor, usual, rel_tol=1e-9):
        keys["attn_factor"] = folder.attention_factor / usual
    return keys


def check_file(folder: ExportFolder) -> None:
    """Raise unless llama.cpp can run the rule from a file that says it.

    Raises:
        ValueError: With the reason.
    """
    if needs_tensors(folder) and ARCHITECTURES[folder.model_type] not in _WITH_DIVISORS:
        manifest = folder.manifest
        options = "".join(
            f", {name}={value}" for name, value in manifest["options"].items() if not isinstance(value, list)
        )
        raise InvalidRequestError(
            f"a GGUF file cannot express {manifest['method']}{options} for model_type {folder.model_type!r}: its "
            f"divisors per pair ({DIVISORS}) are read for the llama architecture only (llama.cpp {READ}). Save the "
            "model with ntk, linear, or yarn with its own betas."
        )


def llama_cpp(folder: ExportFolder) -> list[str]:
    """llama.cpp: convert the folder, then serve the file with flags that say the whole rule.

    What the converter leaves out or writes where it is not read (conversion/base.py: the attention factor, the betas)
    is in the flags; so they are right for a file of the base model too. Rules without flags are written into a copy of
    the converted file.
    """
    if folder.rope_type == "llama3" and folder.overrides:
        raise InvalidRequestError(
            f"llama.cpp has no flags for {folder.manifest['method']}, whose divisors per pair the converter takes from "
            f"{CONFIG}, and that of this folder is the base model's. Take --as yarn, ntk or linear, or --to gguf."
        )
    name = Path(folder.path).resolve().name
    convert = command("python", "convert_hf_to_gguf.py", folder.path, "--outfile", f"{name}.gguf")
    serve = ("llama-server", "-m", f"{name}.gguf", "-c", folder.context_length)
    if folder.rope_type == "llama3":
        check_file(folder)
        notes = [f"# the rule is the tensor {DIVISORS}, which the converter writes: flags cannot say it"]
        if folder.original != _CONVERTER_ORIGINAL:
            notes.append(f"# converters that take the original length for {_CONVERTER_ORIGINAL} get it wrong: update")
        return [convert, command(*serve), *notes]
    if folder.rope_type == "longrope" or not folder.rope.get("truncate", True):
        check_file(folder)
        into = f"{name}-{folder.manifest['method']}.gguf"
        copy = ("hf-posenc", "export", folder.path, "--to", "gguf", "--base", f"{name}.gguf", "--output", into)
        return [
            convert,
            command(*copy),
            command("llama-server", "-m", into, "-c", folder.context_length),
            "# no flags say this rule, and the converter drops it: the second command writes it into a copy",
            *notes_on_lists(folder),
        ]
    lines = [convert, command(*serve, *_flags(folder))]
    if not folder.is_adapted:
        lines.append("# the flags say the whole rule: they serve a .gguf of the unextended base model as well")
    return lines


def ollama(folder: ExportFolder) -> list[str]:
    """Ollama: a GGUF file that says the whole rule, and a Modelfile.

    It runs files by llama.cpp's server, passes no flags on positions, and takes at most the file's ``context_length``
    of ``num_ctx`` (llm/llama_server.go, llm/server.go). The Modelfile is docs/modelfile.mdx.
    """
    check_file(folder)
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(folder.path).resolve().name).strip("-.")
    name = f"{plain or 'model'}-{folder.manifest['method']}"
    instead = ("--as", folder.manifest["method"]) if folder.overrides else ()
    written = ("--base", "BASE.gguf", "--output", f"{name}.gguf")
    lines = [f"FROM ./{name}.gguf", f"PARAMETER num_ctx {folder.context_length}"]
    return [
        "# BASE.gguf: a file of the same model in any quantisation, by llama.cpp's convert_hf_to_gguf.py or published",
        command("hf-posenc", "export", folder.path, "--to", "gguf", *instead, *written),
        command("printf", r"%s\n", *lines) + " > Modelfile",
        command("ollama", "create", name, "-f", "Modelfile"),
        command("ollama", "run", name),
        *notes_on_lists(folder),
    ]


def notes_on_lists(folder: ExportFolder) -> list[str]:
    """Return a comment where Transformers and llama.cpp choose between two lists of divisors in different ways."""
    if not has_two_lists(folder):
        return []
    return [
        f"# two lists: llama.cpp takes long_factor for every text if -c exceeds {folder.original}, else short_factor;",
        "# Transformers takes the list by the length of each forward pass: shorter texts differ",
    ]


def _flags(folder: ExportFolder) -> list[str]:
    """Return the flags besides ``-c``: keys and flags of the server win over a file's (common/arg.cpp)."""
    arch, keys = ARCHITECTURES[folder.model_type], _scaling_keys(folder)
    override = [f"{arch}.context_length=int:{folder.context_length}"]  # else it caps at the base's
    if "attn_factor" in keys:  # --yarn-attn-factor is overwritten with yarn
        override.append(f"{arch}.rope.scaling.attn_factor=float:{keys['attn_factor']}")
    if folder.rope_type == PLAIN:
        flags = ["--rope-freq-base", str(folder.spec.rope_theta)]
    else:
        names = {"type": "--rope-scaling", "factor": "--rope-scale", "original_context_length": "--yarn-orig-ctx"}
        names |= {"yarn_beta_fast": "--yarn-beta-fast", "yarn_beta_slow": "--yarn-beta-slow"}
        flags = [word for name, flag in names.items() if name in keys for word in (flag, str(keys[name]))]
    return [*flags, "--override-kv", ",".join(override)]  # given twice, the flag is deprecated
