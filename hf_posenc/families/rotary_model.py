"""A loaded model, looked at once: what patching, verification, saving, evaluation, training and doctor need of it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_posenc.families.discovery import label_prefix, rope_label, rotary_modules, text_configs, unwrap

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# Where a patched model keeps its ``PatchRecord`` (hf_posenc.patching.record): everything that undoing needs.
_RECORD = "_hf_posenc_patch"


class RotaryModel:
    """A model, and where it keeps what positions are made of.

    Whatever is read from the modules is read once, when it is first asked for; a model without a rotary embedding can
    be looked at too, until its rotary modules are asked for.

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

    @property
    def text_config(self) -> PreTrainedConfig:
        """The config of the decoder that reads text; the model's own where there is no other."""
        config: PreTrainedConfig = self.model.config.get_text_config(decoder=True)
        return config

    @property
    def text_configs(self) -> list[PreTrainedConfig]:
        """Each distinct text config object that the model or one of its modules holds, the model's first."""
        return text_configs(self.model)

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
        """What stands before the names of the buffers of that layer type; empty where all layers share them."""
        return label_prefix(self.label)

    @cached_property
    def rotary_modules(self) -> dict[str, nn.Module]:
        """The decoder's rotary modules by name.

        Raises:
            ValueError: The family is refused, with the reason, or there is no such module.
        """
        return rotary_modules(self.model)

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
    def record(self) -> Any:
        """The ``PatchRecord`` of a patched model; None for any other."""
        return self.model.__dict__.get(_RECORD)

    @record.setter
    def record(self, record: Any) -> None:
        if record is None:
            self.model.__dict__.pop(_RECORD, None)
        else:
            self.model.__dict__[_RECORD] = record
