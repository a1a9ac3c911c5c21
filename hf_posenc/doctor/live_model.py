"""What the rotary modules of a loaded model really hold, against what its config says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_posenc.doctor.findings import Finding
from hf_posenc.families import label_prefix, rope_label, rotary_modules
from hf_posenc.patching import describe, verify_model
from hf_posenc.verification import RotaryMismatchError

_RELOAD = "Reload the model, and change its positions with patch_model only."


def look_at_modules(base: PreTrainedModel) -> tuple[dict[str, Any], str, list[Finding]]:
    """Return what a model's config declares, whether its modules hold it, in words, and what is wrong."""
    findings = list(_check_modules(base))
    declared: dict[str, Any] = {}
    try:
        declared = describe(base)
        text = base.config.get_text_config(decoder=True)
        if declared["method"] == "none" and not getattr(text, "rope_parameters", None):
            return declared, "no rotary embedding", findings
        verify_model(base)
    except RotaryMismatchError as error:
        why = "A config set after loading has no effect."
        findings.append(Finding("not-what-it-says", "error", str(error).rstrip("."), why, _RELOAD, False))
        return declared, "something else", findings
    except ValueError as error:
        why = "Its settings cannot be read, or the family is not supported."
        findings.append(Finding("not-compared", "error", str(error).rstrip("."), why, _RELOAD, False))
        return declared, "not compared", findings
    return declared, "what the config says, compared with the closed form", findings


def _check_modules(base: PreTrainedModel) -> Iterator[Finding]:
    """Look for casts of the frequencies, and for rotary modules that nothing calls."""
    try:
        modules = rotary_modules(base)
        prefix = label_prefix(rope_label(base.config.get_text_config(decoder=True)))
    except ValueError:
        return
    decoder = [name for name in modules if ".self_attn." not in name]
    idle = [name for name, _ in base.named_modules() if ".self_attn.rotary" in name] if decoder else []
    if idle:
        yield Finding(
            "idle-module",
            "error",
            f"{idle[0]} ({len(idle)} in all) is never called",
            f"Transformers 5 turns positions once, in {decoder[0]}, and hands them to the layers.",
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
                "Rounded frequencies turn wrong by whole radians at long range; .float() does not bring them back.",
                "Load with dtype=..., do not cast after; or call patch_model, whose frequencies stay float32.",
                False,
            )
