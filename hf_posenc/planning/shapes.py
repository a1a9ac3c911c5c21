"""A model of a config's shape without its data: run with fake tensors, or of fewer layers."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.errors import InvalidRequestError, first_line
from hf_posenc.utils.console import quiet

Name = TypeVar("Name", bound=Hashable)


def fill_with_fake(model: nn.Module) -> None:
    """Replace tensors on the meta device by fake ones of the CPU, of the mode that is open; ties stay ties."""
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: fake(tensor) for name, tensor in held.items() if tensor is not None})


@contextlib.contextmanager
def without_data(config: PreTrainedConfig) -> Iterator[None]:
    """While open, tensors have a shape and no data, and the error for a family that needs its data names it.

    Raises:
        ValueError: An operator has to see the data, or cannot do without a GPU; or the family's own code takes no cache
            of the usual kind.
    """
    try:
        # The mode's own logger prints the traceback of what is raised.
        with quiet("torch._subclasses.fake_tensor", level=logging.CRITICAL), FakeTensorMode():
            yield
    except (RuntimeError, NotImplementedError, IndexError, ValueError) as error:
        raise InvalidRequestError(
            f"model_type {config.model_type!r} cannot be run without data, so its memory is not predicted: "
            f"{first_line(error)}"
        ) from error


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the text model that is inside, or the config itself."""
    return config.get_text_config(decoder=True)


def layer_pattern(config: PreTrainedConfig) -> tuple[int, int]:
    """Return how many of the first layers are unlike the others, and after how many layers the kinds of those repeat.

    Layers are of one kind if their parameters have the same shapes, and every per-layer list of the config says the
    same of them. The first ones of models with experts are often dense.
    """
    text = text_config(config)
    layers = int(text.num_hidden_layers)
    if getattr(text, "is_heterogeneous", False):
        return 0, layers
    stacks = [one for one in meta_model(config).modules() if isinstance(one, nn.ModuleList) and len(one) == layers]
    kinds = [
        ([row[at] for _, row in _per_layer(text)], [[p.shape for p in stack[at].parameters()] for stack in stacks])
        for at in range(layers)
    ]

    def first_alike(repeat: int) -> int:
        return max((at + 1 for at in range(layers - repeat) if kinds[at] != kinds[at + repeat]), default=0)

    found = ((first_alike(repeat), repeat) for repeat in range(1, layers + 1))
    return min(found, key=lambda one: one[0] + 2 * one[1])  # of which the fewest layers show all


def for_all_layers(
    config: PreTrainedConfig, measure: Callable[[PreTrainedConfig], Mapping[Name, float]]
) -> dict[Name, float]:
    """Return the result of ``measure``, for deep models from two runs of a few layers, which repeat.

    One and two repeats are enough where all layers are alike; where they are not, the first can differ from those
    after.
    """
    layers, (unlike, repeat) = int(text_config(config).num_hidden_layers), layer_pattern(config)
    begin = unlike + (layers - unlike) % repeat
    if layers <= begin + 3 * repeat:
        return dict(measure(config))
    first = 1 if repeat == 1 else 2
    few, more = (measure(with_layers(config, begin + times * repeat)) for times in (first, first + 1))
    rest = (layers - begin) // repeat - first
    return {name: few.get(name, 0) + rest * (more.get(name, 0) - few.get(name, 0)) for name in {**few, **more}}


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Return a copy of a config with its first ``layers`` layers."""
    cut = copy.deepcopy(config)
    text = text_config(cut)
    for name, row in _per_layer(text):
        setattr(text, name, row[:layers])
    text.num_hidden_layers = layers
    return cut


def _per_layer(text: PreTrainedConfig) -> list[tuple[str, list[Any]]]:
    layers = int(text.num_hidden_layers)
    return [(name, row) for name, row in vars(text).items() if isinstance(row, list) and len(row) == layers]
