"""Losses of a document's tokens: the body once, the head in row chunks over the requested positions only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_posenc.attention.inner import inner_name
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.evaluation.lm_head import decoder_body, row_chunks, token_losses
from hf_posenc.evaluation.memory import MemoryNeed, default_logits_chunk, predict_memory, shape_of
from hf_posenc.evaluation.windows import Window
from hf_posenc.families.rotary_model import RotaryModel

Advance = Callable[[int], object]  # called with the tokens fed since the last call
_TOKENS_AT_ONCE_CPU, _TOKENS_AT_ONCE = 1024, 8192  # of windows in one batch


def window_losses(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    windows: Iterable[Window],
    needed: torch.Tensor,
    *,
    prefill_chunk: int | None = None,
    logits_chunk: int | None = None,
    batch_size: int | None = None,
    advance: Advance | None = None,
) -> torch.Tensor:
    """Return the loss of each needed token, given what is before it in the window that scores it.

    Args:
        model: A causal language model in evaluation mode, not wrapped.
        input_ids: int64 ``(num_tokens,)``, the whole document.
        windows: What is fed together; each window starts without memory of the one before.
        needed: bool ``(num_tokens,)``; only these reach the head.
        prefill_chunk: Feed this many tokens at a time over a KV cache: the same numbers. Whether that needs less
            memory, ``memory.predict_memory`` says. None feeds all of a window at once.
        logits_chunk: Rows whose logits exist at one time; None takes what fits into 64 MiB in float32.
        batch_size: Windows of equal length that are fed together; None chooses it by their length. The losses agree
            with those of single windows to 1e-5 nats in float32, and to rounding (some 1e-2 a token) in bfloat16.
        advance: Called with the number of tokens after each chunk.

    Returns:
        float32 ``(num_tokens,)`` on the CPU, in nats; NaN elsewhere.

    Raises:
        ValueError: The model gave a loss that is not a finite number.
    """
    losses = torch.full((len(input_ids),), float("nan"))
    for batch in _equal_windows(model, windows, batch_size):
        reset_dynamic_frequencies(model)
        scored = [torch.arange(window.score_from, window.end) for window in batch]
        scored = [positions[needed[positions]] for positions in scored]
        batch_losses = _batch_losses(
            model,
            torch.stack([input_ids[window.start : window.end] for window in batch]),
            [positions - window.start for positions, window in zip(scored, batch, strict=True)],
            prefill_chunk,
            logits_chunk,
            advance,
        )
        losses[torch.cat(scored)] = torch.cat(batch_losses)
        _refuse_overflow(model, losses, torch.cat(scored))
    return losses


def default_batch_size(model: PreTrainedModel, window: int) -> int:
    """Return the number of windows of ``window`` tokens that are fed together: 1 for long ones.

    On a CPU a few hundred tokens keep the cores busy, and more only leave the cache; a GPU wants thousands.
    """
    return max(1, (_TOKENS_AT_ONCE_CPU if model.device.type == "cpu" else _TOKENS_AT_ONCE) // window)


def memory_need(
    model: PreTrainedModel,
    calls: Iterable[Iterable[Window]],
    prefill_chunk: int | None = None,
    logits_chunk: int | None = None,
    batch_size: int | None = None,
) -> MemoryNeed:
    """Predict the memory of calls of ``window_losses``, each with its windows: that of the most expensive batch.

    Windows of different calls are never fed together. Without any, it is the model alone.
    """
    shape, extension = shape_of(model), RotaryModel.of(model).extension
    needs = [
        predict_memory(
            shape,
            length + bos,
            batch_size=size,
            prefill_chunk=prefill_chunk,
            logits_chunk=logits_chunk,
            extension=extension,
        )
        for length, bos, size in sorted(
            {
                (batch[0].end - batch[0].start, batch[0].bos, len(batch))
                for windows in calls
                for batch in _equal_windows(model, windows, batch_size)
            }
        )
    ]
    return max(needs, key=lambda need: need.peak, default=MemoryNeed(shape.weight_bytes, 0, 0, 0))


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Switch dropout and checkpointing off, and leave no trace in the model: modes and dynamic frequencies go back."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(False)
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
    rope_types = {kind for module, kind, _ in _rotary_states(model) if "dynamic" in kind or _two_lists(module, kind)}
    return sorted(rope_types)


def refuse_chunks(rope_types: Sequence[str], prefill_chunk: int | None) -> None:
    """Raise if a text is to be fed in chunks and frequencies depend on how many tokens are fed.

    Raises:
        ValueError: With what to do.
    """
    if prefill_chunk is not None and rope_types:
        raise InvalidRequestError(
            f"{argument('prefill_chunk')} cannot be used with rope_type {' and '.join(rope_types)!r}: its frequencies "
            "change with the length fed, so keys in the cache would be rotated differently from those of one pass. "
            f"Leave {argument('prefill_chunk')} out."
        )


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
    for module in model.modules():
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


def _equal_windows(
    model: PreTrainedModel, windows: Iterable[Window], batch_size: int | None
) -> Iterator[Sequence[Window]]:
    """Yield neighbouring windows of equal length, so many at a time."""
    for length, equal in groupby(windows, key=lambda window: window.end - window.start):
        together, size = list(equal), batch_size or default_batch_size(model, length)
        yield from (together[rows] for rows in row_chunks(len(together), size))


@torch.no_grad()
def _batch_losses(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: Sequence[torch.Tensor],
    prefill_chunk: int | None,
    logits_chunk: int | None,
    advance: Advance | None,
) -> list[torch.Tensor]:
    """Return the losses of each row's positions, from one causal pass over int64 ``(batch, num_tokens)``."""
    losses: list[list[torch.Tensor]] = [[torch.empty(0)] for _ in positions]
    rows_at_once = logits_chunk or default_logits_chunk(model.config.get_text_config(decoder=True).vocab_size)
    for start, hidden in _hidden_chunks(model, input_ids, prefill_chunk):
        end = start + hidden.shape[1]
        # The hidden state of token t - 1 predicts token t.
        here = [row[(row > start) & (row <= end)] for row in positions]
        rows = [_take_rows(states, at - 1 - start) for states, at in zip(hidden, here, strict=True) if len(at)]
        if rows:
            targets = torch.cat([ids[at] for ids, at in zip(input_ids, here, strict=True)])
            together = rows[0] if len(rows) == 1 else torch.cat(rows)
            losses_of_rows = token_losses(model, together, targets, rows_at_once)
            for row, part in zip(losses, torch.split(losses_of_rows, [len(at) for at in here]), strict=True):
                row.append(part)
        if advance is not None:
            advance(hidden.shape[0] * hidden.shape[1])
    return [torch.cat(parts) for parts in losses]


def _hidden_chunks(
    model: PreTrainedModel, input_ids: torch.Tensor, prefill_chunk: int | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (position of the first row, hidden states ``(batch, rows, hidden_size)``) in order."""
    body = decoder_body(model)
    batch = input_ids.to(model.device)
    if prefill_chunk is None or prefill_chunk >= batch.shape[1]:
        yield 0, body(input_ids=batch, use_cache=False).last_hidden_state
        return
    cache = make_cache(model, batch.shape[1])
    for rows in row_chunks(batch.shape[1], prefill_chunk):
        output = body(input_ids=batch[:, rows], past_key_values=cache, use_cache=True)
        yield rows.start, output.last_hidden_state


def _take_rows(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Select rows; neighbours (the usual case) as a view, since a copy of a long document's states is large."""
    first, last = int(rows[0]), int(rows[-1])
    return hidden[first : last + 1] if last - first + 1 == len(rows) else hidden[rows.to(hidden.device)]


def _refuse_overflow(model: PreTrainedModel, losses: torch.Tensor, scored: torch.Tensor) -> None:
    bad = scored[~losses[scored].isfinite()]
    if len(bad):
        raise InvalidRequestError(
            f"the loss of token {int(bad[0])} is {losses[bad[0]].item()}: the model overflows in "
            f"{model.dtype}. Load it in bfloat16 or float32."
        )


def lay_out(text: torch.Tensor, windows: Sequence[Window], bos_id: int | None) -> tuple[torch.Tensor, list[Window]]:
    """Put windows of a text side by side, each with its own BOS if it has one.

    Args:
        text: int64 ``(num_tokens,)``.
        windows: Windows of the text.
        bos_id: Token id; None where no window has a BOS.

    Returns:
        int64 ``(all that is fed,)``, and each window's position in it.
    """
    parts, placed, at = [], [], 0
    for window in windows:
        tokens = text[window.start : window.end]
        if window.bos:
            tokens = torch.cat([text.new_tensor([bos_id]), tokens])
        placed.append(Window(at, at + len(tokens), at + window.bos + window.score_from - window.start))
        parts.append(tokens)
        at += len(tokens)
    return torch.cat(parts), placed


class RoomyLayer(DynamicLayer):
    """A cache layer that writes into room for ``num_tokens`` and gives views of what is filled.

    Transformers' own makes new, longer tensors at each chunk: old and new exist together, and what is freed has holes
    too small for the next, so that a long text needs much more than its keys and values.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
        self.num_tokens = num_tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``(batch, heads, new, head_dim)``; return all keys and values so far."""
        start = self.get_seq_length()
        if start == 0:
            super().update(key_states, value_states, *args, **kwargs)
            self.room = [self._make_room(states) for states in (key_states, value_states)]
        end = start + key_states.shape[-2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values

    def _make_room(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, dim = states.shape
        return states.new_empty(batch, heads, self.num_tokens, dim)


def make_cache(model: PreTrainedModel, num_tokens: int) -> DynamicCache:
    """Return an empty cache for ``num_tokens`` tokens fed in chunks.

    Layers with a window, recurrent ones, and those of a model whose method runs in attention, which remembers the
    rotated keys of Transformers' own layers, stay as Transformers makes them.
    """
    cache = DynamicCache(config=model.config)
    implementation = str(model.config._attn_implementation)
    if inner_name(implementation) == implementation:
        cache.layers = [RoomyLayer(num_tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
