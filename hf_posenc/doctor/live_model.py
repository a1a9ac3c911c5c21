"""The content of the rotary modules of a loaded model, compared with its config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from hf_posenc.attention.inner import inner_name
from hf_posenc.checkpoint.manifest import read_manifest, verify_model
from hf_posenc.checkpoint.plain_loading import plain_loading
from hf_posenc.checkpoint.pretrained import is_gguf, load_weights
from hf_posenc.doctor.config_checks import Finding
from hf_posenc.doctor.transformers_readers import Rope
from hf_posenc.errors import (
    ExtensionMissingError,
    InvalidRequestError,
    RotaryMismatchError,
    UnsupportedModelError,
    first_line,
)
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.methods.base import Unscaled
from hf_posenc.methods.registry import method_of_rope_type, read_method
from hf_posenc.patching.api import describe, is_patched
from hf_posenc.patching.extension import rule_is_elsewhere
from hf_posenc.patching.verification import check_rotary, live_attention_factor
from hf_posenc.spec import RopeSpec

NOT_APPLIED = "extension-not-applied"
_RELOAD = "Reload the model, and change its positions with patch_model only."


def load_live(source: str | Path) -> PreTrainedModel:
    """Load the model of a checkpoint on the CPU, as plain Transformers does.

    Raises:
        ValueError: There are no weights, or Transformers cannot load them.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".json":
        path = path.parent
    try:
        with plain_loading():
            return _load(path, str(path if path.exists() else source))
    except (OSError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        # A missing file, or a config that no model can be built from: this is what anyone meets who loads it.
        raise InvalidRequestError(
            f"{str(source)!r} cannot be loaded to look at it live: {first_line(error)}"
        ) from error


def _load(path: Path, where: str) -> PreTrainedModel:
    if is_gguf(path):  # also a scaled one, which load_weights refuses: what is dropped is the question here
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(where)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return load_weights(where, dtype="auto")
    return AutoModelForImageTextToText.from_pretrained(where, dtype="auto", use_safetensors=True)


def held_by_modules(rotary: RotaryModel) -> list[str]:
    """Return the contents of each rotary module of the decoder, in words."""
    try:
        modules, prefix = rotary.rotary_modules, rotary.prefix
    except ValueError:
        return []
    in_attention, extension = "", rotary.extension
    if extension is not None and extension.method.is_encoding:
        in_attention = f"; {extension.method.name} takes the place of RoPE"
    elif extension is not None and extension.method.needs_hf_posenc:
        inner = inner_name(str(rotary.model.config._attn_implementation))
        in_attention = f"; the attention rotates queries and keys further as the rule says, and then calls {inner}"
    words = []
    for name, module in modules.items():
        held = module.get_buffer(f"{prefix}inv_freq")
        dtype = str(held.dtype).removeprefix("torch.")
        shown = dtype if held.is_meta else f"{held[0]:.4g} to {held[-1]:.4g} radians per token, {dtype}"
        factor = live_attention_factor(rotary, module, rotary.prefix)
        words.append(f"{held.numel()} pairs in {name}, {shown}; cos and sin times {factor:.6g}{in_attention}")
    return words


def against_meaning(rotary: RotaryModel, rope: Rope | None) -> list[Finding]:
    """Compare the modules with the closed form of what the checkpoint's config means, however it was read."""
    if rope is None or (rope.rope_type != "default" and method_of_rope_type(rope.rope_type) is None):
        return []
    try:
        modules, length = rotary.rotary_modules, int(rotary.text_config.max_position_embeddings)
    except ValueError:
        return []
    for name, module in modules.items():
        held = module.get_buffer(f"{rotary.prefix}inv_freq")
        spec = RopeSpec(2 * held.numel(), rope.rope_theta, rope.original or length)
        plain = rope.rope_type == "default"
        method = Unscaled() if plain else read_method(rope.rope_type, rope.factor, dict(rope.options))
        try:
            check_rotary(rotary, name, spec, method)
        except RotaryMismatchError as error:
            why = f"The config means {rope}; Transformers {transformers.__version__} did not load that."
            return [Finding("loaded-otherwise", "error", str(error).split(". ")[0].rstrip("."), why)]
    return []


def look_at_modules(rotary: RotaryModel) -> tuple[dict[str, Any], str, list[Finding]]:
    """Return the rule that a model's config declares, whether its modules hold it, in words, and the problems."""
    findings = list(_check_modules(rotary))
    declared: dict[str, Any] = {}
    try:
        declared = describe(rotary)
        if declared["method"] == "none" and not getattr(rotary.text_config, "rope_parameters", None):
            return declared, "no rotary embedding", findings
        verify_model(rotary, _checkpoint_of(rotary))
    except ExtensionMissingError as error:
        why = "Transformers builds a model from config.json alone, which cannot express this rule."
        todo = "Load it with load_extended, or call hf_posenc.install() before from_pretrained."
        findings.append(Finding(NOT_APPLIED, "error", error.reason, why, todo, mendable=False))
        return declared, "the model without its extension", findings
    except RotaryMismatchError as error:
        why = "A config set after loading has no effect."
        findings.append(Finding("not-what-it-says", "error", str(error).rstrip("."), why, _RELOAD, False))
        return declared, "something else", findings
    except UnsupportedModelError as error:
        is_unknown = error.code == "unknown_frequencies"  # nothing is wrong with the model
        why = "hf_posenc cannot tell whether its positions are right, and does not extend it."
        todo = "Use it as Transformers loads it."
        findings.append(
            Finding("not-compared", "note" if is_unknown else "error", str(error).rstrip("."), why, todo, False)
        )
        return declared, "not compared", findings
    except ValueError as error:
        why = "Its settings cannot be read."
        findings.append(Finding("not-compared", "error", str(error).rstrip("."), why, _RELOAD, False))
        return declared, "not compared", findings
    if rotary.extension is not None and rotary.extension.method.needs_hf_posenc:
        return declared, "the rule, in every attention layer; saved, it is in the manifest alone", findings
    return declared, "what the config says, compared with the closed form", findings


def _checkpoint_of(rotary: RotaryModel) -> Path | None:
    """Return the folder that an unpatched model was loaded from, if its manifest has a rule that no config can say."""
    name = str(rotary.model.name_or_path or "")
    source = Path(name).expanduser()
    if not name or not source.is_dir() or is_patched(rotary):
        return None
    manifest = read_manifest(source)
    return source if manifest is not None and rule_is_elsewhere(manifest) else None


def _check_modules(rotary: RotaryModel) -> Iterator[Finding]:
    """Look for casts of the frequencies, and for rotary modules that nothing calls."""
    try:
        modules, prefix = rotary.rotary_modules, rotary.prefix
    except ValueError:
        return
    decoder = [name for name in modules if ".self_attn." not in name]
    idle = [name for name, _ in rotary.model.named_modules() if ".self_attn.rotary" in name] if decoder else []
    if idle:
        yield Finding(
            "idle-module",
            "error",
            f"{idle[0]} ({len(idle)} in all) is never called",
            f"Transformers 5 computes cos and sin once, in {decoder[0]}, and hands them to the layers.",
            _RELOAD,
            False,
        )
    for name, module in modules.items():
        dtype = module.get_buffer(f"{prefix}inv_freq").dtype
        if dtype != torch.float32:
            yield Finding(
                "rounded",
                "error",
                f"{name} holds {str(dtype).removeprefix('torch.')} frequencies",
                "Rounded frequencies rotate wrong by whole radians at long range; .float() does not bring them back.",
                "Load with dtype=..., do not cast after; or call patch_model, whose frequencies stay float32.",
                False,
            )
