"""Chat templates that write the date: what we render is the same on every day, and what Transformers writes on one."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from chats import PLAIN, TAGGED, turns
from hf_posenc.data.examples import ExampleTokenizer
from hf_posenc.data.tokens import MaskedTokens
from hf_posenc.retrieving.haystack import read_haystack
from hf_posenc.retrieving.prompts import PromptMaker
from hf_posenc.utils.chat_templates import with_fixed_date
from tiny_llama import make_tiny_tokenizer

# As Llama 3 and Mistral ask for it, and a line break with which the template begins.
DATED = (
    "\n{{ strftime_now('%d %b %Y') }} {% set year = strftime_now('%y')|int %}{{ year }} "
    "{{ strftime_now('%A, %B %m') }}\n"
)


def on(monkeypatch: pytest.MonkeyPatch, day: datetime.date) -> None:
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(day.year, day.month, day.day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


def dated(template: str) -> PreTrainedTokenizerBase:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = DATED + template
    return tokenizer


def test_the_fixed_date_is_what_transformers_writes_on_that_day(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, template = dated(PLAIN), DATED + PLAIN
    on(monkeypatch, datetime.date(2024, 7, 26))
    then = tokenizer.apply_chat_template(turns("Hello"), tokenize=False)
    assert "2024 24" in str(then)
    on(monkeypatch, datetime.date(2026, 11, 1))
    assert tokenizer.apply_chat_template(turns("Hello"), tokenize=False) != then
    fixed = tokenizer.apply_chat_template(turns("Hello"), tokenize=False, chat_template=with_fixed_date(template))
    assert fixed == then
    assert with_fixed_date(PLAIN) == PLAIN


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_training_data_and_prompts_do_not_change_with_the_day(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    tokenizer = dated(template)
    found = []
    for day in (1, 2):
        on(monkeypatch, datetime.date(2026, 11, day))
        made = ExampleTokenizer.of_dialogues(tokenizer)({"messages": turns("Where?", "Here.")}, "a dialogue")
        haystack = read_haystack(tokenizer, ["It was a dark night. " * 200])
        prompts = PromptMaker(tokenizer, haystack, "on").make("passkey", 400, 50, 0)
        assert isinstance(made, MaskedTokens)
        found.append((made.ids.tolist(), made.counted.tolist(), prompts))
    assert found[0] == found[1]
