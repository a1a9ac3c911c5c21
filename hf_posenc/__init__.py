"""Make a LLaMA, Mistral or Qwen-style model read further than it was trained to, and prove that it does."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_posenc.checkpoint.standard_saving import install
from hf_posenc.version import __version__

if TYPE_CHECKING:
    from hf_posenc.checkpoint.extended import load_extended
    from hf_posenc.checkpoint.manifest import describe, verify_model
    from hf_posenc.doctor.diagnosis import diagnose
    from hf_posenc.errors import HfPosencError, RotaryMismatchError
    from hf_posenc.evaluation.config import EvalConfig
    from hf_posenc.evaluation.measuring_perplexity import perplexity
    from hf_posenc.evaluation.perplexity_callback import PerplexityCallback
    from hf_posenc.evaluation.records import Record
    from hf_posenc.fitting.config import FitConfig
    from hf_posenc.fitting.fitting import FitResult, fit_method
    from hf_posenc.methods.registry import available_methods
    from hf_posenc.patching.api import patch_model, patched, unpatch_model, unpatched
    from hf_posenc.patching.layouts import convert_layout
    from hf_posenc.patching.request import extend_config
    from hf_posenc.patching.verification import Verification
    from hf_posenc.planning.planner import Plan, plan
    from hf_posenc.publishing.saving import save_extended
    from hf_posenc.reporting import report
    from hf_posenc.retrieving.measuring_retrieval import retrieval
    from hf_posenc.training.config import FinetuneConfig
    from hf_posenc.training.training_run import FinetuneResult, finetune

# Imported when first asked for: PyTorch and Trainer take seconds, which `hf-posenc --help` need not cost.
_MODULES = {
    "EvalConfig": "evaluation",
    "FinetuneConfig": "training",
    "FinetuneResult": "training",
    "FitConfig": "fitting.config",
    "FitResult": "fitting.fitting",
    "HfPosencError": "errors",
    "PerplexityCallback": "evaluation.perplexity_callback",
    "Plan": "planning",
    "Record": "evaluation",
    "RotaryMismatchError": "errors",
    "Verification": "patching.verification",
    "available_methods": "methods.registry",
    "convert_layout": "patching.layouts",
    "describe": "checkpoint.manifest",
    "diagnose": "doctor",
    "extend_config": "patching.request",
    "finetune": "training",
    "fit_method": "fitting.fitting",
    "load_extended": "checkpoint.extended",
    "patch_model": "patching.api",
    "patched": "patching.api",
    "perplexity": "evaluation",
    "plan": "planning",
    "report": "reporting",
    "retrieval": "retrieving.measuring_retrieval",
    "save_extended": "publishing.saving",
    "unpatch_model": "patching.api",
    "unpatched": "patching.api",
    "verify_model": "checkpoint.manifest",
}

__all__ = [
    "EvalConfig",
    "FinetuneConfig",
    "FinetuneResult",
    "FitConfig",
    "FitResult",
    "HfPosencError",
    "PerplexityCallback",
    "Plan",
    "Record",
    "RotaryMismatchError",
    "Verification",
    "__version__",
    "available_methods",
    "convert_layout",
    "describe",
    "diagnose",
    "extend_config",
    "finetune",
    "fit_method",
    "install",
    "load_extended",
    "patch_model",
    "patched",
    "perplexity",
    "plan",
    "report",
    "retrieval",
    "save_extended",
    "unpatch_model",
    "unpatched",
    "verify_model",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
