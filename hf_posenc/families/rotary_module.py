"""Static rules, written into the model's own rotary modules, kept float32, and taken out again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_posenc.errors import InvalidRequestError

# Endings, because models whose layer types differ put the layer type before each name.
_BUFFERS = ("inv_freq",)
_ATTRIBUTES = ("attention_scaling", "rope_type", "rope_init_fn", "max_seq_len_cached", "original_max_seq_len")
_KEPT = "_hf_posenc_float32"
_SAID = "_hf_posenc_extension"


class _Float32Rotary(nn.Module):
    """Keeps the frequencies float32 and unrounded through ``.to(bfloat16)``, ``.half()`` and ``to_empty``.

    Transformers guards them only while loading; a later cast rounds ``inv_freq``, by up to 2.9 radians at
    position 16384 in bfloat16.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        _put_buffers(self, self.__dict__[_KEPT])
        if self.rope_type == "dynamic":  # the buffers are those of the original length again
            self.max_seq_len_cached = self.original_max_seq_len
        return self

    def extra_repr(self) -> str:
        """Say in ``repr(model)`` what the model is extended by."""
        return str(self.__dict__.get(_SAID, ""))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The guarded class is made at run time, so a pickle names the class it was made from.
        return _rebuild, (rotary_class(self),), self.__dict__


_GUARDED: dict[type[nn.Module], type[nn.Module]] = {}


def _guarded(rotary_class: type[nn.Module]) -> type[nn.Module]:
    if rotary_class not in _GUARDED:
        # The name stays: Transformers re-initialises modules whose class name contains "RotaryEmbedding".
        namespace = {"__module__": rotary_class.__module__}
        _GUARDED[rotary_class] = type(rotary_class.__name__, (_Float32Rotary, rotary_class), namespace)
    return _GUARDED[rotary_class]


def _rebuild(rotary_class: type[nn.Module]) -> nn.Module:
    cls = _guarded(rotary_class)
    return cls.__new__(cls)


def rotary_class(module: nn.Module) -> type[nn.Module]:
    """Return Transformers' class of a rotary module, guarded or not."""
    cls = type(module)
    return cls.__bases__[1] if issubclass(cls, _Float32Rotary) else cls


@dataclass
class SavedRotary:
    """Everything of a rotary module that patching changes."""

    buffers: dict[str, torch.Tensor]
    attributes: dict[str, Any] = field(default_factory=dict)


def _put_buffers(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    seen: set[int] = set()
    for name, value in values.items():
        old = module._buffers[name]
        assert old is not None
        is_alias = id(old) in seen  # Transformers 5.0's longrope makes one buffer the other
        seen.add(id(old))
        if is_alias or old.is_meta or old.dtype != value.dtype or old.shape != value.shape:
            module._buffers[name] = value.to(old.device, copy=True)
        else:
            with torch.no_grad():
                old.copy_(value)  # in place: compiled code and CUDA graphs keep the address


def read_rotary(module: nn.Module) -> SavedRotary:
    """Copy the state of a rotary module."""
    buffers = {
        name: buffer.detach().clone()
        for name, buffer in module._buffers.items()
        if buffer is not None and name.endswith(_BUFFERS)
    }
    attributes = {name: copy.copy(value) for name, value in module.__dict__.items() if name.endswith(_ATTRIBUTES)}
    return SavedRotary(buffers, attributes)


def _write(module: nn.Module, saved: SavedRotary) -> None:
    _put_buffers(module, saved.buffers)
    module.__dict__.update({name: copy.copy(value) for name, value in saved.attributes.items()})
    for name in [name for name in module.__dict__ if name.endswith("long_inv_freq")]:
        del module.__dict__[name]  # longrope's cache of the other list


def instantiate(module: nn.Module, config: PreTrainedConfig) -> SavedRotary:
    """Return the buffers that Transformers itself makes in a rotary module of this class, built from ``config``.

    Raises:
        ValueError: It cannot build one.
    """
    try:
        with torch.device("cpu"):
            fresh = rotary_class(module)(config)
    except Exception as error:  # whatever a family's own code trips over
        raise InvalidRequestError(
            f"Transformers cannot build {rotary_class(module).__name__} from this rule "
            f"({type(error).__name__}: {error}). Take another method for model_type {config.model_type!r}."
        ) from error
    return read_rotary(fresh)


def holds_what_is_built(module: nn.Module, config: PreTrainedConfig) -> bool:
    """Return whether a rotary module holds what Transformers itself puts into one that it builds from ``config``."""
    try:
        built = instantiate(module, config)
    except InvalidRequestError:
        return False
    held = read_rotary(module)
    factors = {name: value for name, value in held.attributes.items() if name.endswith("attention_scaling")}
    return all(built.attributes.get(name) == value for name, value in factors.items()) and all(
        name in built.buffers and torch.equal(built.buffers[name], buffer.cpu())
        for name, buffer in held.buffers.items()
    )


def zero_other_layer_types(saved: SavedRotary, label: str | None) -> None:
    """Let no layer type rotate: in ``saved``, what belongs to others than ``label`` holds frequencies of zero."""
    if label is None:
        return
    own = {f"{label}_{name}" for name in ("inv_freq", "original_inv_freq", "attention_scaling")}
    for name, buffer in saved.buffers.items():
        if name not in own:
            saved.buffers[name] = torch.zeros_like(buffer)
    for name, value in saved.attributes.items():
        if name == "rope_type":
            saved.attributes[name] = {kind: rule if kind == label else "default" for kind, rule in value.items()}
        elif name.endswith("attention_scaling") and name not in own:
            saved.attributes[name] = 1.0


def write_rotary(module: nn.Module, saved: SavedRotary, said: str | None = None) -> None:
    """Make the module hold ``saved``, float32, and keep it so through later casts.

    Args:
        module: The rotary module.
        saved: What it is to hold.
        said: What the model is extended by, in words, for ``repr``; None leaves what was said before.
    """
    _write(module, saved)
    module.__dict__[_KEPT] = saved.buffers
    if said is not None:
        module.__dict__[_SAID] = said
    module.__class__ = _guarded(rotary_class(module))


def restore_rotary(module: nn.Module, saved: SavedRotary) -> None:
    """Undo ``write_rotary``: class, buffers and attributes as they were."""
    module.__class__ = rotary_class(module)
    for name in (_KEPT, _SAID):
        module.__dict__.pop(name, None)
    _write(module, saved)
