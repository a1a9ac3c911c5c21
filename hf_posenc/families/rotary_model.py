"""A loaded model, looked at once: what patching, verification, saving, evaluation, training and doctor need of it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_posenc.families.discovery import refuse_family, rope_label, unwrap
from hf_posenc.families.refusals import Refusal

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# Where a patched model keeps its ``PatchRecord`` (hf_posenc.patching.record): everything that undoing needs.
_RECORD = "_hf_posenc_patch"


def prefix_of(label: str | None) -> str:
    """Return the prefix of a layer type's buffers, such as ``full_attention_``; empty for None."""
    return "" if label is None else f"{label}_"


class RotaryModel:
    """A model, and where it keeps what positions are made of.

    Whatever is read from the modules is read once, when it is first needed; a model without a rotary embedding can
    be looked at too, until its rotary modules are needed.

    Attributes:
        wrapped: What was given: a model, or a wrapper of PEFT, ``torch.compile`` or DistributedDataParallel around it.
        model: The ``PreTrainedModel`` inside.
    """

    def __init__(self, wrapped: Any) -> None:
        """Look at a model.

        Raises:
            TypeError: There is no Transformers model inside.
        """
        self.wrapped = wrapped
        self.model: PreTrainedModel = unwrap(wrapped)

    @classmethod
    def of(cls, model: Any) -> RotaryModel:
        """Return a ``RotaryModel`` as it is, and make one of anything else; errors as ``RotaryModel``'s."""
        return model if isinstance(model, RotaryModel) else cls(model)

    @property
    def text_config(self) -> PreTrainedConfig:
        """The config of the decoder that reads text; the model's own where there is no other."""
        config: PreTrainedConfig = self.model.config.get_text_config(decoder=True)
        return config

    @property
    def text_configs(self) -> list[PreTrainedConfig]:
        """Each distinct text config object that the model or one of its modules holds, the model's first."""
        first = self.text_config
        configs = {id(first): first}
        for module in self.model.modules():
            config = module.__dict__.get("config")
            if type(config) is type(first):
                configs.setdefault(id(config), config)
        return list(configs.values())

    @property
    def model_type(self) -> str:
        """The family, as Transformers names it."""
        return str(self.text_config.model_type)

    @property
    def device(self) -> torch.device:
        """The device of the model's first weights."""
        return self.model.device

    @cached_property
    def label(self) -> str | None:
        """The layer type whose rotary settings are extended; None where all layers share them."""
        return rope_label(self.text_config)

    @property
    def prefix(self) -> str:
        """The prefix of the names of that layer type's buffers."""
        return prefix_of(self.label)

    @cached_property
    def rotary_modules(self) -> dict[str, nn.Module]:
        """The decoder's rotary modules by name.

        The convention of Transformers 5: buffers ``inv_freq`` and ``original_inv_freq``, attributes ``rope_type`` and
        ``attention_scaling`` (with the layer type before the names where each has its own), and the text config. Vision
        and audio rotaries lack one of these and are left alone.

        Raises:
            UnsupportedModelError: The family is refused, with the reason, or there is no such module.
        """
        config = self.text_config
        refuse_family(config)
        prefix = self.prefix
        usual = {
            name: module
            for name, module in self.model.named_modules()
            if {f"{prefix}inv_freq", f"{prefix}original_inv_freq"} <= module._buffers.keys()
            and isinstance(getattr(module, "rope_type", None), (str, dict))
            and hasattr(module, f"{prefix}attention_scaling")
        }
        rotary_modules = {
            name: module for name, module in usual.items() if type(getattr(module, "config", None)) is type(config)
        }
        if not rotary_modules:
            raise Refusal(config.model_type, "no_rotary_module", {"class_name": type(self.model).__name__}).error()
        if self.model.config.is_encoder_decoder and usual.keys() - rotary_modules.keys():
            names = ", ".join(sorted(usual.keys() - rotary_modules.keys()))
            raise Refusal(config.model_type, "encoder_has_another_config", {"names": names}).error()
        return rotary_modules

    @property
    def rotary_module(self) -> nn.Module:
        """The only rotary module; models whose attention is replaced have one."""
        [module] = self.rotary_modules.values()
        return module

    @cached_property
    def decoder(self) -> nn.Module:
        """The module that holds the only rotary module, whose forward begins and ends the pass through the layers."""
        [name] = self.rotary_modules
        return self.model.get_submodule(name.rpartition(".")[0])

    @property
    def extension(self) -> Any:
        """The ``Extension`` (hf_posenc.methods.base) that ``patch_model`` applied; None in any other model.

        What the config of a model that is not patched declares is not looked at: see ``patching.api.extension_of``.
        """
        return None if self.record is None else self.record.extension

    @property
    def record(self) -> Any:
        """The ``PatchRecord`` of a patched model; None for any other."""
        return self.model.__dict__.get(_RECORD)

    @record.setter
    def record(self, record: Any) -> None:
        if record is None:
            self.model.__dict__.pop(_RECORD, None)
        else:
            self.model.__dict__[_RECORD] = record
