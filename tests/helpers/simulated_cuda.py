"""A CUDA device that is not there: tensors that say they are on it, compute on the CPU, and refuse the CPU's tensors.

PyTorch's own ``FakeTensorMode`` judges devices alike, but in a PyTorch built without CUDA it cannot index a fake CUDA
tensor (an error) nor take part in autograd (the process is aborted), and it has no values, without which half of the
methods cannot decide anything. Here every tensor has its values, so whole forwards, backwards and generations run,
and their results are compared with those of the CPU. What it cannot do: streams, memory statistics, CUDA's kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posenc.attention import spans, tiles

CUDA = torch.device("cuda", 0)  # with its number: without one PyTorch asks the device that is not there
_CPU = torch.device("cpu")
_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)

# Inside a dispatch mode PyTorch does not look at the bit that says "to be conjugated", or negated, later.
_AT_ONCE = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}


class MixedDevicesError(RuntimeError):
    """An operator was given tensors of both devices."""


class SimulatedCuda(torch.Tensor):
    """A tensor whose values, ``held``, are on the CPU; to PyTorch's C++ code its own memory is on the meta device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> SimulatedCuda:
        shell = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
        made = torch.Tensor._make_subclass(cls, shell, False, device_for_backend_keys=_CPU)
        made.held = held
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __repr__(self, **kwargs: Any) -> str:
        return f"SimulatedCuda({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Simulation(TorchDispatchMode):
    """Sees the operators that make tensors, too: ``torch.arange(..., device="cuda:0")``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def simulated_cuda() -> Iterator[torch.device]:
    """While open there is a device ``cuda:0``; models are moved to it by ``.to``, tensors by that or ``device=``."""
    lifts, starts = torch._C._only_lift_cpu_tensors(), torch.cuda._lazy_init
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is then a copy from the CPU
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters become of another class
    torch.cuda._lazy_init = lambda: None
    bias, why_not_flex = tiles.causal_lower_right, spans.why_not_flex
    tiles.causal_lower_right = _causal_mask
    spans.why_not_flex = lambda *args: "its kernels are compiled for a device that is there"
    try:
        with _Simulation():
            yield CUDA
    finally:
        tiles.causal_lower_right, spans.why_not_flex = bias, why_not_flex
        torch.cuda._lazy_init = starts
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        torch._C._set_only_lift_cpu_tensors(lifts)


def _causal_mask(num_queries: int, num_keys: int) -> torch.Tensor:
    """Return what PyTorch's ``causal_lower_right`` stands for; a class of its own cannot be made in a dispatch mode."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=CUDA).tril(num_keys - num_queries)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the values; its result is where CUDA would have it.

    Raises:
        MixedDevicesError: A tensor of the CPU, other than a single number, meets one of the device. CUDA would let
            indices on the CPU pass, at the price of a copy; this does not.
    """
    tensors: list[torch.Tensor] = []
    plain_args = [_plain(arg, tensors) for arg in args]
    plain_kwargs = {name: _plain(value, tensors) for name, value in kwargs.items()}
    on_cuda = any(isinstance(tensor, SimulatedCuda) for tensor in tensors)
    if on_cuda and func not in _MOVES:
        strangers = [tensor for tensor in tensors if not isinstance(tensor, SimulatedCuda) and tensor.dim()]
        if strangers:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in strangers)
            raise MixedDevicesError(f"{func} got tensors of {CUDA} and of the CPU, of shape {shapes}")
    if kwargs.get("device") is not None:
        on_cuda = kwargs["device"] != _CPU  # "meta" is what C++ code reads of a simulated tensor
    result = _AT_ONCE.get(func, func)(*plain_args, **plain_kwargs)
    place = _changed(func)
    if place is None:
        return _simulated(result) if on_cuda else result
    changed = args[place[0]] if place[0] < len(args) else kwargs[place[1]]
    if isinstance(changed, SimulatedCuda) and changed.shape != changed.held.shape:
        raise NotImplementedError(f"{func} changes the shape of its argument")
    return changed


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return an argument as the CPU wants it, and add its tensors to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.held if isinstance(value, SimulatedCuda) else value
    if isinstance(value, (list, tuple)):
        return [_plain(each, tensors) for each in value]
    return _CPU if isinstance(value, torch.device) else value


def _simulated(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return SimulatedCuda(result)
    return type(result)(map(_simulated, result)) if isinstance(result, (list, tuple)) else result


@functools.cache
def _changed(func: Any) -> tuple[int, str] | None:
    """Return the argument that an operator writes to and returns, by place and name; None if it makes a new tensor."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return index, argument.name
    return None
