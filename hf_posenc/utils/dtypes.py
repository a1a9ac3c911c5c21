"""The dtype in which a model computes on this machine, and the one in which its checkpoint is stored.

A CPU without instructions for bfloat16 converts every operand of every product: a training step of the tiny model takes
twelve times as long in bfloat16 as in float32 on a CPU with AVX2 alone. So ``"auto"`` is what the hardware computes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.errors import UnknownNameError

logger = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
AUTO, CHECKPOINT = "auto", "checkpoint"
# On a model that load_model loaded: the DtypeChoice.
_CHOICE = "_hf_posenc_dtype_choice"
_SAFETENSORS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def is_half(model: torch.nn.Module) -> bool:
    """Return whether any weight of a model is in half precision."""
    return any(parameter.dtype in HALF for parameter in model.parameters())


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype in which a model computes.

    Attributes:
        dtype: What ``from_pretrained`` is to be given; ``"auto"`` where that is left to the checkpoint.
        checkpoint: What the checkpoint holds its weights in; None if these are quantised, or in a ``.gguf`` file.
        reason: One sentence, where ``dtype`` is another than the checkpoint's and the user did not request it; else "".
    """

    dtype: torch.dtype | str
    checkpoint: torch.dtype | None
    reason: str = ""


def choose_dtype(
    requested: str | torch.dtype, checkpoint: torch.dtype | None, device: str | torch.device | None = None
) -> DtypeChoice:
    """Return the dtype a model computes in: the requested one, or for ``"auto"`` what the hardware computes natively.

    That is the checkpoint's own dtype on accelerators, and on CPUs that have instructions for it; float32 on other
    CPUs. The log says where that is another one than the checkpoint's, and warns of a half precision that was requested
    and is slow here.

    Args:
        requested: A dtype or its name, ``"auto"``, or ``"checkpoint"`` for the checkpoint's own everywhere.
        checkpoint: What the weights are stored in; None leaves ``"auto"`` to what loads them.
        device: Where the model is to be; None for a GPU if there is one, ``"auto"`` for all of them.

    Raises:
        ValueError: PyTorch has no floating-point type of that name.
    """
    wanted = parse_dtype(requested)
    on_cpu = _device_type(device) == "cpu"
    if isinstance(wanted, torch.dtype):
        if on_cpu and not computes_natively(wanted, "cpu"):
            logger.warning(
                "%s is slow on this CPU, which has no instructions for it: a step can take ten times as long as in "
                "float32, which --dtype float32 or auto gives.",
                dtype_name(wanted),
            )
        return DtypeChoice(wanted, checkpoint)
    if checkpoint is None or wanted == CHECKPOINT:
        return DtypeChoice(AUTO if checkpoint is None else checkpoint, checkpoint)
    if not on_cpu or computes_natively(checkpoint, "cpu"):
        return DtypeChoice(checkpoint, checkpoint)
    name = dtype_name(checkpoint)
    reason = (
        f"computing in float32: the checkpoint is in {name}, which this CPU has no instructions for "
        f"(--dtype {name} computes in it all the same, slowly)"
    )
    logger.info(reason)
    return DtypeChoice(torch.float32, checkpoint, reason)


def computes_natively(dtype: torch.dtype, device: str | torch.device | None = None) -> bool:
    """Return whether a device has instructions for a dtype. Accelerators are taken to have them.

    Both PyTorch and oneDNN are queried: oneDNN says yes for bfloat16 on any CPU with AVX-512, and emulates it on those
    without AVX512_BF16.
    """
    if dtype not in HALF or _device_type(device) != "cpu":
        return True
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return torch.cpu._is_avx512_bf16_supported() if has_avx512 else True


def slow_dtype_advice(model: PreTrainedModel) -> str:
    """Return the advice against a dtype that a model's device has to emulate, before other advice; else ""."""
    if computes_natively(model.dtype, model.device):
        return ""
    return f"--dtype float32 ({dtype_name(model.dtype)} is emulated here), "


def _device_type(device: str | torch.device | None) -> str:
    if device is None or device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device).type


def parse_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return the dtype of a name; ``"auto"`` and ``"checkpoint"`` stay.

    Raises:
        ValueError: PyTorch has no floating-point type of that name.
    """
    if not isinstance(dtype, str) or dtype in (AUTO, CHECKPOINT):
        return dtype
    resolved = getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise UnknownNameError("dtype", dtype, (AUTO, CHECKPOINT, "float32", "bfloat16", "float16"))
    return resolved


def dtype_name(dtype: torch.dtype) -> str:
    """Return a name such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def config_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype of a checkpoint by its config, or the config of its text model; float32 where it names none."""
    return _named_dtype(config.to_dict()) or torch.float32


def checkpoint_dtype(source: str | Path) -> torch.dtype | None:
    """Return the dtype of a checkpoint's weights, in a folder or on the Hub; None if the weights are quantised.

    By its config, or else by the first floating-point weight of a folder; float32 where neither says.

    Raises:
        OSError: There is no config.
    """
    values, _ = PreTrainedConfig.get_config_dict(source)
    if values.get("quantization_config"):
        return None
    return _named_dtype(values) or _first_dtype(Path(source)) or torch.float32


def _named_dtype(values: Mapping[str, Any]) -> torch.dtype | None:
    sections = (values, values.get("text_config") or {})
    named = next((section[key] for section in sections for key in ("dtype", "torch_dtype") if section.get(key)), None)
    dtype = getattr(torch, named.removeprefix("torch."), None) if isinstance(named, str) else named
    return dtype if isinstance(dtype, torch.dtype) else None


def _first_dtype(folder: Path) -> torch.dtype | None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            kinds = (weights.get_slice(name).get_dtype() for name in weights.keys())  # noqa: SIM118  # no mapping
            return next((_SAFETENSORS[kind] for kind in kinds if kind in _SAFETENSORS), None)
    return None


def remember_choice(model: PreTrainedModel, choice: DtypeChoice) -> None:
    """Note on a model how its dtype was chosen, for its records and for when it is saved."""
    setattr(model, _CHOICE, choice)


def dtype_of_checkpoint(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the checkpoint that ``load_model`` read; of any other model its own."""
    choice: DtypeChoice | None = getattr(model, _CHOICE, None)
    return model.dtype if choice is None or choice.checkpoint is None else choice.checkpoint


def stored_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype a model is saved in: its checkpoint's, where only this machine widened it; else its own."""
    choice: DtypeChoice | None = getattr(model, _CHOICE, None)
    widened_here = choice is not None and bool(choice.reason) and model.dtype == torch.float32
    return dtype_of_checkpoint(model) if widened_here else model.dtype


@contextmanager
def as_stored(model: PreTrainedModel) -> Iterator[None]:
    """While open, hold the weights that ``load_model`` widened in the dtype they are stored in, and widen them again.

    A model that was loaded, or trained by ``finetune``, loses nothing: its values are those of the narrower dtype.
    Adapters of LoRA, which came later, stay as they are.
    """
    dtype = stored_dtype(model)
    if dtype == model.dtype:
        yield
        return
    kept = _kept_in_float32(model, dtype)
    widened = [p for name, p in model.named_parameters() if p.dtype == torch.float32 and not kept.search(name)]
    configs = [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]
    wide = [config for config in configs if getattr(config, "dtype", None) == torch.float32]
    try:
        for parameter in widened:
            parameter.data = parameter.data.to(dtype)
        for config in wide:
            config.dtype = dtype
        yield
    finally:
        for parameter in widened:
            parameter.data = parameter.data.float()
        for config in wide:
            config.dtype = torch.float32


def round_to_stored(model: PreTrainedModel) -> None:
    """Round the weights to what can be stored, so that what is measured is what is saved."""
    with as_stored(model):
        pass


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Return the patterns of the names of parameters that are float32 beside weights of a half precision.

    Those are the adapters of LoRA, and what Transformers keeps so when it loads a checkpoint in that precision.
    """
    kept = {*(model._keep_in_fp32_modules_strict or ())}
    if dtype == torch.float16:
        kept |= {*(model._keep_in_fp32_modules or ())}
    return re.compile("|".join([r"\.lora_", *(rf"(^|\.){name}(\.|$)" for name in sorted(kept))]))
