"""Making a model attend by hf_posenc's attention implementation, and by its own again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from hf_posenc.attention.inner import PREFIX
from hf_posenc.attention.interface import (
    CROSS,
    FULL,
    INNER,
    PASS,
    PositionalAttention,
    attention_of,
    drop_attention,
    register,
    set_attention,
)
from hf_posenc.attention.rotating_attention import RotatingAttention
from hf_posenc.attention.rotation import ROTATIONS, Rotation, find_rotation
from hf_posenc.attention.self_check import SHORT, check_installed, read_before
from hf_posenc.errors import argument
from hf_posenc.families.discovery import declared_rope
from hf_posenc.families.family_data import FULL_ATTENTION, family_of
from hf_posenc.families.refusals import TAKE_STATIC, Refusal
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.rotary_module import SavedRotary, rotary_class
from hf_posenc.families.sliding_window import window_of_all_layers
from hf_posenc.methods.base import AttentionMethod, Extension, plain_frequencies

AHEAD = "a layer attends to later tokens (is_causal is False), and the method is for causal attention only"


@dataclass
class Installed:
    """The changes that were made in a model to run a rule that no rotary module can hold, to undo them.

    Attributes:
        applied_by: What the layers attend by, or whose hooks add positions to the embeddings.
        hooks: Those of the decoder and its parts.
    """

    applied_by: Any
    hooks: list[RemovableHandle]

    @property
    def implementation(self) -> str | None:
        """The attention implementation in use before; None if it is still in use."""
        return getattr(self.applied_by, "inner", None)

    def problem(self, rotary: RotaryModel) -> str | None:
        """Return the part of it that is no longer in place; None if all of it is."""
        config = rotary.text_config
        if self.implementation is not None and config._attn_implementation != PREFIX + self.implementation:
            return f"the attention implementation is {config._attn_implementation!r}"
        if looks_ahead(rotary):
            return AHEAD
        if any(hook.id not in (hook.hooks_dict_ref() or {}) for hook in self.hooks):
            return "a hook of the decoder is gone"
        return None

    def remove(self, rotary: RotaryModel) -> None:
        """Undo it."""
        for hook in self.hooks:
            hook.remove()
        if self.implementation is not None:
            for config in rotary.text_configs:
                config._attn_implementation = self.implementation
            for module in rotary.model.modules():
                drop_attention(module)


class InstalledAttention(Installed):
    """A ``RotatingAttention`` by which all layers attend."""

    def problem(self, rotary: RotaryModel) -> str | None:
        attention = self.applied_by
        if (found := super().problem(rotary)) is not None:
            return found
        if any(attention_of(module) is not attention for module in attention_layers(rotary.model)):
            return "an attention layer has lost what it attends by"
        if not torch.allclose(attention.plain.double().cpu(), plain_frequencies(attention.spec), rtol=1e-5, atol=0):
            return "the frequencies it rotates by are not the model's"
        for name, module in rotary.rotary_modules.items():
            buffer: Any = module._buffers[f"{rotary.prefix}inv_freq"]
            if not buffer.is_meta and not torch.equal(buffer.cpu(), attention.plain.cpu()):
                return (
                    f"{name} rotates queries and keys by other frequencies than the model's, which the attention "
                    "counts on"
                )
        return None


def check_attention(rotary: RotaryModel, extension: Extension) -> Rotation:
    """Return the way in which this model rotates queries and keys. Nothing is changed.

    Raises:
        ValueError: Its attention cannot be replaced; with the reason.
    """
    config = rotary.text_config
    refusal = refusal_of_family(rotary) or refusal_of_settings(config)
    if refusal is None and window_of_all_layers(config) and extension.sliding_window != "off":
        refusal = Refusal(config.model_type, "window", {"how": argument("sliding_window", "off")})
    elif refusal is None and getattr(getattr(rotary.wrapped, "active_peft_config", None), "is_prompt_learning", False):
        refusal = Refusal(config.model_type, "prefix_tuning")
    rotation = _rotation(rotary) if refusal is None else None
    if rotation is None:
        refusal = refusal or Refusal(config.model_type, "rotation")
        raise refusal.error(extension.method.name, TAKE_STATIC)
    return rotation


def refusal_of_family(rotary: RotaryModel) -> Refusal | None:
    """Return the reason why methods that run in attention do not suit a model's family; None if they do."""
    config, model, rotary_modules = rotary.text_config, rotary.model, rotary.rotary_modules
    name, family = config.model_type, family_of(config.model_type)
    if looks_ahead(rotary):
        return Refusal(name, "not_causal")
    if family.refused_in_attention:
        return Refusal(name, family.refused_in_attention)
    if family.latent_attention or getattr(config, "kv_lora_rank", None):
        return Refusal(name, "latent_attention")
    if any(module.rpartition(".")[2] == "indexer" for module, _ in model.named_modules()):
        return Refusal(name, "indexer")
    if len(rotary_modules) != 1:
        return Refusal(name, "rotary_module_per_layer", {"count": len(rotary_modules)})
    layers = attention_layers(model)
    if not layers or not goes_through_interface(layers[0]):
        return Refusal(name, "no_attention_interface")
    return None


def looks_ahead(rotary: RotaryModel) -> bool:
    """Return whether a layer of the text model attends to later tokens, as encoders and cross-attention do."""
    config = rotary.text_config
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False) in (True, "all"):
        return True
    of_text = (module for module in rotary.model.modules() if type(getattr(module, "config", None)) is type(config))
    return not all(getattr(module, "is_causal", True) for module in of_text)


def refusal_of_settings(config: PreTrainedConfig) -> Refusal | None:
    """Return the reason why they do not suit a model with these settings; None if they do."""
    name = config.model_type
    if declared_rope(config).get("rope_type") == "proportional":
        return Refusal(name, "unrotated_pairs")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return Refusal(name, "attention_in_chunks")
    if config._attn_implementation not in INNER:
        values = {"implementation": config._attn_implementation, "allowed": ", ".join(INNER)}
        return Refusal(name, "implementation", values)
    return None


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that know which layer they are: those of attention, and some of the decoder's own."""
    return [module for module in model.modules() if isinstance(vars(module).get("layer_idx"), int)]


def goes_through_interface(layer: nn.Module) -> bool:
    """Return whether the file that a layer's class is defined in knows Transformers' AttentionInterface."""
    return "ALL_ATTENTION_FUNCTIONS" in _code(layer)


def reads_whole_context(layer: nn.Module, config: PreTrainedConfig) -> bool:
    """Return whether an attention layer has no window and no chunks."""
    types = getattr(config, "layer_types", None)
    index: Any = layer.layer_idx
    return types is None or index >= len(types) or types[index] in FULL_ATTENTION


def _code(module: nn.Module) -> dict[str, Any]:
    """Return the names in the file that a module's class is defined in."""
    return vars(sys.modules[type(module).__module__])


def _rotation(rotary: RotaryModel) -> Rotation | None:
    """Return a family's way of rotating; Llama's if its code cannot be called, which the probe then notices."""
    module, label, prefix = rotary.rotary_module, rotary.label, rotary.prefix
    config: Any = module.config
    try:
        with torch.device("cpu"):
            fresh: Any = rotary_class(module)(config)
            arguments = (torch.zeros(1, 1, 1), torch.arange(4)[None])
            cos, sin = fresh(*arguments) if label is None else fresh(*arguments, layer_type=label)
        apply = _code(fresh)["apply_rotary_pos_emb"]
        return find_rotation(
            apply, cos, sin, getattr(fresh, f"{prefix}inv_freq"), getattr(fresh, f"{prefix}attention_scaling")
        )
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return ROTATIONS[0]


def install_attention(
    rotary: RotaryModel, extension: Extension, saved: SavedRotary, rotation: Rotation
) -> InstalledAttention:
    """Replace a model's attention, and check on a few tokens that the model computes what it did before.

    Args:
        rotary: The model; its rotary module holds the plain frequencies.
        extension: The rule.
        saved: What the rotary module holds.
        rotation: How the family rotates.

    Raises:
        ValueError: The model's output is not a number, on a short text already.
        RotaryMismatchError: A check failed (see ``self_check``); the attention is as it was.
    """
    method = extension.method
    assert isinstance(method, AttentionMethod), method
    before = read_before(rotary, text_layers(rotary), min(SHORT, method.plain_until(extension.spec)))
    config = rotary.text_config
    attention = RotatingAttention(
        extension, config._attn_implementation, saved.buffers[f"{rotary.prefix}inv_freq"], rotation
    )
    installed = InstalledAttention(attention, attend_by(rotary, attention, lambda module: layer_kind(module, config)))
    try:
        check_installed(rotary, attention, saved, before)
    except Exception:
        installed.remove(rotary)
        raise
    return installed


def attend_by(
    rotary: RotaryModel, attention: PositionalAttention[Any], kind_of: Callable[[nn.Module], str]
) -> list[RemovableHandle]:
    """Give every attention layer of a model what it attends by, and its kind; return the hooks of the decoder."""
    register()
    for module in attention_layers(rotary.model):
        set_attention(module, attention, kind_of(module))
    for config in rotary.text_configs:
        config._attn_implementation = PREFIX + attention.inner
    return [
        rotary.decoder.register_forward_pre_hook(attention.enter, with_kwargs=True),
        rotary.rotary_module.register_forward_pre_hook(attention.note_positions, with_kwargs=True),
        rotary.decoder.register_forward_hook(attention.leave, always_call=True),
    ]


def has_positions(layer: nn.Module) -> bool:
    """Return whether a layer has positions: some of SmolLM3's and Cohere 2 MoE's have none."""
    return bool(getattr(layer, "use_rope", True) and getattr(layer, "force_rope", True))


def attends_to_text(layer: nn.Module) -> bool:
    """Return whether a layer's keys are those of the text: Transformers' cross-attention to images is not causal."""
    return hasattr(layer, "is_causal")


def layer_kind(module: nn.Module, config: PreTrainedConfig) -> str:
    """Return the relation of a rule to an attention layer: ``FULL``, ``PASS`` or ``CROSS`` of ``interface``."""
    if not attends_to_text(module):
        return CROSS
    return FULL if reads_whole_context(module, config) and has_positions(module) else PASS


def text_layers(rotary: RotaryModel) -> list[nn.Module]:
    """Return the attention layers whose keys are those of the text."""
    return [layer for layer in attention_layers(rotary.model) if attends_to_text(layer)]
