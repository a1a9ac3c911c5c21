"""GPUs that are for rent, and how much of one a plan may fill."""

from __future__ import annotations

# Sizes that are rented most, in 10^9 bytes: RTX 4090, L4 and A10G; A100; L40S and A6000; A100 and H100; H20 and RTX Pro
# 6000; H200; B200 and MI300X.
RENTED = (24, 40, 48, 80, 96, 141, 192)
# Left for the CUDA context, kernels' workspaces and what the allocator cannot use; a guess, not measured.
RESERVE = 10**9


def usable(gpu_memory: int) -> int:
    """Return the bytes of a device that a plan may fill."""
    return gpu_memory - RESERVE


def smallest_gpu(size: int) -> int | None:
    """Return the smallest rented GPU that ``size`` bytes fit, in 10^9 bytes; None: not even the largest."""
    return next((rented for rented in RENTED if size <= usable(rented * 10**9)), None)
