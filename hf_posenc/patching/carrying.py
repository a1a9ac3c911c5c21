"""While a model is patched, its own ``save_pretrained`` is one that writes the extension too.

The function that does so, and the one that prepares other libraries for patched models, are in
``hf_posenc.checkpoint``, which is above this package and registers them here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAVE = "save_pretrained"
_registered: list[Callable[..., Any]] = []


def save_patched_models_by(save: Callable[..., Any], install: Callable[[], None]) -> None:
    """Register the functions that patched models need.

    Args:
        save: Saves a patched model; it takes the model and ``save_pretrained``'s arguments.
        install: Prepares other libraries; further calls change nothing.
    """
    _registered[:] = [save, install]


def prepare_libraries() -> None:
    """Prepare other libraries for extended models, once in a process (``hf_posenc.install``)."""
    _registered[1]()


def carry_extension(model: PreTrainedModel) -> None:
    """Make a patched model's own ``save_pretrained`` write the extension too, until ``drop_extension``."""
    prepare_libraries()
    model.__dict__[SAVE] = functools.partial(_registered[0], model)


def carries_extension(model: PreTrainedModel) -> bool:
    """Return whether ``carry_extension`` was called for a model."""
    return SAVE in model.__dict__


def drop_extension(model: PreTrainedModel) -> None:
    """Undo ``carry_extension``."""
    model.__dict__.pop(SAVE, None)
