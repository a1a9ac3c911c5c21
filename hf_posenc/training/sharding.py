"""A model whose weights a training engine has spread over processes (FSDP2, ZeRO-3), and the same model whole again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_posenc.errors import RunStoppedError

_Kept = dict[nn.Module, tuple[type[nn.Module], dict[str, Any], dict[str, torch.Size]]]


def remember_modules(model: nn.Module) -> _Kept:
    """Return what an engine changes of each module and never puts back: class, hooks and the shapes of parameters.

    FSDP2 gives modules another class and hooks that gather their weights, accelerate's context parallelism a hook that
    drops attention masks.
    """
    return {module: (type(module), _hooks(module), _shapes(module)) for module in model.modules()}


def make_whole(model: nn.Module, before: _Kept, dtypes: Mapping[str, torch.dtype]) -> None:
    """Turn a sharded model into the plain one it was, with the trained weights whole in every process.

    A collective call. Each process needs memory for all weights on its device, in the dtype they came in; before they
    were shared out it held them whole too, for a moment in float32. What sharding saves, during training, is the memory
    of float32 weights, gradients and optimizer states. ZeRO-3's branch is tested on the CPU.

    Args:
        model: The model, in place; nothing happens to one that is not sharded but for its hooks.
        before: Of ``remember_modules``, before training.
        dtypes: By parameter, the dtype to gather it in; those left out are gathered as they are.

    Raises:
        RuntimeError: A weight is not what it was in shape, so the engine keeps it in a way that is not known here.
    """
    _reshard(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    whole: dict[int, nn.Parameter] = {}  # tied weights are gathered once and stay tied
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None or not _is_part(parameter):
                continue
            if id(parameter) not in whole:
                dtype = dtypes.get(names[id(parameter)], parameter.dtype)
                full = _gathered(parameter, dtype)
                whole[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
            module._parameters[key] = whole[id(parameter)]
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
def load_shards(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> list[str]:
    """Copy whole weights, which every process has read, into a sharded model: each process takes its part.

    Args:
        model: Sharded, in place.
        whole: By parameter name.

    Returns:
        Trained parameters that ``whole`` does not hold.
    """
    _reshard(model)
    missing = []
    for name, parameter in model.named_parameters():
        if name in whole:
            parameter.copy_(shard_like(whole[name], parameter))
        elif parameter.requires_grad:
            missing.append(name)
    return missing


def shard_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this process' part of a tensor, laid out as a parameter is; no process asks another."""
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    whole = whole.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):  # it leaves some weights gathered after a forward
            module.reshard()


def _is_part(parameter: Any) -> bool:
    """Return whether each process holds a part of a parameter: FSDP2's are DTensors, ZeRO-3's have a ``ds_id``."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")


def _gathered(parameter: Any, dtype: torch.dtype) -> torch.Tensor:
    whole: torch.Tensor
    if isinstance(parameter, DTensor):
        sharded: Any = parameter.detach().to(dtype)
        whole = sharded.full_tensor()
        return whole
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        whole = parameter.detach().to(dtype, copy=True)
    return whole


def _hooks(module: nn.Module) -> dict[str, Any]:
    """Return each dict of hooks, and what it holds now."""
    found = {name: value for name, value in vars(module).items() if name.endswith("hooks") and value is not None}
    return {name: (value, value.copy()) for name, value in found.items()}


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters(recurse=False)}
