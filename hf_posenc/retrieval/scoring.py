"""What a model answers to questions of a text: its choice at every token of the right answer, and what it writes.

A text is fed once. Each question goes on from the text's KV cache, which is put back after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.lm_head import decoder_body, head_logits, row_chunks
from hf_posenc.evaluation.losses import (
    Advance,
    RoomyLayer,
    length_dependent_rope_types,
    make_cache,
    reset_dynamic_frequencies,
)

# An update of these gives them other tensors, or writes behind the tokens they hold: what they held is left as it was.
_UNTOUCHED_BY_UPDATES = (DynamicLayer, DynamicSlidingWindowLayer, RoomyLayer)
IsDone = Callable[[list[int]], bool]


@dataclass(frozen=True)
class Asked:
    """One question of a text, as tokens.

    Attributes:
        question_ids: What follows the text, to the beginning of the answer; empty if the text has it all.
        answer_ids: The right answer; at least one token.
        max_new_tokens: Of the greedy answer at most; with 0 nothing is written.
    """

    question_ids: list[int]
    answer_ids: list[int]
    max_new_tokens: int = 0


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
def replies(
    model: PreTrainedModel,
    text_ids: list[int],
    asked: Sequence[Asked],
    *,
    stop_ids: Collection[int] = (),
    is_done: IsDone | None = None,
    prefill_chunk: int | None = None,
    advance: Advance | None = None,
) -> Iterator[Reply]:
    """Feed a text once; yield the reply to each of its questions, as if it were the only one.

    A question goes on from the text's cache, its right answer from the question's. The greedy answer begins with the
    right tokens up to the first choice that is another one, so only what follows is written token by token. Then the
    cache holds the text alone again. In float32 the losses are those of a forward of text, question and answer to 1e-5.

    Where the model's frequencies depend on the length fed (``needs_its_own_pass``), the text is fed anew with each
    question. Only rows that follow the text reach the head.

    Args:
        model: A causal language model in evaluation mode, not wrapped.
        text_ids: What is fed before each question.
        asked: The questions.
        stop_ids: Tokens that end a greedy answer.
        is_done: Says of the tokens of a greedy answer, after each, that no more are needed; None writes on to a stop or
            to ``max_new_tokens``.
        prefill_chunk: Feed so many tokens of the text at a time; None feeds all at once.
        advance: Called with the number of tokens after each chunk of the text and after each question.

    Raises:
        ValueError: Logits that are not finite.
    """
    ends = _Ends(frozenset(stop_ids), is_done)
    if needs_its_own_pass(model):
        for one in asked:
            yield _reply_in_one_pass(model, text_ids + one.question_ids, one, ends, advance)
        return
    room = max(len(one.question_ids) + max(len(one.answer_ids), one.max_new_tokens) for one in asked)
    cache, first = _prefill(model, text_ids, make_cache(model, len(text_ids) + room), prefill_chunk, advance)
    text = _Fork(cache)
    for one in asked:
        yield _reply_after(model, cache, first, one, ends)
        text.put_back()
        if advance is not None:
            advance(len(one.question_ids))


def needs_its_own_pass(model: PreTrainedModel) -> bool:
    """Say whether each question of a text has to be fed with the text.

    The frequencies of Transformers' ``dynamic``, and of ``longrope`` with two lists, depend on the number of tokens
    fed: a question changes the keys of the text before it.
    """
    return bool(length_dependent_rope_types(model))


class _Fork:
    """What a cache holds now, to be put back after others have added to it."""

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache
        self._states = [self._copy(layer, vars(layer)) for layer in cache.layers]

    def put_back(self) -> None:
        """Let the cache hold what it held when this was made."""
        for layer, state in zip(self.cache.layers, self._states, strict=True):
            vars(layer).clear()
            vars(layer).update(self._copy(layer, state))

    @staticmethod
    def _copy(layer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Copy by reference what no update touches; recurrent states, and what else there is, are cloned."""
        return dict(state) if type(layer) in _UNTOUCHED_BY_UPDATES else copy.deepcopy(state)


@dataclass(frozen=True)
class _Ends:
    """What ends a greedy answer."""

    stop_ids: frozenset[int]
    is_done: IsDone | None

    def of(self, written: list[int], most: int) -> list[int] | None:
        """Return the finished answer; None if it goes on."""
        written = written[:most]
        stop = next((at for at, token in enumerate(written) if token in self.stop_ids), None)
        if stop is not None:
            return written[:stop]
        done = len(written) == most or (self.is_done is not None and self.is_done(written))
        return written if done else None


def _reply_after(model: PreTrainedModel, cache: DynamicCache, first: torch.Tensor, one: Asked, ends: _Ends) -> Reply:
    """Reply over the cache of a text; ``first`` are the logits of what follows it."""
    if one.question_ids:
        _, first = _prefill(model, one.question_ids, cache, None, None)  # its last row alone reaches the head
    prompt, before_last = _Fork(cache), one.answer_ids[:-1]
    rows = torch.cat([first, _feed(model, before_last, cache)]) if before_last else first
    choices, losses = _forced(model, rows, one.answer_ids)
    wrong = (at for at, (choice, right) in enumerate(zip(choices, one.answer_ids, strict=True)) if choice != right)
    written = choices[: next(wrong, len(choices)) + 1]
    todo = written[-1:]
    if len(written) < len(choices):  # the cache holds tokens that the model would not have written
        prompt.put_back()
        todo = written
    return Reply(choices, losses, _write(model, cache, written, todo, one.max_new_tokens, ends))


def _reply_in_one_pass(
    model: PreTrainedModel, prompt_ids: list[int], one: Asked, ends: _Ends, advance: Advance | None
) -> Reply:
    """Score the answer in one pass over everything; then feed the prompt and write on from it, as ``generate`` does."""
    reset_dynamic_frequencies(model)
    batch = torch.tensor([prompt_ids + one.answer_ids], device=model.device)
    hidden = decoder_body(model)(input_ids=batch, use_cache=False).last_hidden_state
    choices, losses = _forced(model, head_logits(model, hidden[0, len(prompt_ids) - 1 : -1]), one.answer_ids)
    reset_dynamic_frequencies(model)
    cache, first = _prefill(model, prompt_ids, DynamicCache(config=model.config), None, advance)
    written = [int(first[-1].argmax())]
    return Reply(choices, losses, _write(model, cache, written, written[:], one.max_new_tokens, ends))


def _forced(model: PreTrainedModel, rows: torch.Tensor, answer_ids: list[int]) -> tuple[list[int], list[float]]:
    """Return the likeliest token and the loss of the right one, from the logits before each of the answer's tokens."""
    if not rows.isfinite().all():
        raise InvalidRequestError(f"logits are not finite in {model.dtype}. Load the model in bfloat16 or float32.")
    losses = nn.functional.cross_entropy(rows, torch.tensor(answer_ids, device=rows.device), reduction="none")
    return rows.argmax(-1).tolist(), losses.tolist()


def _write(
    model: PreTrainedModel, cache: DynamicCache, written: list[int], todo: list[int], most: int, ends: _Ends
) -> list[int]:
    """Return the greedy answer that begins with ``written``; ``todo`` is what of it, or before it, is not fed yet."""
    while (finished := ends.of(written, most)) is None:
        written = [*written, int(_feed(model, todo, cache)[-1].argmax())]
        todo = written[-1:]
    return finished


def _prefill(
    model: PreTrainedModel, ids: list[int], cache: DynamicCache, chunk: int | None, advance: Advance | None
) -> tuple[DynamicCache, torch.Tensor]:
    """Feed a text; return the cache with it, and the logits ``(1, vocab_size)`` of what follows it."""
    body = decoder_body(model)
    batch = torch.tensor([ids], device=model.device)
    for rows in row_chunks(len(ids), chunk or len(ids)):
        hidden = body(input_ids=batch[:, rows], past_key_values=cache, use_cache=True).last_hidden_state
        if advance is not None:
            advance(rows.stop - rows.start)
    return cache, head_logits(model, hidden[0, -1:])


def _feed(model: PreTrainedModel, ids: list[int], cache: DynamicCache) -> torch.Tensor:
    """Return the logits ``(len(ids), vocab_size)`` of what follows each token."""
    batch = torch.tensor([ids], device=model.device)
    hidden = decoder_body(model)(input_ids=batch, past_key_values=cache, use_cache=True).last_hidden_state
    return head_logits(model, hidden[0])
