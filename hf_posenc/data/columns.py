"""The content of a dataset's row: a text, a chat, or a prompt with its answer; and the advice for one without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from hf_posenc.errors import InvalidRequestError, UnknownNameError, argument

# A text, or TRL's words for the rest: {"messages": [...]} or {"prompt": ..., "completion": ...}.
Document = str | dict[str, Any]

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"
# Read where no column is named, in this order.
_CHATS = (MESSAGES, "conversations")
_FOUND = (("text",), *((name,) for name in _CHATS), (PROMPT, COMPLETION))
# What else a chat template is given, as by TRL.
_BESIDE_CHATS = ("tools", "chat_template_kwargs")
# Names that published datasets give to prompt and answer, for advice only.
_PROMPTS = ("question", "instruction", "input", "query", "prompt", "problem")
_ANSWERS = ("answer", "output", "response", "completion", "solution", "chosen")
_ALPACA = ("instruction", "input", "output")
# Who speaks, in ShareGPT's words and in those of chat templates.
_SPEAKERS = {"human": "user", "gpt": "assistant", **{name: name for name in ("system", "user", "assistant", "tool")}}
_A_CHAT = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'


@dataclass(frozen=True)
class Columns:
    r"""The columns of a row that are read.

    Attributes:
        text_field: One column, of texts or of chats; two, prompt and answer, joined as they are; None for the first
            there is of ``text``, ``messages``, ``conversations``, and ``prompt`` with ``completion``. A chat is a list
            of ``{"role", "content"}`` or of ShareGPT's ``{"from", "value"}``, whose ``human`` is read as ``user`` and
            ``gpt`` as ``assistant``; the columns ``tools`` and ``chat_template_kwargs`` go with it.
        template: Instead: a text with columns in braces, such as ``"Question: {question}\nAnswer: {answer}"``. What
            the last one fills in, and what follows, is the answer; all before is the prompt.

    Raises:
        ValueError: Both are given, more than two columns, or a template that names none or cannot be read.
    """

    text_field: str | Sequence[str] | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        names = self._names()
        if self.text_field is not None and not 1 <= len(names) <= 2:
            raise InvalidRequestError(
                f"{argument('text_field')} takes one column (texts or chats) or two (prompt and answer), got "
                f"{len(names)}: "
                f"{', '.join(names)}. More of them are put together by a template, such as "
                f"{argument('template', _template_of(names or ('question', 'answer')))}."
            )
        if self.text_field is not None and self.template is not None:
            raise InvalidRequestError(
                f"{argument('text_field')} and {argument('template')} both say what is read of a row: give one of them."
            )
        if self.template is not None and not any(name for _, name in _pieces(self.template)):
            raise InvalidRequestError(
                f"the template {self.template!r} names no column. Put columns in braces: "
                f"{argument('template', 'Question: {question} Answer: {answer}')}."
            )

    def read(self, row: Any, where: str) -> Document:
        """Return the document in a row; its lines end with a line feed. An empty chat is the empty text.

        Args:
            row: Values by column.
            where: The row, for messages.

        Raises:
            ValueError: A column is missing, or holds what it cannot be read as. The message says which there are.
        """
        if not isinstance(row, Mapping):
            raise InvalidRequestError(f"{where} is no row of columns, but {type(row).__name__}: {_shown(row)}.")
        if self.template is not None:
            return self._filled_in(row, where)
        names = self._names() or _find(row)
        if not names:
            known = "'text', 'messages', 'conversations', or 'prompt' with 'completion'"
            raise InvalidRequestError(f"{where} has no column {known}; it has: {_names_of(row)}. {_advice(row)}")
        values = [_value(row, name, where) for name in names]
        beside = {name: _without_none(row[name]) for name in _BESIDE_CHATS if row.get(name) is not None}
        if len(names) == 1:
            return values[0] if isinstance(values[0], str) else {MESSAGES: values[0], **beside} if values[0] else ""
        prompt, completion = values
        if isinstance(prompt, str) != isinstance(completion, str):
            raise InvalidRequestError(
                f"{where}: of columns {names[0]!r} and {names[1]!r} one holds text and the other a chat."
            )
        return {PROMPT: prompt, COMPLETION: completion, **({} if isinstance(prompt, str) else beside)}

    def _names(self) -> tuple[str, ...]:
        return (self.text_field,) if isinstance(self.text_field, str) else tuple(self.text_field or ())

    def _filled_in(self, row: Mapping[str, Any], where: str) -> Document:
        parts: list[str] = []
        answer = 0  # where in them it begins
        for literal, name in _pieces(str(self.template)):
            parts.append(literal)
            if name:
                answer = len(parts)
                parts.append(_text(row, name, where))
        return {PROMPT: "".join(parts[:answer]), COMPLETION: "".join(parts[answer:])}


def with_plain_line_ends(text: str) -> str:
    """Return a text whose lines end as models were trained on them: Windows' and old Macs' ends cost it dearly."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _pieces(template: str) -> list[tuple[str, str]]:
    """Return the text before each column of a template, with its name; last the text after all, with no name."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise InvalidRequestError(
            f"the template {template!r} cannot be read ({error}): write a brace as {{{{ or }}}}."
        ) from None
    for _, name, form, conversion in parsed:
        if name is not None and (not name or form or conversion):
            raise InvalidRequestError(
                f"the template {template!r}: a column is its name in braces and nothing else, as {{question}}."
            )
    return [(literal, name or "") for literal, name, _, _ in parsed]


def _find(row: Mapping[str, Any]) -> tuple[str, ...]:
    # Chats written as JSON are read as texts only where the column is named.
    there = {name for name in row if name not in _CHATS or not isinstance(row[name], str)}
    return next((names for names in _FOUND if there.issuperset(names)), ())


def _value(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a column's text or messages."""
    value = row.get(name)
    if isinstance(value, str):
        return with_plain_line_ends(value)
    if isinstance(value, (list, tuple)):
        return [_message(turn, f"{where}: turn {number} in column {name!r}") for number, turn in enumerate(value, 1)]
    _refuse_missing(row, name, where)
    raise InvalidRequestError(
        f"{where}: column {name!r} holds {_shown(value)}, neither text nor a chat ({_A_CHAT}). It has: "
        f"{_names_of(row)}. {_advice(row)}"
    )


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    """Return the text that replaces a template's column: texts, and numbers as they are written."""
    value = row.get(name)
    if isinstance(value, (int, float)):
        return str(value)
    if not isinstance(value, str):
        _refuse_missing(row, name, where)
        raise InvalidRequestError(
            f"{where}: column {name!r} holds {_shown(value)}, and a template is filled in with texts."
        )
    return with_plain_line_ends(value)


def _refuse_missing(row: Mapping[str, Any], name: str, where: str) -> None:
    if name not in row:
        raise InvalidRequestError(f"{where}: {UnknownNameError('column', name, map(str, row))} {_advice(row)}")


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return one message of a chat in the words of chat templates."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} is {_shown(message)}. A chat is a list of messages: {_A_CHAT}.")
    fields: dict[str, Any] = _without_none(message)
    if "from" in fields and "role" not in fields:
        speaker = fields.pop("from")
        if speaker not in _SPEAKERS:
            raise InvalidRequestError(f"{where} is {UnknownNameError('speaker', speaker, _SPEAKERS)}")
        fields = {"role": _SPEAKERS[speaker], **fields}
        if "value" in fields:
            fields["content"] = fields.pop("value")
    if not isinstance(fields.get("role"), str) or len(fields) < 2:
        raise InvalidRequestError(
            f"{where} has {_names_of(message)}, but a message has a role and a content: {_A_CHAT}."
        )
    if "content" in fields:
        fields["content"] = with_plain_line_ends(_content(fields["content"], where))
    return fields


def _without_none(value: Any) -> Any:
    """Return a value without the fields that are None, at any depth: datasets adds them where other rows have some."""
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else [content]
    if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise InvalidRequestError(f"{where} has the content {_shown(content)}: only text can be read.")


def _advice(row: Mapping[str, Any]) -> str:
    """Say which columns look as if they should be read, and how to write that."""
    texts = {str(name).casefold(): str(name) for name, value in row.items() if isinstance(value, str)}
    chats = [str(name) for name, value in row.items() if _looks_like_a_chat(value)]
    prompt = next((texts[name] for name in _PROMPTS if name in texts), None)
    answer = next((texts[name] for name in _ANSWERS if name in texts and texts[name] != prompt), None)
    if chats:
        return _named(chats[:1])
    if all(name in texts for name in _ALPACA):
        return f"Give a template: {argument('template', _template_of([texts[name] for name in _ALPACA]))}."
    if prompt is not None and answer is not None:
        return _named([prompt, answer])
    if written := [texts[name] for name in _CHATS if name in texts]:
        return (
            f"Column {written[0]!r} holds text. If it is a chat written as JSON, parse it first (json.loads). To read "
            f"it as plain text: {_named(written[:1])}"
        )
    if texts:
        return _named([max(texts.values(), key=lambda name: len(row[name]))])
    if rows := [str(name) for name, value in row.items() if isinstance(value, list) and value]:
        return f"Column {rows[0]!r} holds a list: if it is one of rows, write that list alone to a file."
    return "None of them holds texts or chats."


def _named(names: Sequence[str]) -> str:
    return f"Give {argument('text_field', names)}."


def _template_of(names: Sequence[str]) -> str:
    return "\n".join(f"{{{name}}}" for name in names)


def _looks_like_a_chat(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and ({"role", "content"} <= first.keys() or {"from", "value"} <= first.keys())


def _names_of(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "nothing"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
