"""The record that ``patch_model`` leaves on a model: everything is undone from it.

The record is the attribute ``_hf_posenc_patch`` of the ``PreTrainedModel`` (``RotaryModel.record``). Besides it a
patched model carries, each taken away again by ``unpatch_model``:

- on a rotary module, ``_hf_posenc_float32``: the float32 frequencies that casts must not round, and
  ``_hf_posenc_extension``: the words of ``repr(model)``; its class is one that keeps both (``rotary_module``);
- on an attention layer of a method that runs in attention, ``_hf_posenc_attention``: what it attends by;
- on the model, ``save_pretrained``: Transformers' own, which writes the extension too (``carrying``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_posenc.families.rotary_module import SavedRotary
from hf_posenc.methods.base import Extension
from hf_posenc.patching.lengths import LENGTH_KEYS, MARK

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hf_posenc.attention.installation import Installed

# What an extension may change of a text config; absent values stay absent.
CONFIG_VALUES = (
    "rope_parameters",
    *LENGTH_KEYS,
    "original_max_position_embeddings",
    "head_dim",
    "layer_rope_theta",
    "sliding_window",
    MARK,
)


def restore_config(config: PreTrainedConfig, values: Mapping[str, Any]) -> None:
    """Give a text config the values of ``CONFIG_VALUES`` that it had before ``patch_model``, in place."""
    for name in CONFIG_VALUES:
        if name in values:
            setattr(config, name, values[name])
        else:
            config.__dict__.pop(name, None)


@dataclass
class PatchRecord:
    """The changes that were made in a model, and its values before them.

    Attributes:
        extension: The method with its lengths.
        rotary: The state of each rotary module before, by name.
        scales: The softmax scale of each attention module that has another now, before.
        config_values: ``CONFIG_VALUES`` of each text config before.
        installed: What a method that runs in attention, or an encoding, put into the model.
        tokenizer: One whose limit was set, and its limit before.
        generation_max_length: ``generation_config.max_length`` before; None if it was not changed.
        carried_before: The model was loaded extended: it is saved so without this patch too.
    """

    extension: Extension
    rotary: dict[str, SavedRotary]
    scales: dict[str, float]
    config_values: list[dict[str, Any]]
    installed: Installed | None = None
    tokenizer: tuple[PreTrainedTokenizerBase, int] | None = None
    generation_max_length: int | None = None
    carried_before: bool = False
