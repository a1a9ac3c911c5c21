"""Prompts of an exact number of tokens, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hf_posenc.errors import InvalidRequestError
from hf_posenc.retrieving.haystack import Haystack
from hf_posenc.retrieving.tasks import get_task
from hf_posenc.retrieving.tasks.base import Listing, Puzzle, Question, has_words
from hf_posenc.utils.chat_templates import with_fixed_date

Chat = Literal["auto", "on", "off"]
_MARK = "THE-TEXT-GOES-HERE"
_SHORTER = "Ask at shorter lengths."
_LINES_AT_ONCE = 64  # of those a text is filled with, to the tokenizer


@dataclass(frozen=True)
class Prompt:
    """A prompt and its right answer: one question of a text.

    Attributes:
        task: Name of the task.
        context_length: Tokens of prompt and answer together, the answer at its longest; with several questions of a
            text, those of the longest.
        depth: Percent of the free text before the needle; None where nothing lies at one depth.
        seed: Seed of everything random in the text and its questions.
        question: Which of the questions of its text it is, from 0.
        num_questions: How many the text has.
        text_ids: The text, with the special tokens and the instruction before it. Questions of one text share it.
        question_ids: What follows: the question, and the beginning of the answer.
        answer_ids: The right answer.
        answer_positions: For each thing to be found, the positions in ``answer_ids`` of the tokens that hold it.
        answers: The same as texts.
        ordered: Whether their order is the only right one.
        choices: What a single answer is one of, where these are few.
        needle_places: Position in ``ids`` of the first token of each needle; with several questions, of those needles
            that hold the answer.
        max_new_tokens: Tokens an answer may have.
    """

    task: str
    context_length: int
    depth: float | None
    seed: int
    question: int
    num_questions: int
    text_ids: list[int]
    question_ids: list[int]
    answer_ids: list[int]
    answer_positions: tuple[tuple[int, ...], ...]
    answers: tuple[str, ...]
    ordered: bool
    choices: tuple[str, ...]
    needle_places: tuple[int, ...]
    max_new_tokens: int

    @property
    def ids(self) -> list[int]:
        """The whole prompt, to the beginning of the answer."""
        return self.text_ids + self.question_ids


@dataclass(frozen=True)
class _Tail:
    """A question as tokens, as the attributes of the same names of ``Prompt``."""

    question_ids: list[int]
    answer_ids: list[int]
    answer_positions: tuple[tuple[int, ...], ...]
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

    def make(
        self, task: str, context_length: int, depth: float | None, seed: int, num_questions: int = 1, spare: int = 0
    ) -> tuple[Prompt, ...]:
        """Build a text with its questions, that leaves the room the longest of them needs of ``context_length`` tokens.

        Exactly that room where there is free text; a list of words may end a few words earlier, one of lines a line.

        Args:
            task: Name of the task.
            context_length: Tokens of prompt and answer together, the answer at its longest.
            depth: Percent of the free text before the needles of the answer; None spreads them. With several questions
                all needles are spread: each lies at a random place of its own equal part of the text.
            seed: Seed of everything random.
            num_questions: Questions of the text.
            spare: Tokens of ``context_length`` that are left free besides, for what another program adds.

        Raises:
            ValueError: Too few tokens for the task, or the documents are too short, with the counts; or the tokenizer
                does not read the right answer back from its tokens.
        """
        # 50 and 50.0 are the same prompt
        depth = None if depth is None or num_questions > 1 else float(depth)
        asked = depth if num_questions == 1 else f"{num_questions} questions"
        rng = Random(f"{task} {context_length} {asked} {seed}")
        puzzle = get_task(task).make(rng, context_length, num_questions)
        head = self._head(puzzle)
        tails = [self._tail(question) for question in puzzle.questions]
        frame = "{}\n" if puzzle.lines is not None else "\n{}\n"
        needles = [self._ids(frame.format(needle)) for needle in puzzle.needles]
        answer = max(tail.max_new_tokens for tail in tails)
        end = max(len(tail.question_ids) + tail.max_new_tokens for tail in tails)
        hidden = sum(map(len, needles))
        room = context_length - spare - len(head) - hidden - end
        least = 1 if puzzle.listing is None else len(self._ids(puzzle.listing.write(puzzle.listing.least)))
        if room < least:
            count = f"{len(needles)} " if len(tails) > 1 else ""
            advice = ", or ask fewer questions of a text" if len(tails) > 1 else ""
            free = f", {spare} are left free" if spare else ""
            raise InvalidRequestError(
                f"task {task!r} does not fit into {context_length} tokens: instruction, {count}needles and question "
                f"take {len(head) + hidden + end - answer}, the shortest text {least} and the answer up to "
                f"{answer}{free}. Give a context length of at least {context_length - room + least}{advice}."
            )
        positions: list[int] = []
        depths: list[float] = []
        if puzzle.listing is not None:
            body = self._fill(puzzle.listing, room)
        else:
            text = self.haystack.cut(room, rng) if puzzle.lines is None else self._lines(puzzle.lines(), room)
            body, positions, depths = _hide(needles, text, _wanted_depths(puzzle, depth, rng))
        text_ids = head + body
        return tuple(
            Prompt(
                task=task,
                context_length=context_length,
                depth=depths[question.needles[0]] if len(tails) > 1 and len(question.needles) == 1 else depth,
                seed=seed,
                question=number,
                num_questions=len(tails),
                text_ids=text_ids,
                **vars(tail),
                answers=question.answers,
                ordered=question.ordered,
                choices=question.choices,
                needle_places=tuple(
                    len(head) + position
                    for index, position in enumerate(positions)
                    if len(tails) == 1 or index in question.needles
                ),
            )
            for number, (question, tail) in enumerate(zip(puzzle.questions, tails, strict=True))
        )

    def _lines(self, lines: Iterator[str], room: int) -> Haystack:
        """Return as many lines as fit.

        Raises:
            ValueError: There are not enough.
        """
        ids: list[int] = []
        ends: list[int] = []
        while some := [f"{line}\n" for line in islice(lines, _LINES_AT_ONCE)]:
            for row in self.tokenizer(some, add_special_tokens=False, verbose=False).input_ids:
                if len(ids) + len(row) > room:
                    return Haystack(ids, ends, near=room)
                ids += row
                ends.append(len(ids))
        raise InvalidRequestError(f"there are lines for {len(ids)} tokens only, and room for {room}. {_SHORTER}")

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
            raise InvalidRequestError(f"there are words for {len(best)} tokens only, and room for {room}. {_SHORTER}")
        return best

    def _template(self) -> tuple[str, str]:
        """Return the words that the chat template writes before and behind a user's text."""
        messages = [{"role": "user", "content": _MARK}]
        # Without enable_thinking=False some models would think before the answer that is begun for them.
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        template = with_fixed_date(self.tokenizer.get_chat_template())
        shown = str(self.tokenizer.apply_chat_template(messages, chat_template=template, **options))
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
        """Return the token ids that the tokenizer puts before a text: BOS, or none."""
        bare, full = self._ids("text"), self.tokenizer("text").input_ids
        start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        return list(full[:start])

    def _tail(self, question: Question) -> _Tail:
        begun = f"\n\n{question.text}{self._after if self.in_chat else chr(10)}{question.answer_prefix}"
        text, spans = begun, []
        for index, answer in enumerate(question.answers):
            text += ", " if index else " "
            spans.append((len(text), len(text) + len(answer)))
            text += answer
        # Together, as a model that writes the answer itself would have it.
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = encoding.input_ids, encoding.offset_mapping
        split = next((at for at, (_, stop) in enumerate(offsets) if stop > len(begun)), len(offsets))
        self._check_is_read_back(ids[split:], question.answers)
        positions = tuple(
            tuple(
                at - split for at, (first, last) in enumerate(offsets) if first < stop and last > start and at >= split
            )
            for start, stop in spans
        )
        return _Tail(ids[:split], ids[split:], positions, len(ids) - split + question.spare_tokens)

    def _check_is_read_back(self, ids: list[int], answers: Sequence[str]) -> None:
        """Raise an error if even the right answer, read back from its tokens, would not be found."""
        text = str(self.tokenizer.decode(ids))
        for answer in answers:
            if not has_words(text, answer):
                raise InvalidRequestError(
                    f"the answer {answer!r} cannot be scored with {type(self.tokenizer).__name__}, which reads it back "
                    f"from its tokens as {text.strip()!r}: the model cannot write it. Choose tasks with other answers, "
                    "or a tokenizer that keeps digits, hyphens and commas."
                )

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _wanted_depths(puzzle: Puzzle, depth: float | None, rng: Random) -> list[float]:
    """Return where each needle should lie, in percent of the text before it."""
    count = len(puzzle.needles)
    if len(puzzle.questions) > 1:  # stratified, so that no part of the text is without needles
        return [100 * (index + rng.random()) / count for index in range(count)]
    fixed = puzzle.questions[0].needles if depth is not None else ()
    somewhere = iter(sorted(rng.uniform(0, 100) for index in range(count) if index not in fixed))
    return [depth if depth is not None and index in fixed else next(somewhere) for index in range(count)]


def _hide(
    needles: Sequence[list[int]], text: Haystack, depths: Sequence[float]
) -> tuple[list[int], list[int], list[float]]:
    """Return the text with its needles, where each begins, and how much of the text is before it, in percent."""
    at = [text.position_of(depth) for depth in depths]
    ids: list[int] = []
    positions = [0] * len(needles)
    done = 0
    for index in sorted(range(len(needles)), key=lambda index: at[index]):
        ids += text.ids[done : at[index]]
        done = at[index]
        positions[index] = len(ids)
        ids += needles[index]
    return ids + text.ids[done:], positions, [100 * each / max(len(text.ids), 1) for each in at]
