"""The softmax scale, by which a temperature reaches whole logits where only part of a head rotates.

In multi-head latent attention YaRN's ``mscale_all_dim`` multiplies it when a model is built, so a change of the rotary
modules alone does not reach it. Elsewhere Transformers has no word for it: ``temperature="logits"`` is ours.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_posenc.attention.installation import reads_whole_context
from hf_posenc.errors import InvalidRequestError
from hf_posenc.families.family_data import family_of
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.methods.base import Extension, Method


def latent_attentions(rotary: RotaryModel) -> dict[str, nn.Module]:
    """Return the attention modules, by name, whose ``scaling`` depends on the rotary settings; often none."""
    if not family_of(rotary.model_type).latent_attention:
        return {}
    return {
        name: module
        for name, module in rotary.model.named_modules()
        if "qk_head_dim" in vars(module) and isinstance(vars(module).get("scaling"), float)
    }


def partial_attentions(rotary: RotaryModel) -> dict[str, nn.Module]:
    """Return the attention modules, by name, that are extended and hand a ``scaling`` of their own to the softmax.

    Raises:
        ValueError: There are none.
    """
    attentions = {
        name: module
        for name, module in rotary.model.named_modules()
        if "layer_idx" in vars(module)
        and isinstance(vars(module).get("scaling"), float)
        # A layer type with rope_parameters of its own keeps its rule.
        and (rotary.label is None or reads_whole_context(module, rotary.text_config))
    }
    if not attentions:
        raise InvalidRequestError(
            f"temperature='logits': the attention of {type(rotary.model).__name__} has no scaling that could carry it. "
            "Leave temperature at 'rotary'."
        )
    return attentions


def live_scale(module: nn.Module) -> float:
    """Return the factor by which an attention module multiplies its logits before the softmax."""
    return float(vars(module)["scaling"])


def instantiate_scale(module: nn.Module, config: PreTrainedConfig) -> float:
    """Return the scale Transformers itself gives an attention of this class when it is built from ``config``."""
    attention_class: Any = type(module)
    with torch.device("meta"):
        return float(attention_class(config, module.layer_idx).scaling)


def expected_scale(module: nn.Module, method: Method) -> float:
    """Return the closed form: ``1 / sqrt(qk_head_dim)``, times the square of ``mscale_all_dim``'s temperature.

    Reference: DeepSeek-AI 2024, arXiv:2405.04434, section 3.1.4; the square because both queries and keys carry it.
    """
    plain = 1.0 / math.sqrt(int(module.qk_head_dim))  # type: ignore[arg-type]  # nn.Module's attributes may be tensors, this one is an int
    return plain * method.latent_temperature**2


def attention_factor_of(extension: Extension) -> float:
    """Return the factor by which an extension multiplies queries and keys, each, wherever that happens."""
    return extension.method.frequencies(extension.spec)[1]
