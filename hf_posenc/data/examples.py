"""Texts, chats and prompts with answers as token ids, and which of these count in the loss."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from hf_posenc.data.columns import COMPLETION, MESSAGES, PROMPT, Columns
from hf_posenc.data.reading import added_bos, tokenize_text
from hf_posenc.data.tokens import MaskedTokens, Tokens
from hf_posenc.errors import InvalidRequestError, InvalidTypeError, argument
from hf_posenc.utils.chat_templates import with_fixed_date

logger = logging.getLogger(__name__)

# What tells Transformers which tokens are the assistant's.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A dialogue of a model without a chat template: each turn a line, EOS at the end of the last one.
_LINES = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% if loop.last %}{{ eos_token }}{% else %}{{ '\n' }}{% endif %}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
)
_TEMPLATES = "TRL's get_training_chat_template(tokenizer) has one with it for many models"


class ExampleTokenizer:
    """Makes token ids of whole documents, and says which of them count in the loss, as TRL's SFTTrainer does.

    A text gets no special tokens (its EOS comes when it is packed), and all of it counts. A chat is what the chat
    template makes of it, and all of it counts, or with ``assistant_only_loss`` the assistant's turns: what is
    within the template's ``{% generation %}``, or, where it has none, what each of these turns adds to the chat before
    it. Prompt and answer are joined as they are, with the special tokens that the tokenizer puts around a text and EOS
    at the end; or put through the chat template, where they are messages. Of them the answer counts, from where
    the tokens differ from those of the prompt alone; with ``completion_only_loss=False`` all does.

    Args:
        tokenizer: The model's.
        assistant_only_loss: Only the assistant's turns of a chat count.
        completion_only_loss: Only the answers to prompts count; None: so too, and documents without prompts are taken.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        assistant_only_loss: bool = False,
        completion_only_loss: bool | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.assistant_only = assistant_only_loss
        self.completion_only = completion_only_loss
        self._own_template: str | None = None
        self._made_up = False  # chats of our making, which every template renders word for word
        self._said: set[str] = set()

    @classmethod
    def of_dialogues(cls, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return one for dialogues whose answers count, and nothing else; without a chat template, line by line."""
        made = cls(tokenizer, assistant_only_loss=True)
        made._made_up = True
        if tokenizer.chat_template is None:
            begins = added_bos(tokenizer) is not None
            made._own_template = ("{{ bos_token }}" if begins else "") + _LINES
        return made

    def __call__(self, document: Any, where: str) -> Tokens:
        """Return the token ids of a document.

        Args:
            document: A text, token ids, or a row of a dataset with a text, a chat, or a prompt and its answer.
            where: What messages call it.

        Raises:
            TypeError: It is something else.
            ValueError: A row without these columns, a chat that the chat template cannot render or say the
                assistant's part of, or an option that does not suit the document.
        """
        if isinstance(document, MaskedTokens):
            return document
        if isinstance(document, Mapping):
            document = _read(document, where)
        elif not isinstance(document, (str, torch.Tensor)):
            raise InvalidTypeError(
                f"{where} must be a text, a row of a dataset or a tensor of token ids, got {type(document).__name__}."
            )
        if isinstance(document, (str, torch.Tensor)):
            self._check_options(where, is_chat=False, has_prompt=False)
            return tokenize_text(self.tokenizer, document) if isinstance(document, str) else document
        has_prompt, is_chat = PROMPT in document, isinstance(document.get(MESSAGES, document.get(PROMPT)), list)
        self._check_options(where, is_chat=is_chat, has_prompt=has_prompt)
        if not has_prompt:
            return self._chat(document, document[MESSAGES], where)
        whole, prompt = (self._prompted_chat if is_chat else self._prompted_text)(document, where)
        start = common_prefix(prompt, whole.ids.tolist())
        if start < len(prompt):
            self._warn_once(
                f"{where}: the end of the prompt becomes other tokens where the answer follows "
                f"({self.tokenizer.decode(prompt[start:])!r}), so the answer is taken to begin there. A prompt that "
                "ends at a token's border, such as a line's end, is trained on as it will be read."
            )
        counted = whole.counted.clone()
        if self.completion_only is not False:
            counted[:start] = False
        return MaskedTokens(whole.ids, counted)

    def _check_options(self, where: str, *, is_chat: bool, has_prompt: bool) -> None:
        if self.assistant_only and not is_chat:
            raise InvalidRequestError(
                f"{argument('assistant_only_loss')} counts the assistant's turns of chats, and {where} is no chat. "
                "Leave it out, or give chats: a column of messages."
            )
        if self.completion_only and not has_prompt:
            raise InvalidRequestError(
                f"{argument('completion_only_loss')} counts the answers to prompts, and {where} has no prompt. Leave "
                "it out, or name "
                "the columns of prompt and answer when you read them "
                f"({argument('text_field', ['question', 'answer'])})."
                + (f" For chats there is {argument('assistant_only_loss')}." if is_chat else "")
            )

    def _prompted_text(self, document: Mapping[str, str], where: str) -> tuple[MaskedTokens, list[int]]:
        """Return prompt and answer, all counted, and the prompt alone."""
        prompt, answer = document[PROMPT], document[COMPLETION]
        if prompt and answer and not prompt[-1].isspace() and not answer[0].isspace():
            self._warn_once(
                f"{where}: prompt and answer are joined as they are, without a blank between {prompt[-20:]!r} and "
                f"{answer[:20]!r}. Where there should be something, say so by a template "
                "(--template '{question} {answer}')."
            )
        ids, alone = (self._with_special_tokens(text) for text in (prompt + answer, prompt))
        eos: Any = self.tokenizer.eos_token_id
        if eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return MaskedTokens.uniform(torch.tensor(ids, dtype=torch.int64), counted=True), alone

    def _with_special_tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, truncation=False, verbose=False)["input_ids"])

    def _prompted_chat(self, document: Mapping[str, Any], where: str) -> tuple[MaskedTokens, list[int]]:
        prompt = document[PROMPT]
        whole = self._chat(document, prompt + document[COMPLETION], where)
        return whole, self._applied(document, prompt, where, add_generation_prompt=True)["input_ids"]

    def _chat(self, document: Mapping[str, Any], messages: list[Any], where: str) -> MaskedTokens:
        if not self.assistant_only:
            ids = self._applied(document, messages, where)["input_ids"]
            return MaskedTokens.uniform(torch.tensor(ids, dtype=torch.int64), counted=True)
        tokens = self._of_the_assistant(document, messages, where)
        if (end := self._uncounted_end(tokens)) is not None:
            self._warn_once(
                f"{where}: {end!r}, with which a turn of the assistant ends, does not count in the loss, so the model "
                "does not learn to stop there. Give the tokenizer a chat template with it inside of {% generation %} "
                f"(--chat-template-path FILE; {_TEMPLATES}), or train without assistant_only_loss."
            )
        return tokens

    def _of_the_assistant(self, document: Mapping[str, Any], messages: list[Any], where: str) -> MaskedTokens:
        if _GENERATION.search(self._template(document, where)):
            applied = self._applied(document, messages, where, return_assistant_tokens_mask=True)
            tokens = MaskedTokens(torch.tensor(applied["input_ids"]), torch.tensor(applied["assistant_masks"]) == 1)
            if any(message["role"] == "assistant" for message in messages) and not tokens.counted.any():
                raise InvalidRequestError(
                    f"{where}: the chat template's {{% generation %}} holds none of the assistant's turns. Mend the "
                    f"template ({_TEMPLATES}), or train without {argument('assistant_only_loss')}."
                )
            return tokens
        return self._by_what_turns_add(document, messages, where)

    @cached_property
    def _special(self) -> set[int]:
        return {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    def _uncounted_end(self, tokens: MaskedTokens) -> str | None:
        """Return the special token after a turn that counts and ends with none, as GLM's template has it."""
        ids, counted = tokens.ids.tolist(), tokens.counted.tolist()
        for index in range(1, len(ids)):
            if counted[index - 1] and not counted[index] and ids[index] in self._special:
                turn = itertools.takewhile(lambda before: counted[before], range(index - 1, -1, -1))
                last = next((ids[one] for one in turn if str(self.tokenizer.decode(ids[one])).strip()), None)
                if last not in self._special:
                    return str(self.tokenizer.decode(ids[index]))
        return None

    def _by_what_turns_add(self, document: Mapping[str, Any], messages: list[Any], where: str) -> MaskedTokens:
        text = self._applied(document, messages, where, tokenize=False)
        tokens = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        counted = torch.zeros(len(tokens["input_ids"]), dtype=torch.bool)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            with_it = self._applied(document, messages[: number + 1], where, tokenize=False)
            if number:
                before = self._applied(document, messages[:number], where, tokenize=False, add_generation_prompt=True)
            else:  # no template renders an empty chat: what it writes before a first turn does not depend on its words
                other = "B" if str(message.get("content")).lstrip().startswith("A") else "A"
                changed = self._applied(document, [{**message, "content": other}], where, tokenize=False)
                before = with_it[: common_prefix(with_it, changed)]
            if not (text.startswith(with_it) and with_it.startswith(before)):
                if self._made_up:
                    return self._where_answers_are(text, tokens, messages)
                raise InvalidRequestError(
                    f"{where}: which tokens are the assistant's is unknown: the chat template has no "
                    f"{{% generation %}}, and what it makes of the chat up to turn {number + 1} is not how it begins "
                    f"the whole chat. Give the tokenizer a template that has it (--chat-template-path FILE; "
                    f"{_TEMPLATES}), or train without {argument('assistant_only_loss')}."
                )
            characters = range(len(before), len(with_it))  # of which a tokenizer may drop some, blanks for one
            ends = [
                next((token for at in way if (token := tokens.char_to_token(at)) is not None), None)
                for way in (characters, reversed(characters))
            ]
            if ends[0] is not None and ends[1] is not None:
                counted[ends[0] : ends[1] + 1] = True
        return MaskedTokens(torch.tensor(tokens["input_ids"]), counted)

    def _where_answers_are(self, text: str, tokens: Any, messages: list[Any]) -> MaskedTokens:
        """Count each answer with the special token that ends its turn.

        For templates that render a turn otherwise once another follows, as Qwen3's, which thinks in the last one only.
        """
        ids, start_of_next = tokens["input_ids"], 0
        counted = torch.zeros(len(ids), dtype=torch.bool)
        for message in messages:
            start = text.index(message["content"], start_of_next)
            start_of_next = start + len(message["content"])
            if message["role"] == "assistant":
                end = tokens.char_to_token(start_of_next - 1) + 1
                counted[tokens.char_to_token(start) : end] = True
                counted[end : end + 1] = end < len(ids) and ids[end] in self._special
        return MaskedTokens(torch.tensor(ids), counted)

    def _applied(self, document: Mapping[str, Any], messages: list[Any], where: str, **options: Any) -> Any:
        """Return the result of the chat template for some messages: tokens, or with ``tokenize=False`` their text."""
        template, tools = self._template(document, where), _parsed(document, "tools", where)
        if options.get("tokenize", True):
            options |= {"return_dict": True, "tokenizer_kwargs": {"verbose": False}}
        options |= _parsed(document, "chat_template_kwargs", where) or {}
        try:
            return self.tokenizer.apply_chat_template(messages, chat_template=template, tools=tools, **options)
        except Exception as error:  # whatever a template raises
            raise InvalidRequestError(
                f"{where}: the tokenizer's chat template cannot render this chat: {error} Its turns: "
                f"{', '.join(message['role'] for message in messages)}."
            ) from error

    def _template(self, document: Mapping[str, Any], where: str) -> str:
        if self._own_template is not None:
            return self._own_template
        if self.tokenizer.chat_template is None:
            raise InvalidRequestError(
                "the documents are chats, and the tokenizer has no chat template, as those of base models. Set "
                "tokenizer.chat_template, to that of the model's instruct version for one (--chat-template-path FILE, "
                "a Jinja template), or train on a column of texts."
            )
        return with_fixed_date(self.tokenizer.get_chat_template(None, _parsed(document, "tools", where)))

    def _warn_once(self, message: str) -> None:
        message_kind = message.partition(": ")[2][:20]
        if message_kind not in self._said:
            self._said.add(message_kind)
            logger.warning("%s Only the first such document is reported.", message)


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of equal tokens, or characters, at the beginning of two rows."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _read(row: Mapping[str, Any], where: str) -> Any:
    try:
        return Columns().read(row, where)
    except ValueError as error:
        raise InvalidRequestError(
            f"{error} Of rows in memory the names count: text, messages, or prompt and completion; rename the columns."
        ) from error


def _parsed(document: Mapping[str, Any], column: str, where: str) -> Any:
    """Return a column that may be written as JSON, as TRL advises; None where it is empty."""
    value = document.get(column)
    if not isinstance(value, str):
        return value or None
    try:
        return (json.loads(value) if value.strip() else None) or None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"{where}: column {column!r} is text, but not JSON: {error}.") from error
