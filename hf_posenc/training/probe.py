"""One question put to a model before it is trained on packed documents: does one document see another?"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from hf_posenc.attention.masks import inner_name
from hf_posenc.attention.shifted import shift_of
from hf_posenc.errors import RunStoppedError
from hf_posenc.evaluation.lm_head import decoder_body, head_logits
from hf_posenc.families.discovery import unwrap
from hf_posenc.patching.api import extension_of
from hf_posenc.training.chunked_loss import chunked_lm_loss
from hf_posenc.training.positions import FULL, PositionSchedule

logger = logging.getLogger(__name__)

_DOCUMENT = 24  # tokens of a document of the probe
# Tokens of a group of shifted sparse attention meanwhile, so that a block has several: the border between the documents
# (24) lies inside a group of either half of the heads (20 to 40, 10 to 30).
_GROUP = 20
_LEAK = 0.01  # of what is seen when the two are one document: rounding stays far below
_UNSEEN = 1e-4  # the same, where something must be seen, from however far


@torch.no_grad()
def probe_isolation(model: Any, batch_size: int = 1, positions: PositionSchedule | None = None) -> float:
    """Change document 1 of a packed block and see whether the logits of document 2 move.

    The probe goes the way training goes (the training forward, wrappers and hooks included, and shifted sparse
    attention where that is on, in groups as short as the probe) and is measured against what the same change does when
    both documents are numbered as one. Where positions skip, it also changes what stands before a skip in one document
    and sees whether what stands behind it moves, as it must.

    Args:
        model: Causal language model, PEFT-wrapped or not.
        batch_size: Blocks per forward in training; some attention implementations tell documents apart only
            when it is 1.
        positions: How positions run in training; None: one after the other.

    Returns:
        The largest movement of a logit of document 2, as a share of the movement without boundaries.

    Raises:
        RuntimeError: Document 2 moved, what stands behind a skip did not, or the probe itself cannot tell.
    """
    base = unwrap(model)
    attention = inner_name(str(base.config._attn_implementation))
    lengths = [_DOCUMENT, _second_length(base, positions)]
    was_training = base.training
    shift = shift_of(base)
    model.eval()
    try:
        with nullcontext() if shift is None else shift.dry_run(_GROUP):
            joined = _movement(model, torch.arange(sum(lengths)).repeat(batch_size, 1), _DOCUMENT)
            apart = _movement(model, _drawn(positions, lengths, batch_size), _DOCUMENT)
            if positions is not None and positions.kind != FULL:
                _check_skip(model, attention, _drawn(positions, [sum(lengths)], 1).repeat(batch_size, 1), joined)
    finally:
        model.train(was_training)
    if joined == 0:
        raise RunStoppedError(
            f"the document probe cannot tell: with attn_implementation {attention!r} no token sees an earlier one."
        )
    if not apart <= _LEAK * joined:
        raise RunStoppedError(
            f"packed documents see each other with attn_implementation {attention!r} and {batch_size} blocks per step: "
            f"changing one moved the logits of the next by {apart:.3g} ({joined:.3g} without any boundary). "
            "Something adds an attention mask or a cache, or this implementation does not read position_ids; "
            "try per_device_train_batch_size 1, or load the model with attn_implementation='sdpa'."
        )
    logger.info(
        "packed documents are isolated (attn_implementation %r, %d blocks per step): changing one moved the logits "
        "of the next by %.2g (%.2g without boundaries)",
        attention,
        batch_size,
        apart,
        joined,
    )
    return apart / joined


def _drawn(positions: PositionSchedule | None, lengths: list[int], batch_size: int) -> torch.Tensor:
    """Return positions of documents of these lengths, a row drawn as training draws it; ``(batch_size, length)``.

    Of some draws those that reach farthest: a rule may change something only past the original length.
    """
    if positions is None:
        return torch.cat([torch.arange(length) for length in lengths]).repeat(batch_size, 1)
    room = max(positions.target_length, sum(lengths) + _DOCUMENT)
    long = replace(positions, short_share=0.0, target_length=room)
    drawn = [long.of(index, lengths) for index in range(batch_size + 8)]
    return torch.stack(sorted(drawn, key=lambda row: -int(row.max()))[:batch_size])


def _check_skip(model: Any, attention: str, position_ids: torch.Tensor, joined: float) -> None:
    border = int((position_ids[0].diff() > 1).nonzero()[0]) + 1
    seen = _movement(model, position_ids, border)
    if not seen > _UNSEEN * joined:
        raise RunStoppedError(
            f"with attn_implementation {attention!r} a token does not see the tokens of its own document that stand "
            f"before a skip of positions: changing them moved its logits by {seen:.3g} ({joined:.3g} without a skip). "
            "Nothing long would be learnt. Load the model with attn_implementation='sdpa', or take position_schedule "
            "'full'."
        )


def _movement(model: Any, position_ids: torch.Tensor, border: int) -> float:
    """Return the largest change of the logits from slot ``border`` on when all tokens before it change.

    ``position_ids`` is ``(batch, length)``.
    """
    base = unwrap(model)
    device, vocab_size = base.device, base.config.get_text_config().vocab_size
    batch_size, length = position_ids.shape
    generator = torch.Generator().manual_seed(0)
    first, other = torch.randint(vocab_size, (2, batch_size, border), generator=generator).to(device)
    second = torch.randint(vocab_size, (batch_size, length - border), generator=generator).to(device)
    other = torch.where(other == first, (other + 1) % vocab_size, other)
    places = position_ids.to(device)
    logits = [_training_logits(model, torch.cat([tokens, second], dim=1), places, border) for tokens in (first, other)]
    return float((logits[0] - logits[1]).abs().max())


def _second_length(base: Any, positions: PositionSchedule | None) -> int:
    """Return the tokens of document 2: where the attention changes past the original length, it goes past it."""
    if positions is not None and positions.kind != FULL:
        return _DOCUMENT  # its positions skip that far, and rules that count tokens are not trained so
    extension = extension_of(base)
    if extension is None or not extension.method.rotates_in_attention:
        return _DOCUMENT  # an encoding is the same at every length, and a learned table ends
    return extension.spec.original_max_position_embeddings + _DOCUMENT


def _training_logits(model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, border: int) -> torch.Tensor:
    """Return the logits behind the training loss of the first and last tokens after ``border``, read by a hook."""
    base = unwrap(model)
    hidden: list[torch.Tensor] = []
    hook = decoder_body(base).register_forward_hook(lambda module, args, output: hidden.append(output[0]))
    try:
        with chunked_lm_loss(model):
            model(input_ids=input_ids, position_ids=position_ids, labels=input_ids)
    finally:
        hook.remove()
    rows = hidden[0][:, border:]
    return head_logits(base, torch.cat([rows[:, :_DOCUMENT], rows[:, -_DOCUMENT:]], dim=1))
