"""A few tokens through a model, before and after its attention is replaced: what it computed, it must still compute.

Three comparisons, because a wrong rotation or a wrong mask raises no error:

- a text as short as the rule leaves alone gives the same output, to the bit;
- the inverse rotation takes the queries and keys of each layer back to those that no rotation gives;
- past the border each layer attends to the tokens that it attended to before. The replaced attention runs here with a
  rule that has a border of a few tokens and changes no angle, so that each layer must hand on what it did before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.attention.interface import FULL
from hf_posenc.attention.rotating_attention import RotatingAttention
from hf_posenc.errors import InvalidRequestError, RotaryMismatchError
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.families.rotary_module import SavedRotary, write_rotary
from hf_posenc.methods.base import (
    DistanceMethod,
    Regions,
    StagedMethod,
    StaticMethod,
    Unscaled,
    near_and_far,
    same,
)
from hf_posenc.spec import RopeSpec

SHORT = 5  # tokens of a text that the rule leaves alone
_BORDER, _PAST_BORDER = 4, 11  # tokens: where the rules that change no angle begin, and of the text read with them
_ROTATION_EPSILONS = 16  # roundings of a state that is rotated twice, in epsilons of its dtype
_ATTENTION_EPSILONS = 32  # roundings of a layer that adds its attention up in parts
_TAKE_STATIC = "Take a static method, such as 'yarn'."


class _PlainStages(StagedMethod):
    """Stages that all have the model's own frequencies."""

    def at(self, factor: float) -> StaticMethod:
        return Unscaled()


class _PlainRegions(DistanceMethod):
    """Two regions, in both of which distances are what they are."""

    def regions(self, spec: RopeSpec) -> Regions:
        return near_and_far(_BORDER, same, same, "far")

    def settings(self, spec: RopeSpec) -> str:
        return ""


@dataclass(frozen=True)
class Before:
    """The outputs of a model before its attention was replaced.

    Attributes:
        layers: The attention layers whose keys are those of the text.
        num_tokens: Number of tokens of the short text.
        output: Its output of the short text.
        handed_on: What each call of such a layer returned, of a text past the border.
    """

    layers: Sequence[nn.Module]
    num_tokens: int
    output: torch.Tensor
    handed_on: list[Any]


def read_before(rotary: RotaryModel, layers: Sequence[nn.Module], num_tokens: int) -> Before | None:
    """Return the outputs that ``check_installed`` compares with; None for a model on the meta device.

    Args:
        rotary: The model, whose attention is its own.
        layers: The attention layers whose keys are those of the text.
        num_tokens: Tokens that the rule leaves alone, ``SHORT`` at most.

    Raises:
        ValueError: The model's output is not a number.
    """
    output = probe(rotary.model, num_tokens)
    if output is None:
        return None
    if bool(output.isnan().any()):
        raise InvalidRequestError(
            f"the output of {type(rotary.model).__name__} is not a number (NaN) on a text of {num_tokens} tokens, "
            f"before it is extended: its weights are damaged, or it overflows in {rotary.model.dtype}."
        )
    with _collected(layers) as handed_on:
        probe(rotary.model, _PAST_BORDER)
    return Before(layers, num_tokens, output, handed_on)


def check_installed(
    rotary: RotaryModel, attention: RotatingAttention, saved: SavedRotary, before: Before | None
) -> None:
    """Raise unless a model whose attention was replaced computes what it did before.

    Args:
        rotary: The model.
        attention: What its layers attend by now.
        saved: What the rotary module holds.
        before: What ``read_before`` returned; nothing is checked without it.

    Raises:
        RotaryMismatchError: A comparison failed; the message says which.
    """
    if before is None:
        return
    name = type(rotary.model).__name__
    after = probe(rotary.model, before.num_tokens)
    if after is None or not torch.equal(before.output, after) or not _rotates_as_known(rotary, attention, saved):
        raise RotaryMismatchError(
            f"the attention of {name} does not rotate queries and keys in the usual way, so hf_posenc's attention "
            f"implementation cannot rotate them further. {_TAKE_STATIC}"
        )
    if not _attends_as_before(rotary, attention, before):
        raise RotaryMismatchError(
            f"with hf_posenc's attention implementation a layer of {name} does not attend to the tokens that it "
            f"attended to before. {_TAKE_STATIC}"
        )


def _attends_as_before(rotary: RotaryModel, attention: RotatingAttention, before: Before) -> bool:
    """Return whether each layer hands on what it did before, under a rule that changes no angle past its border.

    Each call hands on what was collected before, so that all layers get the inputs that they got then.
    """
    is_staged = isinstance(attention.method, StagedMethod)
    rule = _PlainStages(_PAST_BORDER, stage=2) if is_staged else _PlainRegions(_PAST_BORDER)
    spec = RopeSpec(attention.spec.rotary_dim, attention.spec.rope_theta, _BORDER, attention.spec.unrotated_pairs)
    with attention.following(rule, spec), _collected(before.layers, before.handed_on) as handed_on:
        probe(rotary.model, _PAST_BORDER)
    return len(handed_on) == len(before.handed_on) and all(
        _close(_states(old), _states(new)) for old, new in zip(before.handed_on, handed_on, strict=True)
    )


def _states(output: Any) -> torch.Tensor:
    """Return the hidden states of what an attention layer returns, with weights beside them or not."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states


def _close(old: torch.Tensor, new: torch.Tensor) -> bool:
    error = (old - new).abs().max()
    return bool(error <= _ATTENTION_EPSILONS * _epsilon(old) * old.abs().max())


def _epsilon(states: torch.Tensor) -> float:
    """Return the rounding of rotated states, whose angles are float32 at best."""
    return max(torch.finfo(dtype).eps for dtype in (states.dtype, torch.float32))


@contextmanager
def _collected(layers: Sequence[nn.Module], replay: Sequence[Any] = ()) -> Iterator[list[Any]]:
    """While open, collect what layers return, in the order of their calls; they return ``replay`` instead if given."""
    outputs: list[Any] = []

    def collect(module: nn.Module, args: Any, output: Any) -> Any:
        outputs.append(output)
        return replay[len(outputs) - 1] if len(outputs) <= len(replay) else None

    hooks = [layer.register_forward_hook(collect) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _rotates_as_known(rotary: RotaryModel, attention: RotatingAttention, saved: SavedRotary) -> bool:
    """Return whether the inverse rotation takes queries and keys back to what no rotation gives, in every layer.

    Queries and keys are seen twice, as they are and with frequencies of zero, while attention hands on values alone.
    """
    module, prefix = rotary.rotary_module, rotary.prefix
    names = (f"{prefix}inv_freq", f"{prefix}original_inv_freq")
    unrotated_state = SavedRotary(
        {**saved.buffers, **{name: torch.zeros_like(attention.plain) for name in names}}, saved.attributes
    )
    seen = []
    try:
        for state in (saved, unrotated_state):
            write_rotary(module, state)
            attention.seen = []
            probe(rotary.model, SHORT)
            seen.append(attention.seen)
    finally:
        attention.seen = None
        write_rotary(module, saved)
    full = [(rotated, unrotated) for rotated, unrotated in zip(*seen, strict=True) if rotated[0] == FULL]
    pairs = [pair for rotated, unrotated in full for pair in zip(rotated[1:], unrotated[1:], strict=True)]
    return bool(pairs) and all(_rotates_back(attention, *pair) for pair in pairs)


def _rotates_back(attention: RotatingAttention, rotated: torch.Tensor, unrotated: torch.Tensor) -> bool:
    if torch.equal(rotated, unrotated):  # without positions
        return False
    positions = torch.arange(rotated.shape[2], device=rotated.device)[None]
    zeros = torch.zeros(1, len(attention.plain), device=rotated.device)
    back = attention.rotation_tables(positions, positions, zeros, torch.ones(1, device=rotated.device))
    error = (attention.rotation.rotate(rotated, back) - unrotated).abs().max()
    return bool(error <= _ROTATION_EPSILONS * _epsilon(rotated) * unrotated.abs().max())


@torch.no_grad()
def probe(model: PreTrainedModel, num_tokens: int) -> torch.Tensor | None:
    """Return a model's output for a few tokens, to see that it reads a short text as before; None on meta."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    modes = {module: module.training for module in model.modules()}
    try:
        ids = torch.arange(1, 1 + num_tokens, device=model.device)[None]
        model.train(False)
        with _zero3_gathered(model):
            output: torch.Tensor = model(input_ids=ids, use_cache=False)[0]
        return output
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _zero3_gathered(model: nn.Module) -> Iterator[None]:
    """While open, weights that DeepSpeed ZeRO-3 has shared out (they have a ``ds_id``) are whole while they are used.

    One module at a time: the whole model need not fit into one process. Every process has to call it.
    """
    shared = {
        module: parts
        for module in model.modules()
        if (parts := [p for p in module.parameters(recurse=False) if hasattr(p, "ds_id")])
    }
    if not shared:
        yield
        return
    import deepspeed

    gathered: dict[nn.Module, Any] = {}

    def gather(module: nn.Module, args: Any) -> None:
        gathered[module] = deepspeed.zero.GatheredParameters(shared[module])
        gathered[module].__enter__()

    def share_out(module: nn.Module, args: Any, output: Any) -> None:
        if module in gathered:
            gathered.pop(module).__exit__(None, None, None)

    hooks = [module.register_forward_pre_hook(gather) for module in shared]
    hooks += [module.register_forward_hook(share_out, always_call=True) for module in shared]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
