"""The attention masks of packed blocks, where the positions of a document skip."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_posenc.families.family_data import FULL_ATTENTION

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@contextmanager
def documents_start_at_zero(config: PreTrainedConfig, *, one_document: bool = False) -> Iterator[None]:
    """While open, Transformers' masks take a new document to begin where positions fall, not where they skip.

    Transformers (5.23) makes its masks by the function that is replaced here, and has no argument or option for it.
    Its masks begin a document at every position that is not the last plus one, and would keep PoSE's chunks apart. All
    else is Transformers' own: windows are measured in positions, so a layer with a window does not see past it, as it
    will not at the real length (in tokens by FlashAttention, which knows no positions, and by Transformers 5.0).

    Args:
        config: The model's text config.
        one_document: Take each row for one document without looking at its positions, as where they have no values (on
            the meta device, and while operations are traced).
    """
    from transformers import masking_utils  # brings torch's compiler, which `finetune --help` would wait for

    theirs = masking_utils.find_packed_sequence_indices
    find = partial(find_documents, skips_matter=has_windows(config))
    masking_utils.find_packed_sequence_indices = (lambda position_ids: None) if one_document else find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = theirs


def find_documents(position_ids: torch.Tensor, *, skips_matter: bool) -> torch.Tensor | None:
    """Return the number of each token's document in its row, int64 like ``position_ids`` ``(batch, length)``.

    None where a plainly causal mask will do, which saves making one: every row is one document, without skips if those
    matter to a window.
    """
    from transformers.utils.import_utils import is_tracing

    steps = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1)
    if not is_tracing(steps) and bool(((steps == 1) if skips_matter else (steps > 0)).all()):
        return None
    return (steps <= 0).cumsum(-1)


# Their decoders (Transformers 5.23) leave position_ids out when they make masks, so that packed documents would see
# each other. They take finished masks: one, or one for each kind of layer.
_TAKES_ONE_MASK, _TAKES_A_MASK_PER_KIND = ("falcon",), ("gpt_oss",)


def finished_masks(config: PreTrainedConfig, embedded: torch.Tensor, position_ids: torch.Tensor | None) -> Any:
    """Return the ``attention_mask`` that keeps documents apart; None where the decoder does that itself.

    Transformers' own masks, for the attention implementation in use.

    Args:
        config: The model's text config.
        embedded: Tensor ``(batch, length, any)``, which gives the masks their shape and dtype.
        position_ids: ``(batch, length)``.
    """
    from transformers import masking_utils

    given: dict[str, Any] = {"config": config, "inputs_embeds": embedded, "position_ids": position_ids}
    given |= {"attention_mask": None, "past_key_values": None}
    if "cache_position" in inspect.signature(masking_utils.create_causal_mask).parameters:  # Transformers 5.0
        order = torch.arange(embedded.shape[1], device=embedded.device)
        given |= {"input_embeds": given.pop("inputs_embeds"), "cache_position": order}
    if position_ids is None or getattr(config, "alibi", False):  # alibi makes its bias of the mask
        return None
    if config.model_type in _TAKES_ONE_MASK:
        return masking_utils.create_causal_mask(**given)
    if config.model_type in _TAKES_A_MASK_PER_KIND:
        return {
            "full_attention": masking_utils.create_causal_mask(**given),
            "sliding_attention": masking_utils.create_sliding_window_causal_mask(**given),
        }
    return None


def has_windows(config: PreTrainedConfig) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ())
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return any(sizes) or not kinds <= FULL_ATTENTION
