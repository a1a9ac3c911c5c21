"""The last step of a causal language model, taken in row chunks, so that [length, vocabulary] is never built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_posenc.errors import InvalidRequestError
from hf_posenc.families.rotary_model import RotaryModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_ROWS_PER_CHUNK = 1024


def head_logits(model: PreTrainedModel, hidden_states: torch.Tensor) -> torch.Tensor:
    """Map hidden states ``(..., hidden_size)`` to float32 logits ``(..., vocab_size)`` as the model itself does.

    Families differ in what follows the matrix product (Gemma 2 caps, Cohere multiplies, Granite divides);
    ``check_head`` proves that nothing is missing here for the model at hand.
    """
    rotary = RotaryModel(model)
    base, config = rotary.model, rotary.text_config
    head: nn.Module = base.get_output_embeddings()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    logits: torch.Tensor = head(hidden_states.to(next(head.parameters()).device)).float()
    if (multiplier := getattr(config, "logit_scale", None)) is not None:
        logits = logits * multiplier
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


def decoder_body(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal language model that makes hidden states: everything but its head."""
    base = RotaryModel(model).model
    body = base.base_model
    if body is base or base.get_output_embeddings() is None:  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
        raise InvalidRequestError(
            f"{type(base).__name__} has no separate language-model head. Load the checkpoint with AutoModelForCausalLM."
        )
    return body


@torch.no_grad()
def check_head(model: PreTrainedModel, num_tokens: int = 16) -> None:
    """Raise unless body + head give the logits of the model's own forward on a few tokens.

    Raises:
        ValueError: The logits are not finite, or the model does something to them that ``head_logits`` does not know.
    """
    rotary = RotaryModel(model)
    base, vocab_size = rotary.model, rotary.text_config.vocab_size
    input_ids = (torch.arange(num_tokens, device=base.device) * 7919 % vocab_size).unsqueeze(0)
    # accelerate wraps the forward of what it prepares in autocast, but not the body's: Trainer(bf16=True), say.
    forward: Any = vars(base).get("_original_forward", base)
    expected = forward(input_ids=input_ids, use_cache=False).logits.float()
    if not expected.isfinite().all():
        raise InvalidRequestError(
            f"the model gives logits that are not finite, in {str(base.dtype).removeprefix('torch.')}. "
            "Check its weights; float16 overflows in many models where bfloat16 and float32 do not."
        )
    hidden = decoder_body(base)(input_ids=input_ids, use_cache=False).last_hidden_state
    actual = head_logits(base, hidden).to(expected.device)
    # Both run the same kernels, but a head in bf16 may round before or after the cap: allow that rounding.
    tolerance = 4 * torch.finfo(base.dtype).eps * expected.abs().max().item() + 1e-5
    if not (actual - expected).abs().max().item() <= tolerance:  # not a number is not equal either
        raise InvalidRequestError(
            f"{type(base).__name__} changes its logits in a way hf_posenc does not know, so losses computed in "
            "chunks would be wrong. Please report this model_type: " + str(base.config.model_type)
        )


def row_chunks(num_rows: int, rows_per_chunk: int) -> Iterator[slice]:
    """Yield slices that cover ``num_rows`` rows, each of at most ``rows_per_chunk``."""
    for start in range(0, num_rows, rows_per_chunk):
        yield slice(start, min(start + rows_per_chunk, num_rows))


@torch.no_grad()
def token_losses(
    model: PreTrainedModel,
    hidden_states: torch.Tensor,
    targets: torch.Tensor,
    rows_per_chunk: int = DEFAULT_ROWS_PER_CHUNK,
) -> torch.Tensor:
    """Return the loss of each target, in nats, without gradients.

    Args:
        model: The causal language model whose head is used.
        hidden_states: ``(rows, hidden_size)``; row i is what the model knows before target i.
        targets: ``(rows,)``, token ids.
        rows_per_chunk: Rows whose logits exist at one time; memory is this x vocabulary x 4 bytes.

    Returns:
        float32 ``(rows,)`` on the CPU.
    """
    losses = torch.empty(len(targets), dtype=torch.float32)
    for rows in row_chunks(len(targets), rows_per_chunk):
        logits = head_logits(model, hidden_states[rows])
        losses[rows] = nn.functional.cross_entropy(logits, targets[rows].to(logits.device), reduction="none").cpu()
        del logits  # before the next chunk's are made: a half-precision head holds them twice for a moment
    return losses
