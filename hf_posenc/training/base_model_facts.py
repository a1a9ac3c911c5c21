"""The facts of the trained model that a plan needs: plain values, from a loaded model or one without weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from hf_posenc.attention.inner import inner_name
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.unmasked_layers import unmasked_layers
from hf_posenc.methods.base import Extension
from hf_posenc.patching.api import describe, extension_of, is_patched
from hf_posenc.patching.record import restore_config
from hf_posenc.utils.dtypes import is_half


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model that decide how it is trained.

    Attributes:
        name: The name or path that the model was loaded from; empty for one that was made in the program.
        config: The model's text config.
        plain_config: The text config as it was before ``patch_model``; the same object where the model is not patched.
        description: The method, factor, options and lengths of the model (``hf_posenc.patching.api.describe``).
        extension: The extension the model has; None for a plain model, and for one without a rotary embedding.
        needs_hf_posenc: The model's rule is in its attention.
        attention: The attention implementation that computes, whatever hf_posenc put around it.
        is_quantised: The weights are quantised; None if that is not known before they are loaded.
        is_half: A weight is in half precision.
        device: The type of the device of the first weights, such as ``"cuda"``.
        supports_flash: The family can run FlashAttention.
        unmasked: The layers in which no mask keeps packed documents apart (``unmasked_layers``).
    """

    name: str
    config: PreTrainedConfig
    plain_config: PreTrainedConfig
    description: Mapping[str, Any]
    extension: Extension | None
    needs_hf_posenc: bool
    attention: str
    is_quantised: bool | None
    is_half: bool
    device: str
    supports_flash: bool
    unmasked: Mapping[str, int]

    @classmethod
    def of(cls, rotary: RotaryModel, *, is_quantised: bool | None = None) -> ModelFacts:
        """Read the facts of a model, which may be on the meta device.

        Args:
            rotary: The model.
            is_quantised: Whether its weights will be quantised, for a model without weights; None asks the model.
        """
        model, config = rotary.model, rotary.text_config
        patched = is_patched(rotary)
        description = describe(rotary)
        return cls(
            name=str(model.config.name_or_path or ""),
            config=config,
            plain_config=_before_patching(rotary) if patched else config,
            description=description,
            extension=None if description["method"] == "none" else extension_of(rotary),
            needs_hf_posenc=patched and rotary.extension.method.needs_hf_posenc,
            attention=inner_name(str(model.config._attn_implementation)),
            is_quantised=getattr(model, "is_quantized", False) if is_quantised is None else is_quantised,
            is_half=is_half(model),
            device=rotary.device.type,
            supports_flash=bool(getattr(model, "_supports_flash_attn", False)),
            unmasked=unmasked_layers(rotary),
        )


def _before_patching(rotary: RotaryModel) -> PreTrainedConfig:
    """Return a copy of a patched model's text config, as ``unpatch_model`` would put it back."""
    config = copy.deepcopy(rotary.text_config)
    restore_config(config, rotary.record.config_values[0])
    return config
