"""The device of all GPU tests: CUDA, and without it they fail rather than being skipped."""

from __future__ import annotations

import os

import pytest
import torch

# For developing these tests where there is no GPU: HF_POSENC_TEST_DEVICE=cpu runs the same bodies on the CPU, all but
# those that ask for ``cuda_only``. It says nothing of GPUs, so scripts/test --gpu does not set it.
DEVICE = os.environ.get("HF_POSENC_TEST_DEVICE", "cuda")


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the model under test is."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        request.session.shouldfail = "no CUDA device"  # once is enough
        pytest.fail(
            f"the GPU tests need a CUDA device and PyTorch sees none (torch {torch.__version__} {built}). "
            "Run scripts/test without --gpu for the tests of the CPU.",
            pytrace=False,
        )
    return torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)


@pytest.fixture
def cuda_only(device: torch.device) -> torch.device:
    """For bodies that mean nothing without CUDA: its memory, its streams, its kernels."""
    if device.type != "cuda":
        pytest.skip("of CUDA's own memory, streams or kernels")
    return device
