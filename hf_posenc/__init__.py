"""Make a LLaMA, Mistral or Qwen-style model read further than it was trained to, and prove that it does."""

from hf_posenc.checkpoint import load_extended, save_extended
from hf_posenc.extension import extend_config
from hf_posenc.patching import describe, patch_model, patched, unpatch_model, verify_model
from hf_posenc.registry import available_methods
from hf_posenc.verification import RotaryMismatchError, Verification
from hf_posenc.version import __version__

__all__ = [
    "RotaryMismatchError",
    "Verification",
    "__version__",
    "available_methods",
    "describe",
    "extend_config",
    "load_extended",
    "patch_model",
    "patched",
    "save_extended",
    "unpatch_model",
    "verify_model",
]
