"""The bytes that live while a model runs on fake tensors: shapes only, so no weights and no arithmetic."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What a tensor is for, and the sum of them all.
ALL = "all"
ACTIVATIONS, GRADIENTS, HALF_WEIGHTS, LOGITS, MATRICES = (
    "activations",
    "gradients",
    "half_weights",
    "logits",
    "attention_matrices",
)
# Takes every floating dtype, and on fake tensors bfloat16 alone; not every PyTorch that we take has it.
_OF_EXPERTS: Any = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    """While open, count the bytes of every storage that PyTorch's operators make, until it is freed.

    Under PyTorch's ``FakeTensorMode`` this is a run without data: shapes, dtypes, what autograd keeps and what
    checkpointing recomputes are PyTorch's own, and so are the moments at which tensors are freed. What a kernel takes
    for itself while it runs is not seen.

    Args:
        weights: The parameters; they exist already and are not counted.
        vocab_size: Tensors whose last size this is are logits.
        seq_len: Square matrices of this size are the attention's: its mask, or its scores.

    Attributes:
        phase: What is going on, set by whoever runs the model.
        peaks: For each phase the most bytes that lived at one time (``ALL``), and what they were for at that moment.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], vocab_size: int, seq_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        parameters = list(weights)
        self.weights = {parameter.untyped_storage()._cdata for parameter in parameters}
        self.trained_sizes = {parameter.numel() for parameter in parameters if parameter.requires_grad}
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.phase = "forward"
        self.peaks: dict[str, Counter[str]] = {}
        self.living: dict[int, tuple[str, int]] = {}
        self.parts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls, by autograd; it makes nothing
            return args[0].fake_device
        if func is _OF_EXPERTS and args[0].dtype != torch.bfloat16:
            matrices = (matrix.to(torch.bfloat16) for matrix in args[:2])
            result = func(*matrices, *args[2:], **(kwargs or {})).to(args[0].dtype)
        else:
            result = func(*args, **(kwargs or {}))
        casts_weight = "_to_copy" in str(func) and args[0].untyped_storage()._cdata in self.weights
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, HALF_WEIGHTS if casts_weight else None)
        return result

    def _count(self, tensor: torch.Tensor, kind: str | None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.living or key in self.weights:
            return
        kind, size = kind or self._kind(tensor), storage.nbytes()
        self.living[key] = kind, size
        self._add(kind, size)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        kind, size = self.living.pop(key)
        self._add(kind, -size)

    def _add(self, kind: str, size: int) -> None:
        self.parts[kind] += size
        self.parts[ALL] += size
        if self.parts[ALL] > self.peaks.setdefault(self.phase, Counter())[ALL]:
            self.peaks[self.phase] = self.parts.copy()

    def _kind(self, tensor: torch.Tensor) -> str:
        """Return the purpose of a tensor, by its shape; it decides only the parts, not their sum."""
        shape = tensor.shape
        if "backward" in self.phase and tensor.dim() <= 2 and tensor.numel() in self.trained_sizes:
            return GRADIENTS
        if len(shape) >= 2 and shape[-1] == shape[-2] == self.seq_len:
            return MATRICES
        return LOGITS if len(shape) >= 2 and shape[-1] == self.vocab_size else ACTIVATIONS
