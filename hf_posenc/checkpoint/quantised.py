"""Quantised weights that cannot be saved, or would be saved as other ones.

The latter are bitsandbytes' 4-bit weights on a CPU that has AVX512-BF16. The first forward outside training lays them
out anew and rounds their scales to bfloat16. ``state_dict()`` undoes that wrongly, in the live model too, and nothing
says so (bitsandbytes 0.50.2).
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import InvalidRequestError

_MAY_LAY_OUT = "support_avx512bf16_for_cpu"


def refuse_unsaveable(model: PreTrainedModel, *, whole: bool) -> None:
    """Refuse a model that cannot be saved as it is, before anything is written.

    Args:
        model: The model, not wrapped.
        whole: Its weights are to be written, not an adapter's alone.

    Raises:
        ValueError: Transformers cannot write weights quantised so, or some are laid out for this CPU.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if whole and quantizer is not None and not quantizer.is_serializable():
        method = quantizer.quantization_config.quant_method
        method = getattr(method, "value", method)  # an enum, or the name
        raise InvalidRequestError(
            f"the model cannot be saved: Transformers does not write weights quantised by {method!r}. Extend and save "
            "the model without quantisation, and quantise what that gives."
        )
    refuse_laid_out(model, "the model cannot be saved")


def refuse_laid_out(model: nn.Module, what: str) -> None:
    """Refuse a model whose 4-bit weights are laid out for this CPU, before ``state_dict()`` can scramble them.

    Args:
        model: Any model.
        what: What cannot be done with it, for the message.

    Raises:
        ValueError: Some weight is laid out so.
    """
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise InvalidRequestError(
                f"{what}: when the model first ran, bitsandbytes laid its 4-bit weights ({name}) out for this CPU, and "
                "would save other ones now. Load the model again and do this before it runs, or call "
                "hf_posenc.checkpoint.quantised.keep_layout(model) before it runs, or load it on a GPU."
            )


def keep_layout(model: nn.Module) -> None:
    """Leave 4-bit weights as they are in every forward to come: slower on such a CPU, and safe to save."""
    for module in model.modules():
        if hasattr(module, _MAY_LAY_OUT):
            setattr(module, _MAY_LAY_OUT, False)
