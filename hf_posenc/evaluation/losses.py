"""Losses of a document's tokens: the body once, the head in row chunks over the positions that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hf_posenc.evaluation.plans import Window
from hf_posenc.families import unwrap
from hf_posenc.lm_head import DEFAULT_ROWS_PER_CHUNK, decoder_body, row_chunks, token_losses

Advance = Callable[[int], object]  # told how many tokens have been fed since the last call


@torch.no_grad()
def document_losses(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    prefill_chunk: int | None = None,
    logits_chunk: int = DEFAULT_ROWS_PER_CHUNK,
    advance: Advance | None = None,
) -> torch.Tensor:
    """Return the loss of each asked token given all tokens before it, from one causal pass.

    Args:
        model: A causal language model in evaluation mode, wrapped or not.
        input_ids: int64 ``(num_tokens,)``.
        positions: Rising int64 ``(k,)`` from 1 to ``num_tokens - 1``: the tokens to score. None scores all of them.
        prefill_chunk: Feed this many tokens at a time over a KV cache: the same numbers, with less memory for
            activations. None feeds all at once.
        logits_chunk: Rows whose logits exist at one time.
        advance: Called with the number of tokens after each chunk.

    Returns:
        float32 ``(k,)`` on the CPU, in nats.
    """
    positions = torch.arange(1, len(input_ids)) if positions is None else positions
    losses = [torch.empty(0)]
    for start, hidden in _hidden_chunks(model, input_ids, prefill_chunk):
        # The hidden state of token t - 1 predicts token t.
        here = positions[(positions > start) & (positions <= start + len(hidden))]
        if len(here):
            rows = _take_rows(hidden, here - 1 - start)
            losses.append(token_losses(model, rows, input_ids[here], logits_chunk))
        if advance is not None:
            advance(len(hidden))
    return torch.cat(losses)


def window_losses(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    windows: Iterable[Window],
    needed: torch.Tensor,
    *,
    prefill_chunk: int | None = None,
    logits_chunk: int = DEFAULT_ROWS_PER_CHUNK,
    advance: Advance | None = None,
) -> torch.Tensor:
    """Return float32 ``(num_tokens,)``: the loss of each needed token from the window that scores it, NaN elsewhere.

    Args:
        model: As for ``document_losses``.
        input_ids: int64 ``(num_tokens,)``, the whole document.
        windows: What is fed together; each window starts without memory of the one before.
        needed: bool ``(num_tokens,)``; only these reach the head.
        prefill_chunk: As for ``document_losses``.
        logits_chunk: As for ``document_losses``.
        advance: As for ``document_losses``.

    Raises:
        ValueError: The model gave a loss that is not a finite number.
    """
    losses = torch.full((len(input_ids),), float("nan"))
    for window in windows:
        reset_dynamic_frequencies(model)
        scored = torch.arange(window.score_from, window.end)
        scored = scored[needed[window.score_from : window.end]]
        losses[scored] = document_losses(
            model,
            input_ids[window.start : window.end],
            scored - window.start,
            prefill_chunk=prefill_chunk,
            logits_chunk=logits_chunk,
            advance=advance,
        )
        if not losses[scored].isfinite().all():
            first = int(scored[~losses[scored].isfinite()][0])
            raise ValueError(
                f"the loss of token {first} is {losses[first].item()}: the model overflows in {unwrap(model).dtype}. "
                "Load it in bfloat16 or float32."
            )
    return losses


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Switch dropout and checkpointing off, and leave no trace in the model: modes and dynamic frequencies go back."""
    modes = [(module, module.training) for module in unwrap(model).modules()]
    unwrap(model).train(False)
    reset_dynamic_frequencies(model)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        reset_dynamic_frequencies(model)


def length_dependent_rope_types(model: PreTrainedModel) -> list[str]:
    """Return the live rope types whose frequencies depend on how many tokens are fed; empty for a static model.

    These are Transformers' ``dynamic``, and ``longrope`` with two different lists: feeding more changes what the
    model computes at every earlier position, so that a long pass says nothing about shorter ones.
    """
    found = {kind for module, kind, _ in _rotary_states(model) if "dynamic" in kind or _two_lists(module, kind)}
    return sorted(found)


def reset_dynamic_frequencies(model: PreTrainedModel) -> None:
    """Make Transformers' ``dynamic`` forget what it has seen; other models are not touched.

    Its module keeps the frequencies of the longest input so far for anything from the original length on, so without
    this a number would depend on what ran before.
    """
    for module, kind, prefix in _rotary_states(model):
        if "dynamic" in kind:
            original = getattr(module, f"{prefix}original_inv_freq")
            getattr(module, f"{prefix}inv_freq").copy_(original)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _rotary_states(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, rope type, prefix of its attributes) for each rotary module and layer type."""
    for module in unwrap(model).modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            yield module, rope_type, ""
        elif isinstance(rope_type, dict):
            yield from ((module, kind, f"{layer_type}_") for layer_type, kind in rope_type.items())


def _two_lists(module: nn.Module, kind: str) -> bool:
    if kind != "longrope":
        return False
    config: Any = module.config
    parameters = config.rope_parameters
    dicts = parameters.values() if "short_factor" not in parameters else [parameters]
    return any(one.get("short_factor") != one.get("long_factor") for one in dicts if isinstance(one, dict))


def _hidden_chunks(
    model: PreTrainedModel, input_ids: torch.Tensor, prefill_chunk: int | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (position of the first row, hidden states ``(rows, hidden_size)``) in order."""
    body, base = decoder_body(model), unwrap(model)
    batch = input_ids.unsqueeze(0).to(base.device)
    if prefill_chunk is None or prefill_chunk >= len(input_ids):
        yield 0, body(input_ids=batch, use_cache=False).last_hidden_state[0]
        return
    cache = DynamicCache(config=base.config)
    for rows in row_chunks(len(input_ids), prefill_chunk):
        output = body(input_ids=batch[:, rows], past_key_values=cache, use_cache=True)
        yield rows.start, output.last_hidden_state[0]


def _take_rows(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Select rows; neighbours (the usual case) as a view, since a copy of a long document's states is large."""
    first, last = int(rows[0]), int(rows[-1])
    return hidden[first : last + 1] if last - first + 1 == len(rows) else hidden[rows.to(hidden.device)]
