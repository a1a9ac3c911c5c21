"""Low-rank changes of projections of queries and keys, as PEFT has them (LoRA: Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_posenc.checkpoint.extended import peft_renamed_attribute
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.fitting.config import AdaptConfig
from hf_posenc.fitting.rule_attention import extended_layers

# Names of the projections of queries and keys in Transformers' attention layers; the last ones hold all three at once.
_SEPARATE = ("q_proj", "k_proj")
_FUSED = ("qkv_proj", "query_key_value", "Wqkv")


@dataclass(frozen=True)
class Adapter:
    """Low-rank changes of a model's weights.

    Attributes:
        settings: How they were fitted, with as many steps as there was time for.
        modules: Names of the changed projections as PEFT takes them, such as ``q_proj``.
        weights: By name, as PEFT has them.
        errors: For each layer the relative squared error of its output under the rule, before and after.
    """

    settings: AdaptConfig
    modules: tuple[str, ...]
    weights: dict[str, torch.Tensor] = field(repr=False)
    errors: tuple[tuple[float, float], ...]

    @property
    def mean_errors(self) -> tuple[float, float]:
        """The errors before and after, on average over the layers."""
        before, after = (sum(found) / len(self.errors) for found in zip(*self.errors, strict=True))
        return before, after

    def wrap(self, model: Any) -> Any:
        """Return a model with the changes as a PEFT adapter, which ``merge_and_unload`` adds to the weights."""
        from peft import set_peft_model_state_dict

        wrapped = with_low_rank(model, self.settings.rank, self.modules)
        set_peft_model_state_dict(wrapped, self.weights)
        return wrapped

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """While open, the model has the changes."""
        wrapped = self.wrap(model)
        try:
            yield
        finally:
            wrapped.unload()


def projections(rotary: RotaryModel) -> tuple[str, ...]:
    """Return the names of a model's query and key projections.

    Raises:
        ValueError: Its attention has no such projections (multi-head latent attention), or its weights are quantised.
    """
    if getattr(rotary.model, "is_quantized", False):
        raise InvalidRequestError(
            f"{argument('adapt')} changes weights, and those of this model are quantised. Fit the model in bfloat16, "
            "and quantise the result."
        )
    layers = extended_layers(rotary)
    names = {name for layer in layers for name, module in layer.named_children() if isinstance(module, nn.Linear)}
    if names >= set(_SEPARATE):
        return _SEPARATE
    fused = tuple(name for name in _FUSED if name in names)
    if not fused:
        raise InvalidRequestError(
            f"{argument('adapt')} cannot be used with model_type {rotary.text_config.model_type!r}: the projections of "
            f"queries and keys are not known among {', '.join(sorted(names)) or 'no linear layers'}."
        )
    return fused


def targets(rotary: RotaryModel) -> tuple[str, ...]:
    """Return the names by which PEFT finds the projections of the layers whose positions are extended.

    They are full names where other modules have the short ones too, those of layers with a window or of a vision tower.
    """
    names, layers = projections(rotary), {id(layer) for layer in extended_layers(rotary)}
    wanted, others = [], False
    for where, module in rotary.model.named_modules():
        found = [name for name, _ in module.named_children() if name in names]
        if id(module) in layers:
            wanted += [f"{where}.{name}" for name in found]
        else:
            others = others or bool(found)
    return tuple(wanted) if others else names


def with_low_rank(model: Any, rank: int, modules: Sequence[str]) -> Any:
    """Return a model with low-rank changes of some projections as a PEFT adapter; at first they change nothing."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=list(modules))
    with peft_renamed_attribute():
        return get_peft_model(model, config)


def low_rank_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the factors of the low-rank changes inside a module, by name."""
    return {name: weight for name, weight in module.named_parameters() if "lora_" in name}
