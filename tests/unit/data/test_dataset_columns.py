"""What a row of a dataset is read as, and what is said of one that cannot be read."""

from __future__ import annotations

from typing import Any

import pytest

from hf_posenc.data.columns import Columns
from hf_posenc.errors import add_flags, arguments_named_as_flags

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHAT = [USER, ASSISTANT]


def read(row: Any, text_field: Any = None, template: str | None = None) -> Any:
    return Columns(text_field, template).read(row, "line 3 of 'a.jsonl'")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a\r\nb", "messages": CHAT}, "a\nb"),
        ({"id": 1, "messages": CHAT}, {"messages": CHAT}),
        ({"messages": CHAT, "tools": "[]", "source": "x"}, {"messages": CHAT, "tools": "[]"}),
        ({"conversations": CHAT}, {"messages": CHAT}),
        ({"prompt": "p", "completion": "c", "id": 1}, {"prompt": "p", "completion": "c"}),
        ({"prompt": [USER], "completion": [ASSISTANT]}, {"prompt": [USER], "completion": [ASSISTANT]}),
        ({"prompt": "p", "messages": CHAT}, {"messages": CHAT}),
        ({"messages": []}, ""),
    ],
)
def test_columns_are_found_by_name(row: dict[str, Any], expected: Any) -> None:
    assert read(row) == expected


def test_columns_that_are_named() -> None:
    row = {"question": "q", "answer": "a", "text": "t", "dialog": CHAT}
    assert read(row, "question") == read(row, ["question"]) == "q"
    assert read(row, ["question", "answer"]) == {"prompt": "q", "completion": "a"}
    assert read(row, ["dialog"]) == {"messages": CHAT}


def test_a_template_ends_with_the_answer() -> None:
    row = {"question": "{q}", "answer": 42, "hint": "h"}
    whole = read(row, template="{hint}. Question: {question}\nAnswer: {answer}!")
    assert whole == {"prompt": "h. Question: {q}\nAnswer: ", "completion": "42!"}
    assert read(row, template="{{{question}}}") == {"prompt": "{", "completion": "{q}}"}


def test_chats_of_sharegpt_and_of_datasets() -> None:
    spoken = [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    assert read({"conversations": spoken}) == {"messages": [{"role": "system", "content": "S"}, *CHAT]}
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    filled_up = [{"role": "user", "content": parts, "tool_calls": None}, {**ASSISTANT, "name": None}]
    assert read({"messages": filled_up}) == {"messages": CHAT}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert read({"messages": [USER, calls]})["messages"][1] == {"role": "assistant", "tool_calls": calls["tool_calls"]}
    # Arrow gives every struct of a column the fields of all.
    wide = {"function": {"name": "f", "arguments": {"city": "Paris", "ticker": None}}}
    row = read({"messages": [USER, {**calls, "tool_calls": [wide]}], "tools": [{"name": "f", "strict": None}]})
    assert row["messages"][1]["tool_calls"] == [{"function": {"name": "f", "arguments": {"city": "Paris"}}}]
    assert row["tools"] == [{"name": "f"}]


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"Question": "q", "Answer": "a", "id": "1"}, "--text-field Question Answer"),
        ({"id": "17", "body": "a longer text", "n": 3}, "--text-field body"),
        ({"dialog": CHAT, "question": "q", "answer": "a"}, "--text-field dialog"),
        ({"the chat": [{"from": "human", "value": "v"}]}, "--text-field 'the chat'"),
        ({"instruction": "i", "input": "x", "output": "o"}, r"--template '{instruction}\n{input}\n{output}'"),
        ({"messages": '[{"role": "user"}]'}, "--text-field messages"),
        ({"messages": '[{"role": "user"}]'}, "If it is a chat written as JSON, parse it first (json.loads)."),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "--text-field prompt chosen"),
        ({"data": [{"text": "a"}]}, "Column 'data' holds a list: if it is one of rows, write that list alone to"),
        ({"n": 3}, "None of them holds texts or chats."),
    ],
)
def test_what_to_write_where_no_column_is_found(row: dict[str, Any], advice: str) -> None:
    refused = pytest.raises(ValueError, match=r"3.*'a\.jsonl'.*'text', 'messages'")
    with arguments_named_as_flags(), refused as raised:
        add_flags(("text_field", "template"))
        read(row)
    assert f"it has: {', '.join(row)}. " in str(raised.value)
    assert advice in str(raised.value)


@pytest.mark.parametrize(
    ("row", "text_field", "message"),
    [
        (
            {"messages": CHAT, "id": 1},
            "mesages",
            "unknown column 'mesages'. Did you mean 'messages'? Known: messages, id.",
        ),
        ({"n": 3, "question": "q", "answer": "a"}, "n", "column 'n' holds 3 (int), neither text nor a chat"),
        ({"n": 3, "question": "q", "answer": "a"}, "n", "Give text_field=['question', 'answer']."),
        ({"text": None}, None, "column 'text' holds None (NoneType)"),
        ({"a": "x", "b": CHAT}, ["a", "b"], "of columns 'a' and 'b' one holds text and the other a chat"),
        ({"messages": ["Hi"]}, None, "turn 1 in column 'messages' is 'Hi' (str). A chat is a list of messages: [{"),
        (
            {"messages": [USER, {"role": "assistant"}]},
            None,
            "turn 2 in column 'messages' has role, but a message has a",
        ),
        ({"messages": [{"content": "Hi"}]}, None, "turn 1 in column 'messages' has content, but a message has a role"),
        ({"messages": [{"role": 1, "content": "x"}]}, None, "but a message has a role and a content"),
        ({"messages": [{"role": "user", "content": 3}]}, None, "has the content 3 (int): only text can be read"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, None, "only text can be read"),
        ({"conversations": [{"from": "hunan", "value": "x"}]}, None, "unknown speaker 'hunan'. Did you mean 'human'?"),
        (["a"], None, "is no row of columns, but list: ['a'] (list)"),
    ],
)
def test_what_cannot_be_read(row: Any, text_field: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^line 3.*'a\.jsonl'") as raised:
        read(row, text_field)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text_field": ["a", "b", "c"]}, r"got 3: a, b, c. .* such as template='{a}\\n{b}\\n{c}'"),
        ({"text_field": []}, "got 0"),
        ({"text_field": "a", "template": "{a}"}, "give one of them"),
        ({"template": "no column"}, "names no column"),
        ({"template": "{a"}, "cannot be read"),
        ({"template": "{a.b:3}"}, "and nothing else"),
        ({"template": "{}"}, "and nothing else"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Columns(**settings)


def test_a_templates_column_that_is_missing() -> None:
    with pytest.raises(ValueError, match=r"'anser'\..*'answer'"):
        read({"question": "q", "answer": "a"}, template="{question} {anser}")
    with pytest.raises(ValueError, match="'answer'"):
        read({"answer": None}, template="{answer}")
