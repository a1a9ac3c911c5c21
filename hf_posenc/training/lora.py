"""LoRA for longer contexts: adapters on linear layers, with the embedding and the norms trained whole or not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.checkpoint.extended import peft_renamed_attribute
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.discovery import is_adapter
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


def check_trainable(model: Any, lora: LoraSettings | None) -> bool:
    """Refuse a model of which nothing can be trained, or not what is to be.

    Args:
        model: What is to be trained, PEFT-wrapped or not.
        lora: Of a new adapter; None trains the model's weights, or those of adapters that it has.

    Returns:
        Whether the model has an adapter that was loaded for inference, and the training is to begin as that.

    Raises:
        ValueError: No parameter asks for a gradient, and there is no adapter; the weights are to be trained, and are
            quantised; there are adapters that are trained, and a new one is to be added; or one that the new one cannot
            begin as.
    """
    if is_adapter(model) and not is_adapted(model):
        raise InvalidRequestError(
            "the model has an adapter of Transformers' add_adapter or load_adapter, and Trainer cannot go on from "
            "checkpoints of such a model. Load the adapter by PeftModel.from_pretrained(base, folder)."
        )
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    begins = is_adapted(model) and frozen
    if is_adapted(model) and lora is not None and not frozen:
        raise InvalidRequestError(
            "the model has adapters that are trained already. Leave lora out to go on with them, or load them by "
            "PeftModel.from_pretrained(base, folder) for a new one to begin as they are."
        )
    trains_quantised = getattr(getattr(model, "hf_quantizer", None), "is_qat_trainable", False)
    trains_weights = lora is None and (begins or not is_adapted(model))
    if getattr(model, "is_quantized", False) and trains_weights and not trains_quantised:
        raise InvalidRequestError(
            "the model's weights are quantised, so they cannot be trained. Train adapters on them: lora=True (--lora)."
        )
    if frozen and not begins:
        raise InvalidRequestError("the model has no trainable parameters: all are frozen.")
    if begins and lora is not None:
        _refuse_to_begin(model, lora)
    return begins


def is_adapted(model: Any) -> bool:
    """Return whether a model is wrapped by PEFT."""
    return not isinstance(model, PreTrainedModel) and hasattr(model, "peft_config")


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """While open, a PEFT-wrapped model computes without its adapters; what is trained of it stays as it is."""
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        with model.disable_adapter():
            yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])


@torch.no_grad()
def begin_from_adapter(model: Any, settings: LoraSettings | None) -> Any:
    """Return a model to train that computes what one with an adapter does, which ``check_trainable`` has seen.

    Args:
        model: PEFT-wrapped, with an adapter that was loaded for inference; in place.
        settings: A new adapter begins as the old one; what its rank or its layers have more begins as LoRA does, with
            noise in the first factor and zeros in the second. None merges the old one, to train all weights.
    """
    if settings is None:
        return model.merge_and_unload().requires_grad_(True)
    old, old_whole = _factors(model), _trained_whole(model)
    grown = add_lora(model.unload(), settings)
    new, whole = _factors(grown), _trained_whole(grown)
    for path, (first, second, scale) in old.items():
        new[path][0][: len(first)] = first
        new[path][1][:, : len(first)] = second * scale / new[path][2]
    for path, module in old_whole.items():
        whole[path].load_state_dict(module.state_dict())
    return grown


def _refuse_to_begin(model: Any, settings: LoraSettings) -> None:
    """Refuse an adapter that is more than a new one with these settings can be.

    Raises:
        ValueError: It is.
    """
    from peft.tuners.lora import LoraLayer

    merge = f"Leave {argument('lora')} out: then it is merged, and all weights are trained."
    config, factors, head = model.peft_config[model.active_adapter], _factors(model), model.get_output_embeddings()
    changed = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if config.peft_type != "LORA" or config.use_dora or len(changed) > len(factors) or head in changed:
        raise InvalidRequestError(
            f"{argument('lora')}: a new adapter can begin as one of LoRA on linear layers without the head, and this "
            f"one is of another kind. {merge}"
        )
    rank = max(len(first) for first, _, _ in factors.values())
    if rank > settings.rank:
        raise InvalidRequestError(
            f"the adapter has rank {rank}, so a new one that begins as it is needs {argument('lora_rank', rank)} or "
            f"more, got {settings.rank}."
        )
    attention = attention_modules(model)
    inside = tuple(f"{path}." for path, module in model.named_modules() if module in attention)
    outside = [path for path in factors if not path.startswith(inside)]
    if outside and settings.targets == "attention":
        raise InvalidRequestError(
            f"the adapter changes {outside[0]}, which a new one for the attention does not. Give "
            f"{argument('trainable', 'all')}."
        )
    embedded = {one.weight.data_ptr() for one in model.modules() if isinstance(one, nn.Embedding)}
    for path, inner in _trained_whole(model).items():
        if not (
            _is_norm(inner) or inner.get_parameter("weight").data_ptr() in embedded
        ):  # a tied head is the embedding
            raise InvalidRequestError(f"the adapter trained {path} too, which a new one does not. {merge}")
        if not settings.embeddings:
            raise InvalidRequestError(f"the adapter trained {path} too. Give {argument('lora_embeddings', True)}.")


def _factors(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return both factors of each low-rank change, and by what their product is scaled, by the name of the layer."""
    from peft.tuners.lora import LoraLayer

    name, found = model.active_adapter, {}
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and name in layer.lora_A:
            first, second = (factors[name].get_parameter("weight").data for factors in (layer.lora_A, layer.lora_B))
            found[path] = first, second, torch.tensor(layer.scaling[name])
    return found


def _trained_whole(model: Any) -> dict[str, nn.Module]:
    """Return the modules that PEFT trains whole beside the low-rank changes, by the path of those they stand for."""
    copies = ((path, getattr(module, "modules_to_save", None)) for path, module in model.named_modules())
    return {path: found[model.active_adapter] for path, found in copies if isinstance(found, nn.ModuleDict)}


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
        for module in attention_modules(model)
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    }
    if not names:
        raise InvalidRequestError(
            f"{type(model).__name__} has no nn.Linear inside a module named ...Attention. Train all of its weights, or "
            "wrap it by peft.get_peft_model yourself and pass it with lora=False."
        )
    return sorted(names)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are attention by the name of their class."""
    return [module for module in model.modules() if "Attention" in type(module).__name__]


def norm_names(model: nn.Module) -> list[str]:
    """Return the last name parts of the normalisation layers, such as ``input_layernorm``."""
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if _is_norm(module)})


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def _leaf_name(model: nn.Module, wanted: nn.Module) -> str:
    names = (name.rpartition(".")[2] for name, module in model.named_modules() if module is wanted)
    return str(next(names))
