"""Weights while they are trained, in float32 and maybe spread over processes, and gathered again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_posenc.errors import RunStoppedError
from hf_posenc.training.lora import attention_modules
from hf_posenc.utils.dtypes import HALF


@contextmanager
def trained_alone(model: nn.Module, trainable: str) -> Iterator[None]:
    """While open, only some parameters of a model are trained, of those that were before.

    Args:
        model: Its other parameters are frozen, in place.
        trainable: ``"all"``, or ``"attention"`` for those inside attention modules.
    """
    inside = {id(p) for module in attention_modules(model) for p in module.parameters()}
    frozen = [p for p in model.parameters() if trainable != "all" and id(p) not in inside and p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


@contextmanager
def float32_weights(model: nn.Module, *, frozen: bool) -> Iterator[dict[str, torch.dtype]]:
    """Hold weights in float32 while open; afterwards in the dtype each one came in.

    bfloat16 keeps 8 bits: an update below 0.4 % of a weight rounds away, and those of a fine-tune are smaller. Buffers
    are not touched (a rotary ``inv_freq`` must never be rounded).

    Args:
        model: Its parameters in half precision are converted, in place. They are known by name: an engine that shards
            puts others in their place, and must be free to let these go.
        frozen: Those that are not trained too, for training without autocast, which cannot mix dtypes; they come back
            bit for bit. Else the trained ones only.

    Yields:
        The dtype that each converted parameter came in, by name.
    """
    came = {name: p.dtype for name, p in model.named_parameters() if (frozen or p.requires_grad) and p.dtype in HALF}
    for name, parameter in model.named_parameters():
        if name in came:
            parameter.data = parameter.data.float()
    try:
        yield came
    finally:
        for name, parameter in model.named_parameters():
            if name in came:
                parameter.data = parameter.data.to(came[name])
                parameter.grad = None


_Kept = dict[nn.Module, tuple[type[nn.Module], dict[str, Any], dict[str, torch.Size]]]


def remember_modules(model: nn.Module) -> _Kept:
    """Return the attributes of modules that an engine changes and never restores: class, hooks, shapes of parameters.

    FSDP2 gives modules another class and hooks that gather their weights, accelerate's context parallelism a hook that
    drops attention masks.
    """
    return {module: (type(module), _hooks(module), _shapes(module)) for module in model.modules()}


def unshard(model: nn.Module, before: _Kept, dtypes: Mapping[str, torch.dtype]) -> None:
    """Turn a sharded model into the plain one it was, with all trained weights in every process.

    A collective call. Each process needs memory for all weights on its device, in the dtype they came in; before they
    were sharded it held all of them too, for a moment in float32. What sharding saves, during training, is the memory
    of float32 weights, gradients and optimizer states. ZeRO-3's branch is tested on the CPU.

    Args:
        model: The model, in place; nothing happens to one that is not sharded but for its hooks.
        before: What ``remember_modules`` returned before training.
        dtypes: By parameter, the dtype to gather it in; those left out are gathered as they are.

    Raises:
        RuntimeError: A weight is not what it was in shape, so the engine keeps it in a way that is not known here.
    """
    _reshard(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    full: dict[int, nn.Parameter] = {}  # tied weights are gathered once and stay tied
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None or not _is_part(parameter):
                continue
            if id(parameter) not in full:
                dtype = dtypes.get(names[id(parameter)], parameter.dtype)
                values = _gathered(parameter, dtype)
                full[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            module._parameters[key] = full[id(parameter)]
    for module, (kind, hooks, shapes) in before.items():
        module.__class__ = kind
        for name, (held, kept) in hooks.items():  # the same dict: whoever put a hook in has a handle on it
            held.clear()
            held.update(kept)
            vars(module)[name] = held
        if _shapes(module) != shapes:
            raise RunStoppedError(
                f"the trained weights of {kind.__name__} could not be put together: {_shapes(module)} instead of "
                f"{shapes}. The last checkpoint in the output folder has them, in its engine's own format."
            )


@torch.no_grad()
def load_shards(model: nn.Module, full: Mapping[str, torch.Tensor]) -> list[str]:
    """Copy full weights, which every process has read, into a sharded model: each process takes its part.

    Args:
        model: Sharded, in place.
        full: By parameter name.

    Returns:
        Trained parameters that ``full`` does not hold.
    """
    _reshard(model)
    missing = []
    for name, parameter in model.named_parameters():
        if name in full:
            parameter.copy_(shard_like(full[name], parameter))
        elif parameter.requires_grad:
            missing.append(name)
    return missing


def shard_like(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this process' part of a tensor, laid out as a parameter is; no process asks another."""
    if not isinstance(parameter, DTensor):
        return full.to(parameter.device)
    full = full.to(parameter.device)
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):  # it leaves some weights gathered after a forward
            module.reshard()


def _is_part(parameter: Any) -> bool:
    """Return whether each process holds a part of a parameter: FSDP2's are DTensors, ZeRO-3's have a ``ds_id``."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")


def _gathered(parameter: Any, dtype: torch.dtype) -> torch.Tensor:
    full: torch.Tensor
    if isinstance(parameter, DTensor):
        sharded: Any = parameter.detach().to(dtype)
        full = sharded.full_tensor()
        return full
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        full = parameter.detach().to(dtype, copy=True)
    return full


def _hooks(module: nn.Module) -> dict[str, Any]:
    """Return each dict of hooks, and what it holds now."""
    hooks = {name: value for name, value in vars(module).items() if name.endswith("hooks") and value is not None}
    return {name: (value, value.copy()) for name, value in hooks.items()}


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters(recurse=False)}
