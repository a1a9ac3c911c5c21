"""The attention function that Transformers calls, and what is noted of a forward before it."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache

from hf_posenc.attention.inner import PREFIX, AttentionCall, Output, inner_name, slot_states
from hf_posenc.attention.layout import Forward, text_positions
from hf_posenc.errors import InvalidRequestError, RotaryMismatchError, argument

# What a layer's queries and keys need: the rule, or nothing (its window never leaves the original length, it has no
# positions, or a rotary module of its own); the keys of one that attends to images have no position in the text.
FULL, PASS, CROSS = "full", "pass", "cross"
INNER = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")
_ATTENTION = "_hf_posenc_attention"
# Layers with windows see other slots than the rest; under torch.compile nothing else lets go of earlier forwards.
_KEPT_FORWARDS = 4
Seen = TypeVar("Seen", bound=Forward)


class PositionalAttention(abc.ABC, Generic[Seen]):
    """An attention implementation of a model, with the state of one forward at a time."""

    def __init__(self, inner: str) -> None:
        """Make one.

        Args:
            inner: The attention implementation that was in use.
        """
        self.inner = inner
        self.cache: Cache | None = None
        self.positions: torch.Tensor | None = None
        self.forwards: list[Seen] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": None, "positions": None, "forwards": []}

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Take note of the cache; a forward pre-hook of the decoder."""
        config: Any = module.config
        implementation = config._attn_implementation
        if implementation != PREFIX + self.inner:
            raise InvalidRequestError(
                f"the attention implementation was changed to {implementation!r} after patch_model, so positions would "
                f"be lost. Call unpatch_model first, change it, and patch again."
            )
        if not torch.compiler.is_compiling():
            self.cache = kwargs.get("past_key_values")
            self.begin()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Let go of the cache; a forward hook of the decoder."""
        if not torch.compiler.is_compiling():
            self.cache = self.positions = None
            self.begin()

    def begin(self) -> None:
        """Forget what the layers of a forward shared."""
        self.forwards = []

    def read(self, position_ids: torch.Tensor, num_slots: int, states: torch.Tensor | None) -> Seen:
        """Return the object that this forward's layers share; it is the same for all layers that see the same slots."""
        for forward in self.forwards:
            if forward.is_of(position_ids, num_slots, states):
                return forward
        shared = self.look_at(position_ids, num_slots, states)
        self.forwards = [*self.forwards[1 - _KEPT_FORWARDS :], shared]
        return shared

    @abc.abstractmethod
    def look_at(self, position_ids: torch.Tensor, num_slots: int, states: torch.Tensor | None) -> Seen:
        """Read what this forward's layers share; arguments and errors as ``read_layout``'s."""

    def note_positions(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Take note of the positions, which some families do not hand on to their layers; of the rotary module."""
        position_ids = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if position_ids is not None and position_ids.dim() == 3:
            position_ids = text_positions(position_ids)
        if not torch.compiler.is_compiling():
            self.positions = position_ids

    def cache_layer(self, module: nn.Module) -> Any:
        """Return the layer of the KV cache that an attention layer fills; None without one."""
        index: Any = module.layer_idx
        return self.cache.layers[index] if self.cache is not None and index < len(self.cache.layers) else None

    @abc.abstractmethod
    def attend(self, call: AttentionCall) -> Output:
        """Attend as the rule says; the result is that of Transformers' attention functions."""


def split_mask(mask: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a mask as the states of the slots ``(batch, num_slots)``, or as a dense one; both None without a mask.

    Raises:
        ValueError: It is one of FlexAttention's.
    """
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise InvalidRequestError(
            "in hf_posenc's attention FlexAttention has causal masks only, not those of sliding windows or packed "
            f"documents. Load the model with {argument('attn_implementation', 'sdpa')}."
        )
    return (mask, None) if mask is not None and mask.dim() == 2 else (None, mask)


def hf_posenc_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The function that Transformers calls; each attention layer of a patched model knows what it attends by."""
    if _ATTENTION not in module.__dict__:
        inner = inner_name(module.config._attn_implementation)  # type: ignore[arg-type, union-attr]  # attention layers have a config
        raise RotaryMismatchError(
            "this model was built from the config of a patched model, whose rule no config can hold. Call "
            f"model.set_attn_implementation({inner!r}), and patch_model(model, ...) to extend this model too."
        )
    attention, kind = module.__dict__[_ATTENTION]
    call = AttentionCall(module, query, key, value, attention_mask, kwargs, kind)
    if kind == CROSS:
        return call.by(attention.inner)
    if not is_causal(module, kwargs):
        raise InvalidRequestError(
            f"{type(module).__name__} attends to later tokens (is_causal is False), and the method that the model is "
            "extended by is for causal attention only. Call unpatch_model first, or take a static method such as "
            "'yarn'."
        )
    if kwargs.get("position_ids") is None:
        if attention.positions is None:
            raise InvalidRequestError(
                f"{type(module).__name__} gets no positions of its queries (position_ids), so gradient "
                "checkpointing and torch.compile cannot be used with this rule."
            )
        kwargs["position_ids"] = attention.positions
    return attention.attend(call)  # type: ignore[no-any-return]  # __dict__ holds anything


def is_causal(module: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a layer attends to earlier tokens only; an argument of the call decides before its attribute."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def register() -> None:
    """Make the function known to Transformers, once for each implementation that it can call."""
    for inner in INNER:
        AttentionInterface.register(PREFIX + inner, hf_posenc_attention)
        AttentionMaskInterface.register(PREFIX + inner, slot_states)


def set_attention(module: nn.Module, attention: PositionalAttention[Any], kind: str) -> None:
    """Give an attention layer what it attends by."""
    module.__dict__[_ATTENTION] = (attention, kind)


def drop_attention(module: nn.Module) -> None:
    """Take it away."""
    module.__dict__.pop(_ATTENTION, None)


def attention_of(module: nn.Module) -> PositionalAttention[Any] | None:
    """Return the object by which an attention layer attends; None for Transformers' own attention."""
    installed = module.__dict__.get(_ATTENTION)
    return installed[0] if installed else None


@contextmanager
def attending_by(configs: Sequence[Any], layers: Mapping[nn.Module, tuple[Any, str]]) -> Iterator[None]:
    """While open, attention layers attend by what is given for them; then again by what they attended by before.

    Args:
        configs: Those of the layers, whose attention implementation is hf_posenc's while this is open.
        layers: What each layer attends by, with an ``attend`` as a ``PositionalAttention`` has, and its kind.
    """
    register()
    before = {module: module.__dict__.get(_ATTENTION) for module in layers}
    implementations = [(config, config._attn_implementation) for config in configs]
    try:
        for module, (attention, kind) in layers.items():
            set_attention(module, attention, kind)
        for config, name in implementations:
            config._attn_implementation = PREFIX + inner_name(str(name))
        yield
    finally:
        for module, found in before.items():
            drop_attention(module)
            if found is not None:
                set_attention(module, *found)
        for config, name in implementations:
            config._attn_implementation = name


def count_layers(model: nn.Module, attention: PositionalAttention[Any]) -> int:
    """Return the number of attention layers of a model that attend by it."""
    found = (module.__dict__.get(_ATTENTION) for module in model.modules())
    return sum(entry is not None and entry[0] is attention and entry[1] == FULL for entry in found)
