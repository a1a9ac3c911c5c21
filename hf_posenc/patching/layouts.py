"""The two layouts of rotary pairs: halves apart, as in Transformers' Llama, or neighbours, as in Meta's and GPT-J."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.attention.installation import attention_layers, goes_through_interface, has_positions
from hf_posenc.attention.self_check import probe
from hf_posenc.errors import InvalidRequestError, RotaryMismatchError, UnknownNameError
from hf_posenc.families.discovery import head_dim_of
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.methods.encodings.rope import RopeOptions, join_pairs, split_pairs
from hf_posenc.patching.api import describe, extension_of, patch_model, unpatch_model

ModelT = TypeVar("ModelT", bound=nn.Module)

HALF_SPLIT, INTERLEAVED = "half_split", "interleaved"
# Modules whose outputs are rotated, of an attention layer; then those that have nothing to do with it.
_ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")
_OTHERS = ("v_proj", "o_proj")
_PROBE_TOKENS = 5
_RTOL = 1e-3  # of the largest logit, in float32: the same sums in another order; a wrong layout is off by more


def to_interleaved(rows: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Return the rows of one head, ``(head_dim, ...)``, with the two of each pair side by side.

    Args:
        rows: Half-split: row i of the first ``rotary_dim`` rotates with row ``i + rotary_dim / 2``.
        rotary_dim: Rows that rotate; the others keep their order.
    """
    first, second = split_pairs(rows[:rotary_dim].movedim(0, -1), interleaved=False)
    return torch.cat((join_pairs(first, second, interleaved=True).movedim(-1, 0), rows[rotary_dim:]))


def to_half_split(rows: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Undo ``to_interleaved``."""
    first, second = split_pairs(rows[:rotary_dim].movedim(0, -1), interleaved=True)
    return torch.cat((join_pairs(first, second, interleaved=False).movedim(-1, 0), rows[rotary_dim:]))


def convert_layout(model: ModelT, to: str = INTERLEAVED) -> ModelT:
    """Move the weights of queries and keys to the other layout of pairs, in place; the model computes the same.

    Towards ``"interleaved"``, weights become those of Meta's files and the model is patched with ``rope``
    (``interleaved=True``), which reads them; towards ``"half_split"``, weights become what Transformers' own code
    reads, and the patch is undone. Converted and converted back, weights are the same to the bit; logits agree to
    rounding.

    Args:
        model: A model whose queries and keys have a projection each, unquantised, not wrapped by PEFT.
        to: ``"interleaved"`` or ``"half_split"``.

    Returns:
        The model that was given.

    Raises:
        ValueError: The model is in that layout already, is patched with another rule, or keeps queries and keys
            otherwise. Nothing was changed.
        RotaryMismatchError: It would compute something else; nothing is left of it.
    """
    if to not in (INTERLEAVED, HALF_SPLIT):
        raise UnknownNameError("layout", to, (INTERLEAVED, HALF_SPLIT))
    rotary = RotaryModel(model)
    base = rotary.model
    _check(rotary, to)
    extension = extension_of(rotary)
    original = {name: value for name, value in describe(rotary).items() if name == "original_max_position_embeddings"}
    before = probe(base, _PROBE_TOKENS)
    if to == INTERLEAVED:
        patch_model(base, "rope", interleaved=True, **original)
        width = _rotary_dim(rotary)
        _move(rotary, to_interleaved, width)
    else:
        width = _rotary_dim(rotary)
        unpatch_model(base)
        _move(rotary, to_half_split, width)
    after = probe(base, _PROBE_TOKENS)
    if before is not None and after is not None and not _close(before, after):
        _move(rotary, to_half_split if to == INTERLEAVED else to_interleaved, width)
        if to == INTERLEAVED:
            unpatch_model(base)
        elif extension is not None:
            patch_model(base, "rope", **extension.method.changed_options(), **original)
        raise RotaryMismatchError(
            f"{type(base).__name__} computes something else in the {to} layout: its family rotates queries and keys in "
            "another way than Llama's."
        )
    return model


def _check(rotary: RotaryModel, to: str) -> None:
    base, current = rotary.model, describe(rotary)
    interleaved = current["method"] == "rope" and current["options"].get("interleaved", False)
    if interleaved == (to == INTERLEAVED):
        raise InvalidRequestError(f"the model's weights are in the {to} layout already.")
    if to == INTERLEAVED and current["method"] != "none":
        undo = "call unpatch_model first" if rotary.record is not None else "convert the model without it"
        raise InvalidRequestError(
            f"the model is extended by {current['method']}, which reads half-split weights: {undo}."
        )
    for layer in _layers(base):
        names = {name for name, child in layer.named_children() if any(True for _ in child.parameters())}
        weights = [getattr(getattr(layer, name, None), "weight", None) for name in ("q_proj", "k_proj")]
        unknown = names - {*_ROTATED, *_OTHERS}
        if unknown or any(weight is None or not weight.is_floating_point() or weight.dim() != 2 for weight in weights):
            raise InvalidRequestError(
                f"{type(base).__name__} keeps queries and keys in another way than in plain q_proj and k_proj "
                f"({', '.join(sorted(names))}), so their layout cannot be changed."
            )


def _layers(base: PreTrainedModel) -> list[nn.Module]:
    return [layer for layer in attention_layers(base) if goes_through_interface(layer) and has_positions(layer)]


def _rotary_dim(rotary: RotaryModel) -> int:
    extension = extension_of(rotary)
    assert extension is not None
    assert isinstance(extension.method, RopeOptions)  # it is patched with 'rope'
    share = extension.method.partial_rotary_factor
    return extension.spec.rotary_dim if share is None else int(head_dim_of(rotary.text_config) * share)


@torch.no_grad()
def _move(rotary: RotaryModel, reorder: Any, width: int) -> None:
    head_dim = head_dim_of(rotary.text_config)
    for layer in _layers(rotary.model):
        for name in _ROTATED:
            for parameter in getattr(layer, name, nn.Identity()).parameters():
                heads = parameter.view(-1, head_dim, *parameter.shape[1:])
                parameter.copy_(torch.stack([reorder(head, width) for head in heads]).view_as(parameter))


def _close(before: torch.Tensor, after: torch.Tensor) -> bool:
    tolerance = max(_RTOL, 16 * torch.finfo(before.dtype).eps)
    return bool((before - after).abs().max() <= tolerance * before.abs().max())
