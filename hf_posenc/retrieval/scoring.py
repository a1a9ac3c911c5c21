"""What a model answers to a prompt: its choice at every token of the right answer, and what it writes by itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.lm_head import decoder_body, head_logits, row_chunks
from hf_posenc.evaluation.losses import Advance, length_dependent_rope_types, reset_dynamic_frequencies


@dataclass(frozen=True)
class Reply:
    """A model's reply.

    Attributes:
        choices: The likeliest token at each token of the right answer, given the prompt and the answer before it.
        losses: The loss of each token of the right answer, in nats.
        written: The tokens of a greedy answer, without the one that ends it.
    """

    choices: list[int]
    losses: list[float]
    written: list[int]


@torch.no_grad()
def reply(
    model: PreTrainedModel,
    prompt_ids: list[int],
    answer_ids: list[int],
    max_new_tokens: int,
    *,
    stop_ids: Collection[int] = (),
    prefill_chunk: int | None = None,
    advance: Advance | None = None,
) -> Reply:
    """Feed a prompt once, then the right answer, then take that back and let the model write.

    Where a cache cannot be taken back (windows, recurrent layers), or the model's frequencies depend on the length
    fed, the prompt is fed a second time. Only rows that predict an answer's token reach the head.

    Args:
        model: A causal language model in evaluation mode, not wrapped.
        prompt_ids: What is fed before the answer.
        answer_ids: The right answer; at least one token.
        max_new_tokens: Tokens of the greedy answer at most.
        stop_ids: Tokens that end it.
        prefill_chunk: Feed so many tokens of the prompt at a time; None feeds all at once.
        advance: Called with the number of prompt tokens after each chunk of the first time.

    Raises:
        ValueError: Logits that are not finite.
    """
    reset_dynamic_frequencies(model)
    if length_dependent_rope_types(model):
        forced = _in_one_pass(model, prompt_ids, answer_ids)
        reset_dynamic_frequencies(model)
        cache, first = prefill(model, prompt_ids, None, advance)
    else:
        cache, first = prefill(model, prompt_ids, prefill_chunk, advance)
        forced = first if len(answer_ids) == 1 else torch.cat([first, feed(model, answer_ids[:-1], cache)])
        if not take_back(cache, len(answer_ids) - 1):
            cache, first = prefill(model, prompt_ids, prefill_chunk, None)
    if not forced.isfinite().all():
        raise InvalidRequestError(f"logits are not finite in {model.dtype}. Load the model in bfloat16 or float32.")
    losses = nn.functional.cross_entropy(forced, torch.tensor(answer_ids, device=forced.device), reduction="none")
    written = _write(model, cache, first, max_new_tokens, stop_ids)
    return Reply(forced.argmax(-1).tolist(), losses.tolist(), written)


def prefill(
    model: PreTrainedModel, ids: list[int], chunk: int | None, advance: Advance | None
) -> tuple[DynamicCache, torch.Tensor]:
    """Return the cache of a prompt, and the logits ``(1, vocab_size)`` of what follows it."""
    body, cache = decoder_body(model), DynamicCache(config=model.config)
    batch = torch.tensor([ids], device=model.device)
    for rows in row_chunks(len(ids), chunk or len(ids)):
        hidden = body(input_ids=batch[:, rows], past_key_values=cache, use_cache=True).last_hidden_state
        if advance is not None:
            advance(rows.stop - rows.start)
    return cache, head_logits(model, hidden[0, -1:])


def feed(model: PreTrainedModel, ids: list[int], cache: DynamicCache) -> torch.Tensor:
    """Return the logits ``(len(ids), vocab_size)`` of what follows each token."""
    batch = torch.tensor([ids], device=model.device)
    hidden = decoder_body(model)(input_ids=batch, past_key_values=cache, use_cache=True).last_hidden_state
    return head_logits(model, hidden[0])


def _in_one_pass(model: PreTrainedModel, prompt_ids: list[int], answer_ids: list[int]) -> torch.Tensor:
    batch = torch.tensor([prompt_ids + answer_ids], device=model.device)
    hidden = decoder_body(model)(input_ids=batch, use_cache=False).last_hidden_state
    return head_logits(model, hidden[0, len(prompt_ids) - 1 : -1])


def take_back(cache: DynamicCache, num_tokens: int) -> bool:
    """Remove the last tokens from a cache; return whether that could be done."""
    plain = all(type(layer) is DynamicLayer for layer in cache.layers)
    if plain and num_tokens:
        cache.crop(-num_tokens)
    return plain


def _write(
    model: PreTrainedModel, cache: DynamicCache, first: torch.Tensor, max_new_tokens: int, stop_ids: Collection[int]
) -> list[int]:
    written: list[int] = []
    token = int(first[-1].argmax())
    while token not in stop_ids:
        written.append(token)
        if len(written) == max_new_tokens:
            break
        token = int(feed(model, [token], cache)[-1].argmax())
    return written
