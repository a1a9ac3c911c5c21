"""One question put to a model before it is trained on packed documents: does one document see another?"""

from __future__ import annotations

import logging
from typing import Any

import torch

from hf_posenc.attention.masks import inner_name
from hf_posenc.families import unwrap
from hf_posenc.lm_head import decoder_body, head_logits
from hf_posenc.patching import extension_of
from hf_posenc.training.chunked_loss import chunked_lm_loss

logger = logging.getLogger(__name__)

_DOCUMENT = 24  # tokens of a document of the probe
_LEAK = 0.01  # of what is seen when the two are one document: rounding stays far below


@torch.no_grad()
def probe_isolation(model: Any, batch_size: int = 1) -> float:
    """Change document 1 of a packed block and see whether the logits of document 2 move.

    The probe goes the way training goes (the training forward, wrappers and hooks included) and is measured
    against what the same change does when both documents are numbered as one.

    Args:
        model: Causal language model, PEFT-wrapped or not.
        batch_size: Blocks per forward in training; some attention implementations tell documents apart only
            when it is 1.

    Returns:
        The largest movement of a logit of document 2, as a share of the movement without boundaries.

    Raises:
        RuntimeError: Document 2 moved, or the probe itself cannot tell.
    """
    base = unwrap(model)
    attention = inner_name(str(base.config._attn_implementation))
    was_training = base.training
    model.eval()
    try:
        apart = _movement(model, batch_size, restart=True)
        joined = _movement(model, batch_size, restart=False)
    finally:
        model.train(was_training)
    if joined == 0:
        raise RuntimeError(
            f"the document probe cannot tell: with attn_implementation {attention!r} no token sees an earlier one."
        )
    if not apart <= _LEAK * joined:
        raise RuntimeError(
            f"packed documents see each other with attn_implementation {attention!r} and {batch_size} blocks per step: "
            f"changing one moved the logits of the next by {apart:.3g} ({joined:.3g} without any boundary). "
            "Something adds an attention mask or a cache, or this implementation does not read position_ids; "
            "try micro_batch_size 1, or load the model with attn_implementation='sdpa'."
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


def _movement(model: Any, batch_size: int, *, restart: bool) -> float:
    """Return the largest change of document 2's logits when all tokens of document 1 change."""
    base = unwrap(model)
    device = base.device
    vocab_size = base.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    first, other = torch.randint(vocab_size, (2, batch_size, _DOCUMENT), generator=generator).to(device)
    second = torch.randint(vocab_size, (batch_size, _second_length(base)), generator=generator).to(device)
    other = torch.where(other == first, (other + 1) % vocab_size, other)
    positions = torch.arange(_DOCUMENT + second.shape[1], device=device)
    if restart:
        positions[_DOCUMENT:] -= _DOCUMENT
    position_ids = positions.expand(batch_size, -1).contiguous()
    logits = [
        _training_logits(model, torch.cat([document, second], dim=1), position_ids) for document in (first, other)
    ]
    return float((logits[0] - logits[1]).abs().max())


def _second_length(base: Any) -> int:
    """Return the tokens of document 2: where the attention changes past the original length, it goes past it."""
    extension = extension_of(base)
    if extension is None or not extension.scaling.on_attention_door:
        return _DOCUMENT
    return extension.spec.original_max_position_embeddings + _DOCUMENT


def _training_logits(model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits behind the training loss of the first and last tokens of document 2, read by a hook."""
    base = unwrap(model)
    hidden: list[torch.Tensor] = []
    hook = decoder_body(base).register_forward_hook(lambda module, args, output: hidden.append(output[0]))
    try:
        with chunked_lm_loss(model):
            model(input_ids=input_ids, position_ids=position_ids, labels=input_ids)
    finally:
        hook.remove()
    rows = hidden[0][:, _DOCUMENT:]
    return head_logits(base, torch.cat([rows[:, :_DOCUMENT], rows[:, -_DOCUMENT:]], dim=1))
