"""Chats and prompts with answers as token ids, and what of them counts: as TRL's own, and by hand."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from chats import PLAIN, TAGGED, turns
from hf_posenc.assets import tiny_model_path
from hf_posenc.data.examples import ExampleTokenizer
from hf_posenc.data.tokens import MaskedTokens
from hf_posenc.training.data import read_tokens
from tiny_llama import make_tiny_llama, make_tiny_tokenizer

assert PLAIN != TAGGED


CHATS: list[dict[str, Any]] = [
    {"messages": turns("Who wrote Emma?", "Jane Austen.", "And when?", "In 1815.")},
    {"messages": [{"role": "system", "content": "Be brief."}, *turns("Hello", " Hi  there")]},
]
WITH_TOOLS = [{"messages": turns("a", "b"), "tools": json.dumps([{"name": "search"}])}]
SHAREGPT = [
    {"conversations": [{"from": one["role"], "value": one["content"]} for one in chat["messages"]]} for chat in CHATS
]
PAIRS = [
    {"prompt": "Q: Who wrote Emma?\n", "completion": "Jane Austen."},
    {"prompt": "Q: When?\n", "completion": "1815"},
]
CHAT_PAIRS = [{"prompt": turns("Who?", "She.", "When?"), "completion": turns("", "In 1815.")[1:]}]


def make_tokenizer(template: str | None = TAGGED) -> PreTrainedTokenizerBase:
    """The embedded model's: BPE, with merges."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    tokenizer.chat_template = template
    return tokenizer


def tokens_of(documents: Any, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any) -> list[MaskedTokens]:
    found = read_tokens(ExampleTokenizer(make_tokenizer() if tokenizer is None else tokenizer, **options), documents)
    assert all(isinstance(one, MaskedTokens) for one in found)
    return found  # type: ignore[return-value]  # just looked


def rows_of(found: list[MaskedTokens]) -> list[tuple[list[int], list[int]]]:
    return [(one.ids.tolist(), one.ids.masked_fill(~one.counted, -100).tolist()) for one in found]


def by_trl(
    folder: Path, rows: list[dict[str, Any]], tokenizer: Any, **options: Any
) -> list[tuple[list[int], list[int]]]:
    """What TRL's SFTTrainer makes of each row, with its collator: ids and labels."""
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        output_dir=str(folder), max_length=None, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, **options
    )
    model = make_tiny_llama(vocab_size=len(tokenizer))
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    batches = [trainer.data_collator([row]) for row in trainer.train_dataset]
    return [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # TRL's own default
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (CHATS, {}),
        (CHATS, {"assistant_only_loss": True}),
        (WITH_TOOLS, {"assistant_only_loss": True}),
        (SHAREGPT, {}),  # which TRL takes for no chats where only the assistant is to count
        (PAIRS, {}),
        (PAIRS, {"completion_only_loss": False}),
        (CHAT_PAIRS, {}),
        (CHAT_PAIRS, {"assistant_only_loss": True, "completion_only_loss": False}),
    ],
    ids=["chats", "assistant", "tools", "sharegpt", "pairs", "whole-pairs", "chat-pairs", "assistant-in-pairs"],
)
def test_ids_and_labels_are_those_of_trl(tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any]) -> None:
    expected = by_trl(tmp_path, rows, make_tokenizer(), **options)
    assert rows_of(tokens_of(rows, **options)) == expected
    masked = [label == -100 for _, labels in expected for label in labels]
    assert not all(masked)
    assert any(masked) == (
        bool(options) if rows is not PAIRS and rows is not CHAT_PAIRS else options != {"completion_only_loss": False}
    )


def test_chats_of_sharegpt_are_masked_as_others() -> None:
    expected = tokens_of(CHATS, assistant_only_loss=True)
    assert rows_of(tokens_of(SHAREGPT, assistant_only_loss=True)) == rows_of(expected)


def test_a_template_that_does_not_say_which_tokens_are_the_assistants() -> None:
    rows = [
        *CHATS,
        *WITH_TOOLS,
        {"messages": [*turns("a", "b"), {"role": "assistant", "content": "c"}, *turns("d", "e")]},
    ]
    given, found = (
        rows_of(tokens_of(rows, make_tokenizer(template), assistant_only_loss=True)) for template in (TAGGED, PLAIN)
    )
    assert found == given
    assert all(-100 in labels and max(labels) > 0 for _, labels in found)


@pytest.mark.parametrize("first", ["Hello.", "A B", "", "  And"])
def test_a_chat_that_the_assistant_begins(first: str) -> None:
    """All that the template writes by itself before the first turn counted, a system prompt of its own for one."""
    chat = [{"messages": turns("", first, "Who?", "She.")[1:]}]
    start = "{{ '[system]\nYou are helpful.' + eos_token + '\n' }}"
    tagged, plain = (
        tokens_of(chat, make_tokenizer(start + template), assistant_only_loss=True)[0] for template in (TAGGED, PLAIN)
    )
    counted = make_tokenizer().decode(plain.ids[plain.counted])
    assert counted == make_tokenizer().decode(tagged.ids[tagged.counted])
    assert "[" not in counted
    assert first in counted


def test_tools_that_are_no_json_are_named() -> None:
    with pytest.raises(ValueError, match=r"0:.*'tools'.*JSON:"):
        tokens_of([{"messages": turns("a", "b"), "tools": "[search"}])
    (without,) = tokens_of([{"messages": turns("a", "b"), "tools": ""}])  # as a table writes that there are none
    assert rows_of([without]) == rows_of(tokens_of([{"messages": turns("a", "b")}]))


def test_the_assistants_tokens_by_hand() -> None:
    tokenizer = make_tiny_tokenizer()  # a token a character, so that they can be counted
    tokenizer.chat_template = PLAIN
    ((ids, labels),) = rows_of(
        tokens_of([{"messages": turns("ab", "cd", "e", "f")}], tokenizer, assistant_only_loss=True)
    )
    spelled = [tokenizer.decode([one]) for one in ids]
    assert "".join(spelled) == "[user]\nab<eos>\n[assistant]\ncd<eos>\n[user]\ne<eos>\n[assistant]\nf<eos>\n"
    counted = [one if label != -100 else "." for one, label in zip(spelled, labels, strict=True)]
    assert "".join(counted) == "." * 23 + "cd<eos>\n" + "." * 22 + "f<eos>\n"


@pytest.mark.parametrize("name", ["cohere", "gemma3", "lfm2", "llama3", "qwen3_instruct_2507", "smolvlm"])
def test_what_a_turn_adds_is_what_trl_marks_in_its_copies_of_published_templates(name: str) -> None:
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    files = [folder / f"{name}.jinja", folder / f"{name}_training.jinja"]
    if not all(file.is_file() for file in files):
        assert int(trl.__version__.partition(".")[0]) < 1  # which had few of them yet
        return
    published, marked = (file.read_text(encoding="utf-8") for file in files)
    assert not re.search("{%-? *generation", published)
    given, found = (
        rows_of(tokens_of(CHATS[:1], make_tokenizer(template), assistant_only_loss=True))
        for template in (marked, published)
    )
    assert found == given


def test_an_end_of_turn_that_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    """As in GLM's template, where the next speaker's token ends a turn; or with tags around too little."""
    tokens_of(CHATS, assistant_only_loss=True)
    assert not caplog.records
    of_the_next = (
        "{% for message in messages %}{{ ('' if loop.first else eos_token) + '[' + message['role'] + ']\n' }}"
        "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}{{ eos_token + '[assistant]\n' }}{% endif %}"
    )
    too_little = TAGGED.replace(
        "+ eos_token + '\n' }}{% endgeneration %}", "}}{% endgeneration %}{{ eos_token + '\n' }}"
    )
    assert too_little != TAGGED
    for template in (of_the_next, too_little):
        caplog.clear()
        tokens_of(CHATS * 2, make_tokenizer(template), assistant_only_loss=True)
        (said,) = caplog.messages
        assert said.startswith("document 0: '<|endoftext|>', with which a turn of the assistant ends, does not count")


@pytest.mark.parametrize(
    "template",
    [
        # as Qwen3's, which drops the thoughts of earlier turns
        PLAIN.replace("{{ message['content'] + ", "{{ ('<think>' if loop.last else '') + message['content'] + "),
        PLAIN.replace("{{ '[assistant]\n' }}", "{{ '[assistant]<think>' }}"),
    ],
)
def test_a_template_by_which_it_cannot_be_told_is_refused(template: str) -> None:
    assert template != PLAIN
    assert tokens_of(CHATS, make_tokenizer(template))  # all tokens count
    with pytest.raises(ValueError, match=r"0:.*\(--chat-templ"):
        tokens_of(CHATS, make_tokenizer(template), assistant_only_loss=True)


def test_a_template_whose_tags_hold_nothing_is_refused() -> None:
    broken = TAGGED.replace("message['role'] == 'assistant'", "message['role'] == 'model'")
    with pytest.raises(ValueError, match=r"0:.*{%.*%}"):
        tokens_of(CHATS, make_tokenizer(broken), assistant_only_loss=True)


def test_a_prompt_whose_last_token_grows_with_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer()
    prompt, answer = "The children went to the", "re at once."
    alone, whole = tokenizer(prompt)["input_ids"], tokenizer(prompt + answer)["input_ids"]
    assert alone[-1] != whole[len(alone) - 1]
    row = {"prompt": prompt, "completion": answer}
    (one, _) = tokens_of([row, row])
    assert one.ids.tolist() == [*whole, tokenizer.eos_token_id]
    assert one.counted.tolist() == [False] * (len(alone) - 1) + [True] * (len(whole) + 2 - len(alone))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2  # each once
    assert "'children" in caplog.text
    assert "the end of the prompt becomes other tokens where the answer follows (' the')" in caplog.text


def test_special_tokens_around_a_prompt() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tiny_tokenizer()
    bos = tokenizer.convert_tokens_to_ids("~")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=[("~", bos)])
    (one,) = tokens_of([{"prompt": "ab ", "completion": "c<eos>"}], tokenizer)
    assert tokenizer.decode(one.ids) == "~ab c<eos>"  # an EOS that is there is not doubled
    assert one.counted.tolist() == [False] * 4 + [True] * 2
    assert (
        read_tokens(ExampleTokenizer(tokenizer), ["ab"])[0].tolist()
        == tokenizer("ab", add_special_tokens=False)["input_ids"]
    )


def test_documents_without_anything_that_counts(caplog: pytest.LogCaptureFixture) -> None:
    silent = {"messages": turns("Hello?")}
    both = tokens_of([silent, *CHATS], assistant_only_loss=True)
    assert rows_of(both) == rows_of(tokens_of(CHATS, assistant_only_loss=True))
    assert "1 of 3 documents have no token that counts in the loss" in caplog.text
    for template in (TAGGED, PLAIN):
        with pytest.raises(ValueError, match="none of the 2 documents has a token that counts in the loss: no answers"):
            tokens_of([silent] * 2, make_tokenizer(template), assistant_only_loss=True)
    stream = (row for row in [silent, *CHATS])
    tokenize = ExampleTokenizer(make_tokenizer(), assistant_only_loss=True)
    assert rows_of(read_tokens(tokenize, stream, lambda read: False)) == rows_of(both)  # type: ignore[arg-type]  # masked
    with pytest.raises(ValueError, match="none of the 1 documents"):
        read_tokens(tokenize, iter([silent]), lambda read: False)


@pytest.mark.parametrize(
    ("document", "options", "message"),
    [
        ("text", {"assistant_only_loss": True}, "document 0 is no chat. Leave it out, or give chats"),
        (torch.tensor([1]), {"assistant_only_loss": True}, "document 0 is no chat"),
        (PAIRS[0], {"assistant_only_loss": True}, "document 0 is no chat"),
        ("text", {"completion_only_loss": True}, "document 0 has no prompt. Leave it out, or name the columns"),
        (CHATS[0], {"completion_only_loss": True}, "For chats there is assistant_only_loss"),
        ({"body": "b"}, {}, "it has: body.* rename the columns"),
        ({"messages": ["Hi"]}, {}, "document 0: turn 1 in column 'messages' is 'Hi'"),
    ],
)
def test_what_does_not_suit_the_documents(document: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokens_of([document], **options)


def test_no_chat_template_and_one_that_refuses() -> None:
    with pytest.raises(ValueError, match=r"\(--chat-template-path FILE,"):
        tokens_of(CHATS, make_tokenizer(None))
    picky = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + PLAIN
    with pytest.raises(
        ValueError, match=r"document 1: .* cannot render this chat: user first Its turns: system, user, as"
    ):
        tokens_of(CHATS, make_tokenizer(picky))


def test_long_chats_are_whole_and_nothing_is_said_about_length(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tiny_tokenizer()  # model_max_length 64
    tokenizer.chat_template = TAGGED
    with caplog.at_level(logging.WARNING):
        (one,) = tokens_of([{"messages": turns("a" * 300, "b" * 300)}], tokenizer, assistant_only_loss=True)
        (pair,) = tokens_of([{"prompt": "a" * 300 + "\n", "completion": "b" * 300}], tokenizer)
    assert (int(one.counted.sum()), int(pair.counted.sum())) == (302, 301)
    assert not caplog.records


def test_rows_with_a_text_and_what_is_no_document() -> None:
    tokenizer = make_tokenizer()
    (from_row,), (from_text,) = (read_tokens(ExampleTokenizer(tokenizer), [one]) for one in ({"text": "Emma"}, "Emma"))
    assert isinstance(from_row, torch.Tensor)
    assert from_row.equal(from_text)  # type: ignore[arg-type]  # a tensor as well
    with pytest.raises(
        TypeError, match="document 0 must be a text, a row of a dataset or a tensor of token ids, got int"
    ):
        ExampleTokenizer(tokenizer)(3, "document 0")
    with pytest.raises(TypeError, match="single document"):
        read_tokens(ExampleTokenizer(tokenizer), CHATS[0])  # type: ignore[arg-type]  # refused
