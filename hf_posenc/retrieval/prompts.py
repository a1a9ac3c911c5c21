"""Prompts of an exact number of tokens, the same for the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hf_posenc.errors import InvalidRequestError
from hf_posenc.retrieval.haystack import Haystack
from hf_posenc.retrieval.tasks import get_task
from hf_posenc.retrieval.tasks.base import Listing, Needle, Puzzle

Chat = Literal["auto", "on", "off"]
_MARK = "THE-TEXT-GOES-HERE"


@dataclass(frozen=True)
class Prompt:
    """What is fed and what should come back.

    Attributes:
        task: Name of the task.
        context_length: Tokens of prompt and answer together, the answer at its longest.
        depth: Percent of the free text before the needle; None where nothing lies at one depth.
        seed: Of everything random.
        ids: The prompt, special tokens and the beginning of the answer included.
        answer_ids: The right answer.
        answer_positions: For each thing to be found, the positions in ``answer_ids`` of the tokens that hold it.
        answers: The same as texts.
        ordered: Whether their order is the only right one.
        needle_places: Position in ``ids`` of the first token of each needle.
        max_new_tokens: Tokens an answer may have.
    """

    task: str
    context_length: int
    depth: float | None
    seed: int
    ids: list[int]
    answer_ids: list[int]
    answer_positions: tuple[tuple[int, ...], ...]
    answers: tuple[str, ...]
    ordered: bool
    needle_places: tuple[int, ...]
    max_new_tokens: int


class PromptMaker:
    """Builds prompts for one tokenizer from one text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, haystack: Haystack, chat: Chat = "auto") -> None:
        """Prepare to make prompts.

        Args:
            tokenizer: The model's, a fast one.
            haystack: The free text.
            chat: Whether the prompt is a user's message in the tokenizer's chat template: on, off, or auto, where there
                is one.

        Raises:
            ValueError: ``chat`` is "on" without a chat template, the template does not show the text once as it
                is, or the tokenizer cannot say which characters a token holds.
        """
        if not tokenizer.is_fast:
            raise InvalidRequestError(f"{type(tokenizer).__name__} is a slow tokenizer; retrieval needs the fast one.")
        if chat not in ("auto", "on", "off"):
            raise InvalidRequestError(f"chat must be auto, on or off, got {chat!r}.")
        if chat == "on" and not tokenizer.chat_template:
            raise InvalidRequestError("chat='on', but the tokenizer has no chat template. Pass chat='off' or 'auto'.")
        self.tokenizer, self.haystack = tokenizer, haystack
        self.in_chat = chat != "off" and bool(tokenizer.chat_template)
        self._before, self._after = self._template() if self.in_chat else ("", "")

    def make(self, task: str, context_length: int, depth: float | None, seed: int) -> Prompt:
        """Build a prompt that leaves the room its longest answer needs of ``context_length`` tokens.

        Exactly that room where there is free text; a list of words may end a few words earlier.

        Raises:
            ValueError: Too few tokens for the task, or the documents are too short; with the counts.
        """
        depth = None if depth is None else float(depth)  # 50 and 50.0 are the same prompt
        rng = Random(f"{task} {context_length} {depth} {seed}")
        puzzle = get_task(task).make(rng, context_length)
        head = self._head(puzzle)
        tail, answer_ids, positions = self._tail(puzzle)
        needles = [(needle, self._ids(f"\n{needle.text}\n")) for needle in puzzle.needles]
        max_new_tokens = len(answer_ids) + puzzle.spare_tokens
        fixed = len(head) + sum(len(ids) for _, ids in needles) + len(tail)
        room = context_length - fixed - max_new_tokens
        least = 1 if puzzle.listing is None else len(self._ids(puzzle.listing.write(puzzle.listing.least)))
        if room < least:
            raise InvalidRequestError(
                f"task {task!r} does not fit into {context_length} tokens: instruction, needles and question take "
                f"{fixed}, the shortest text {least} and the answer up to {max_new_tokens}. Give a context length of "
                f"at least {fixed + least + max_new_tokens}."
            )
        if puzzle.listing is None:
            body, at = _hide(needles, self.haystack.cut(room, rng), depth, rng)
        else:
            body, at = self._fill(puzzle.listing, room), []
        return Prompt(
            task=task,
            context_length=context_length,
            depth=depth,
            seed=seed,
            ids=head + body + tail,
            answer_ids=answer_ids,
            answer_positions=positions,
            answers=puzzle.answers,
            ordered=puzzle.ordered,
            needle_places=tuple(len(head) + position for position in at),
            max_new_tokens=max_new_tokens,
        )

    def _fill(self, listing: Listing, room: int) -> list[int]:
        """Return the longest listing that fits.

        Raises:
            ValueError: The longest that can be made leaves room.
        """
        low, high = listing.least, listing.most + 1
        best = self._ids(listing.write(low))
        while high - low > 1:
            count = min(2 * low, (low + high) // 2)  # doubled while it fits: a far too long one would take long
            ids = self._ids(listing.write(count))
            if len(ids) <= room:
                low, best = count, ids
            else:
                high = count
        if low == listing.most:
            raise InvalidRequestError(
                f"there are words for {len(best)} tokens only, and room for {room}. Ask at shorter lengths."
            )
        return best

    def _template(self) -> tuple[str, str]:
        """Return what the chat template writes before and behind a user's text."""
        messages = [{"role": "user", "content": _MARK}]
        # Without enable_thinking=False some models would think before the answer that is begun for them.
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        shown = str(self.tokenizer.apply_chat_template(messages, **options))
        before, mark, after = shown.partition(_MARK)
        if not mark or _MARK in after:
            raise InvalidRequestError("the chat template does not show a user's text once, as it is. Pass chat='off'.")
        return before, after

    def _head(self, puzzle: Puzzle) -> list[int]:
        text = f"{puzzle.instruction}\n\n"
        if self.in_chat:
            return self._ids(self._before + text)  # the template holds the special tokens
        return self._leading_tokens() + self._ids(text)

    def _leading_tokens(self) -> list[int]:
        """Return what the tokenizer puts before a text: BOS, or nothing."""
        bare, full = self._ids("text"), self.tokenizer("text").input_ids
        start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        return list(full[:start])

    def _tail(self, puzzle: Puzzle) -> tuple[list[int], list[int], tuple[tuple[int, ...], ...]]:
        """Return the tokens of the question, those of the answer, and the positions of what is to be found in it."""
        question = f"\n\n{puzzle.question}{self._after if self.in_chat else chr(10)}{puzzle.answer_prefix}"
        text, spans = question, []
        for index, answer in enumerate(puzzle.answers):
            text += ", " if index else " "
            spans.append((len(text), len(text) + len(answer)))
            text += answer
        # Together, as a model that writes the answer itself would have it.
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = found.input_ids, found.offset_mapping
        split = next(at for at, (_, stop) in enumerate(offsets) if stop > len(question))
        positions = tuple(
            tuple(
                at - split for at, (first, last) in enumerate(offsets) if first < stop and last > start and at >= split
            )
            for start, stop in spans
        )
        return ids[:split], ids[split:], positions

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _hide(
    needles: list[tuple[Needle, list[int]]], text: Haystack, depth: float | None, rng: Random
) -> tuple[list[int], list[int]]:
    """Return the text with its needles, and where each begins."""
    somewhere = iter(
        sorted(rng.uniform(0, 100) for needle, _ in needles if not (needle.at_depth and depth is not None))
    )
    depths = [depth if needle.at_depth and depth is not None else next(somewhere) for needle, _ in needles]
    at = [text.position_of(each) for each in depths]
    ids: list[int] = []
    positions = [0] * len(needles)
    done = 0
    for index in sorted(range(len(needles)), key=lambda index: at[index]):
        ids += text.ids[done : at[index]]
        done = at[index]
        positions[index] = len(ids)
        ids += needles[index][1]
    return ids + text.ids[done:], positions
