"""Where a model keeps its rotary modules, found by convention, and what is refused and why."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

# Transformers accepts only "default" and "longrope" from these: every rule is written as longrope lists.
LONGROPE_ONLY = frozenset({"phi3", "phi4_multimodal"})

# Transformers 4 keeps these two numbers of GPT-NeoX under names of its own, at the top level of config.json.
LEGACY_KEYS: dict[str, dict[str, str]] = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
}

_MLA = (
    "its attention multiplies the softmax scale by YaRN's mscale when it is built, "
    "which a change of the rotary module alone does not reach"
)
REFUSED: dict[str, str] = {
    "axk1": _MLA,
    "axk2": _MLA,
    "bailing_hybrid": _MLA,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "hy_v4": _MLA,
    "longcat_flash": _MLA,
    "minicpm3": _MLA,
    "mistral4": _MLA,
    "mistral_large4": _MLA,
    "youtu": _MLA,
    "phimoe": "it computes its frequencies anew in every forward",
    "recurrent_gemma": "its rotary module accepts only the default rule",
    "ernie4_5_vl_moe": "its rotary module accepts only the default rule",
    "granite_swa": "its layers do not read the module named rotary_emb",
}


def unwrap(model: Any) -> PreTrainedModel:
    """Return the ``PreTrainedModel`` inside ``torch.compile``, DistributedDataParallel and PEFT wrappers.

    Raises:
        TypeError: There is no Transformers model inside.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
        elif hasattr(inner, "module"):  # DistributedDataParallel and the like
            inner = inner.module
        else:
            raise TypeError(
                f"expected a Transformers model (PreTrainedModel, or one wrapped by PEFT or torch.compile), "
                f"got {type(model).__name__}. Load one with AutoModelForCausalLM.from_pretrained."
            )
    return inner


def text_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return each distinct text config object that the model or one of its modules holds, the model's first."""
    first = model.config.get_text_config(decoder=True)
    found = {id(first): first}
    for module in model.modules():
        config = module.__dict__.get("config")
        if type(config) is type(first):
            found.setdefault(id(config), config)
    return list(found.values())


def rotary_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the decoder's rotary modules by name.

    The convention of Transformers 5: buffers ``inv_freq`` and ``original_inv_freq``, attributes ``rope_type`` and
    ``attention_scaling``, and the text config. Vision and audio rotaries lack one of these and are left alone.

    Raises:
        ValueError: The family is refused, with the reason, or there is no such module.
    """
    config = model.config.get_text_config(decoder=True)
    if (reason := REFUSED.get(config.model_type)) is not None:
        raise ValueError(f"model_type {config.model_type!r} is not supported: {reason}.")
    found = {
        name: module
        for name, module in model.named_modules()
        if {"inv_freq", "original_inv_freq"} <= module._buffers.keys()
        and isinstance(getattr(module, "rope_type", None), str)
        and hasattr(module, "attention_scaling")
        and type(getattr(module, "config", None)) is type(config)
    }
    if not found:
        raise ValueError(
            f"found no rotary module of Transformers' usual form (inv_freq, original_inv_freq, rope_type) in "
            f"{type(model).__name__} (model_type {config.model_type!r}), so there is nothing to scale."
        )
    return found
