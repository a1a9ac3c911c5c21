"""A model's answers to questions of a text: its choice at every token of the right answer, and its written text.

A text is fed once. Its questions are fed side by side after it, under a mask by which each sees the text and itself; or
one after the other, each going on from the text's KV cache, which is put back after it.
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
_READ_MASKS = ("sdpa", "eager")  # attention implementations that take a mask (1, 1, rows, keys)
_ROWS = 1024  # of questions that are fed together: their mask has a row for each, as long as the text


@dataclass(frozen=True)
class Asked:
    """One question of a text, as tokens.

    Attributes:
        question_ids: What follows the text, to the beginning of the answer; empty if the text has it all.
        answer_ids: The right answer; at least one token.
        max_new_tokens: Limit of the greedy answer; with 0 nothing is written.
        is_done: Says of the tokens of a greedy answer, after each, that no more are needed; None writes on to a stop or
            to ``max_new_tokens``.
    """

    question_ids: list[int]
    answer_ids: list[int]
    max_new_tokens: int = 0
    is_done: Callable[[list[int]], bool] | None = None

    @property
    def num_rows(self) -> int:
        """The number of tokens that are fed after the text to score the right answer."""
        return len(self.question_ids) + len(self.answer_ids) - 1

    def finished(self, written: list[int], stop_ids: Collection[int]) -> list[int] | None:
        """Return the finished greedy answer; None if it goes on."""
        written = written[: self.max_new_tokens]
        stop = next((at for at, token in enumerate(written) if token in stop_ids), None)
        if stop is not None:
            return written[:stop]
        done = len(written) == self.max_new_tokens or (self.is_done is not None and self.is_done(written))
        return written if done else None


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
    prefill_chunk: int | None = None,
    advance: Advance | None = None,
) -> Iterator[Reply]:
    """Feed a text once; yield the reply to each of its questions, as if it were the only one.

    The right answer is fed with its question. The greedy answer begins with the right tokens up to the first choice
    that is another one, so only what follows is written token by token. In float32 the losses are those of a forward
    of text, question and answer to 1e-5.

    Questions are fed side by side where every layer of the model keeps all keys and its attention takes a mask; what
    is left is fed one question after the other. Where the model's frequencies depend on the length fed
    (``length_dependent_rope_types``), the text is fed anew with each question. Only rows that follow the text reach the
    head.

    Args:
        model: A causal language model in evaluation mode, not wrapped.
        text_ids: What is fed before each question.
        asked: The questions.
        stop_ids: Tokens that end a greedy answer.
        prefill_chunk: Feed so many tokens of the text at a time; None feeds all at once.
        advance: Called with the number of tokens after each chunk of the text and after each question.

    Raises:
        ValueError: Logits that are not finite.
    """
    stops = frozenset(stop_ids)
    if length_dependent_rope_types(model):
        for one in asked:
            yield _reply_in_one_pass(model, text_ids + one.question_ids, one, stops, advance)
        return
    groups = list(_groups(asked, _ROWS if _can_feed_side_by_side(model) else 0))
    room = max(sum(one.num_rows + one.max_new_tokens for one in group) for group in groups)
    cache, first = _prefill(model, text_ids, make_cache(model, len(text_ids) + room), prefill_chunk, advance)
    text = _Fork(cache)
    for group in groups:
        if len(group) == 1:
            found = [_reply_after(model, cache, first, group[0], stops)]
        else:
            found = _replies_side_by_side(model, cache, first, group, stops)
        text.put_back()
        for one, reply in zip(group, found, strict=True):
            yield reply
            if advance is not None:
                advance(len(one.question_ids))


def _can_feed_side_by_side(model: PreTrainedModel) -> bool:
    """Say whether one forward can hold several questions, each blind to the others.

    A sliding window counts keys, a recurrent state has no mask, and methods that run in attention read the positions of
    a text from their order.
    """
    layers = make_cache(model, 0).layers
    return model.config._attn_implementation in _READ_MASKS and all(type(layer) is RoomyLayer for layer in layers)


def _groups(asked: Sequence[Asked], most_rows: int) -> Iterator[list[Asked]]:
    """Yield neighbouring questions of together at most so many rows, or one alone."""
    group: list[Asked] = []
    for one in asked:
        if group and sum(other.num_rows for other in group) + one.num_rows > most_rows:
            yield group
            group = []
        group.append(one)
    yield group


class _Fork:
    """The present state of a cache, to be restored after others have added to it."""

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


def _reply_after(
    model: PreTrainedModel, cache: DynamicCache, first: torch.Tensor, one: Asked, stops: frozenset[int]
) -> Reply:
    """Reply over the cache of a text; ``first`` are the logits of what follows it."""
    if one.question_ids:
        _, first = _prefill(model, one.question_ids, cache, None, None)  # its last row alone reaches the head
    prompt, before_last = _Fork(cache), one.answer_ids[:-1]
    rows = torch.cat([first, _feed(model, before_last, cache)]) if before_last else first
    choices, losses = _forced(model, rows, one.answer_ids)
    written = _written_in(choices, one)
    todo = written[-1:]
    if len(written) < len(choices):  # the cache holds tokens that the model would not have written
        prompt.put_back()
        todo = written
    return Reply(choices, losses, _write(model, cache, written, todo, one, stops))


def _reply_in_one_pass(
    model: PreTrainedModel, prompt_ids: list[int], one: Asked, stops: frozenset[int], advance: Advance | None
) -> Reply:
    """Score the answer in one pass over everything; then feed the prompt and write on from it, as ``generate`` does."""
    reset_dynamic_frequencies(model)
    batch = torch.tensor([prompt_ids + one.answer_ids], device=model.device)
    hidden = decoder_body(model)(input_ids=batch, use_cache=False).last_hidden_state
    choices, losses = _forced(model, head_logits(model, hidden[0, len(prompt_ids) - 1 : -1]), one.answer_ids)
    reset_dynamic_frequencies(model)
    cache, first = _prefill(model, prompt_ids, DynamicCache(config=model.config), None, advance)
    written = [int(first[-1].argmax())]
    return Reply(choices, losses, _write(model, cache, written, written[:], one, stops))


def _forced(model: PreTrainedModel, rows: torch.Tensor, answer_ids: list[int]) -> tuple[list[int], list[float]]:
    """Return the likeliest token and the loss of the right one, from the logits before each of the answer's tokens."""
    if not rows.isfinite().all():
        raise InvalidRequestError(f"logits are not finite in {model.dtype}. Load the model in bfloat16 or float32.")
    losses = nn.functional.cross_entropy(rows, torch.tensor(answer_ids, device=rows.device), reduction="none")
    return rows.argmax(-1).tolist(), losses.tolist()


def _written_in(choices: list[int], one: Asked) -> list[int]:
    """Return the beginning of the greedy answer: the choices up to the first that is not the right one."""
    wrong = (at for at, (choice, right) in enumerate(zip(choices, one.answer_ids, strict=True)) if choice != right)
    return choices[: next(wrong, len(choices)) + 1]


def _write(
    model: PreTrainedModel,
    cache: DynamicCache,
    written: list[int],
    todo: list[int],
    one: Asked,
    stops: frozenset[int],
) -> list[int]:
    """Return the greedy answer that begins with ``written``; ``todo`` is what of it, or before it, is not fed yet."""
    while (finished := one.finished(written, stops)) is None:
        written = [*written, int(_feed(model, todo, cache)[-1].argmax())]
        todo = written[-1:]
    return finished


class _SideBySide:
    """Tokens of several questions after one text in a cache: each sees the text, and its own question up to itself."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache) -> None:
        self.model, self.cache, self.num_text = model, cache, cache.get_seq_length()
        # Of the tokens after the text: which question they are of, and their positions.
        self.questions = self.positions = torch.empty(0, dtype=torch.long, device=model.device)

    def feed(self, ids: Sequence[int], questions: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Return the hidden states ``(len(ids), hidden_size)``; positions count from the end of the text."""
        batch, of, at = torch.tensor([ids, questions, positions], device=self.model.device)
        self.questions, self.positions = torch.cat([self.questions, of]), torch.cat([self.positions, at])
        seen = (self.questions == of[:, None]) & (self.positions <= at[:, None])
        mask = torch.zeros(
            1, 1, len(ids), self.num_text + len(self.questions), dtype=self.model.dtype, device=of.device
        )
        mask[..., self.num_text :].masked_fill_(~seen, torch.finfo(mask.dtype).min)
        body = decoder_body(self.model)
        hidden: torch.Tensor = body(
            input_ids=batch[None],
            attention_mask=mask,
            position_ids=self.num_text + at[None],
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        return hidden[0]

    def hide(self, question: int, position: int) -> None:
        """Let nobody see the tokens of a question from a position on."""
        self.questions[(self.questions == question) & (self.positions >= position)] = -1


def _replies_side_by_side(
    model: PreTrainedModel, cache: DynamicCache, first: torch.Tensor, group: Sequence[Asked], stops: frozenset[int]
) -> list[Reply]:
    """Reply to questions over the cache of a text; ``first`` are the logits of what follows it."""
    rows = _SideBySide(model, cache)
    fed = [one.question_ids + one.answer_ids[:-1] for one in group]
    hidden = rows.feed(
        [token for ids in fed for token in ids],
        [at for at, ids in enumerate(fed) for _ in ids],
        [position for ids in fed for position in range(len(ids))],
    )
    scored, written = [], []
    for at, (one, states) in enumerate(zip(group, torch.split(hidden, [len(ids) for ids in fed]), strict=True)):
        count = len(one.answer_ids)
        scored.append(_forced(model, torch.cat([first, head_logits(model, states[-count:])])[-count:], one.answer_ids))
        written.append(_written_in(scored[at][0], one))
        rows.hide(at, len(one.question_ids) + len(written[at]) - 1)  # what the model would not have written
    going_on = [at for at, one in enumerate(group) if one.finished(written[at], stops) is None]
    while going_on:
        hidden = rows.feed(
            [written[at][-1] for at in going_on],
            going_on,
            [len(group[at].question_ids) + len(written[at]) - 1 for at in going_on],
        )
        for at, choice in zip(going_on, head_logits(model, hidden).argmax(-1).tolist(), strict=True):
            written[at].append(choice)
        going_on = [at for at in going_on if group[at].finished(written[at], stops) is None]
    finished = [one.finished(tokens, stops) or [] for one, tokens in zip(group, written, strict=True)]
    return [Reply(*scores, tokens) for scores, tokens in zip(scored, finished, strict=True)]


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
