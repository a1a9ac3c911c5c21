"""LoRA for longer contexts: adapters on linear layers, with the embedding and the norms trained whole or not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.checkpoint.extended import peft_renamed_attribute
from hf_posenc.errors import InvalidRequestError
from hf_posenc.training.step_plan import LoraSettings


def add_lora(model: PreTrainedModel, settings: LoraSettings) -> Any:
    """Give linear layers adapters by PEFT, and train the embedding and norms if the settings say so.

    A head that is tied to the embedding stays tied: it uses the trained embedding, and merging keeps it so.

    Args:
        model: The causal language model; it is changed in place.
        settings: Settings of the adapters.

    Raises:
        ValueError: No linear layer inside an attention module, by name.

    Reference: Chen et al. 2023, LongLoRA, arXiv:2309.12307, section 3.3; for adapters on all linear layers of a
    quantised model Dettmers et al. 2023, QLoRA, arXiv:2305.14314.
    """
    from peft import LoraConfig, get_peft_model

    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    tied = head is not None and head.weight is embedding.weight
    trained = [_leaf_name(model, embedding), *norm_names(model)] if settings.embeddings else None
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=attention_linears(model) if settings.targets == "attention" else settings.targets,
        modules_to_save=trained,
        ensure_weight_tying=tied and trained is not None,
    )
    with peft_renamed_attribute():
        return get_peft_model(model, config)


def check_trainable(model: Any, lora: bool) -> None:
    """Refuse a model that nothing can be trained of, or that has adapters where new ones are to be added.

    Args:
        model: What is to be trained, PEFT-wrapped or not.
        lora: Adapters are to be added.

    Raises:
        ValueError: No parameter asks for a gradient, ``lora`` and the model is PEFT-wrapped, or no adapters and its
            weights are quantised.
    """
    if is_adapted(model) and lora:
        raise InvalidRequestError(
            "the model has adapters already. Merge them first, model = model.merge_and_unload(), or go on training "
            "them: load them by PeftModel.from_pretrained(base, folder, is_trainable=True) and leave lora out."
        )
    trains_quantised = getattr(getattr(model, "hf_quantizer", None), "is_qat_trainable", False)
    if getattr(model, "is_quantized", False) and not (lora or is_adapted(model) or trains_quantised):
        raise InvalidRequestError(
            "the model's weights are quantised, so they cannot be trained. Train adapters on them: lora=True (--lora)."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidRequestError(
            "the model has no trainable parameters: all are frozen, as those of an adapter loaded for inference are. "
            "Merge an adapter first, model = model.merge_and_unload(), or load it by "
            "PeftModel.from_pretrained(base, folder, is_trainable=True)."
        )


def is_adapted(model: Any) -> bool:
    """Return whether a model is wrapped by PEFT."""
    return not isinstance(model, PreTrainedModel) and hasattr(model, "peft_config")


@contextmanager
def base_not_looked_up() -> Iterator[None]:
    """While open, PEFT's failure to look up the base model's vocabulary is no news.

    On saving it asks the Hub for it, to decide whether the embedding has to be saved; here it always is.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Could not find a config file|Unable to fetch remote file", UserWarning)
        yield


def attention_linears(model: nn.Module) -> list[str]:
    """Return the last name parts of the linear layers inside attention modules, such as ``q_proj``.

    Raises:
        ValueError: There are none.
    """
    names = {
        name.rpartition(".")[2]
        for module in model.modules()
        if "Attention" in type(module).__name__
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    }
    if not names:
        raise InvalidRequestError(
            f"LoRA: {type(model).__name__} has no nn.Linear inside a module named ...Attention. "
            "Wrap the model by peft.get_peft_model yourself and pass it with lora=False."
        )
    return sorted(names)


def norm_names(model: nn.Module) -> list[str]:
    """Return the last name parts of the normalisation layers, such as ``input_layernorm``."""
    return sorted(
        {name.rpartition(".")[2] for name, module in model.named_modules() if type(module).__name__.endswith("Norm")}
    )


def _leaf_name(model: nn.Module, wanted: nn.Module) -> str:
    names = (name.rpartition(".")[2] for name, module in model.named_modules() if module is wanted)
    return str(next(names))
