"""Numbers hidden in texts, and which of them a model finds."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attention_models import sharp_model
from hf_posenc import patch_model
from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.evaluation.lm_head import decoder_body
from hf_posenc.fitting.hidden_numbers import FITTED_ON, MEASURED_BY, HiddenNumber, hide_numbers
from hf_posenc.fitting.measuring import NumbersFound, measured_lengths, numbers_found
from model_types import sharp_model as sharp_type
from tiny_llama import make_tiny_tokenizer
from tiny_models import load_tiny, logits, token_ids


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    found: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tiny_model_path())
    return found


@pytest.fixture(scope="module")
def novel(words: PreTrainedTokenizerFast) -> torch.Tensor:
    return torch.tensor(words(load_novel(HELD_OUT_NOVEL)[30000:50000], add_special_tokens=False).input_ids)[:2000]


@pytest.mark.parametrize("sentence", [FITTED_ON, MEASURED_BY])
def test_every_number_is_where_it_is_said(words: PreTrainedTokenizerFast, novel: torch.Tensor, sentence: str) -> None:
    ids, hidden = hide_numbers(words, novel, 12, Random(1), sentence)
    assert ids.shape == novel.shape
    assert ids.dtype == torch.int64
    assert [number.end for number in hidden] == sorted(number.end for number in hidden)
    pattern = sentence.format(name=r"\w+", number=r"\d{5}") + "$"
    answers = set()
    for number in hidden:
        asked = words.decode(number.question + number.answer)
        assert re.fullmatch(r"\n" + pattern, asked)
        answer = words.decode(number.answer).strip()
        assert re.fullmatch(r"\d{5}", answer)
        assert words.decode(ids[: number.end].tolist()).endswith(f"{asked}.\n")
        answers.add(answer)
    assert len(answers) == 12
    # What is left is the text, from its beginning.
    text = words.decode(ids.tolist())
    rest = re.sub(r"\n" + pattern.replace("$", "") + r"\.\n", "", text)
    whole = words.decode(novel.tolist())
    assert len(rest) < len(whole) - 12 * 30
    assert whole.startswith(rest)
    assert torch.equal(hide_numbers(words, novel, 12, Random(1), sentence)[0], ids)
    assert not torch.equal(hide_numbers(words, novel, 12, Random(2), sentence)[0], ids)


def test_too_many_numbers(words: PreTrainedTokenizerFast, novel: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"100.*\d+.*500:"):
        hide_numbers(words, novel[:500], 100, Random(1))
    with pytest.raises(ValueError, match=r"100000.*\d+:"):
        hide_numbers(words, novel, 100_000, Random(1))


@pytest.mark.parametrize("family", ["Llama", "Mistral", "qwen3_next"])
def test_what_a_model_finds_is_what_whole_forwards_say(family: str) -> None:
    """Questions of several lengths; Mistral's window and recurrent layers keep the cache from being cut back."""
    settings = {"sliding_window": 48} if family == "Mistral" else {}
    model = sharp_model(family, **settings) if family[0].isupper() else sharp_type(family)
    if family == "Llama":
        patch_model(model, "ntk", 4)
    ids = token_ids(200)[0]
    generator = torch.Generator().manual_seed(4)
    hidden, wanted = [], []
    for at in range(10):
        question = torch.randint(3, 128, (3 + at % 4,), generator=generator).tolist()
        answer: list[int] = []
        for _ in range(3):  # greedy, by whole forwards without a cache
            whole = torch.tensor([[*ids.tolist(), *question, *answer]])
            answer.append(int(logits(model, whole)[0, -1].argmax()))
        right = at % 3 != 0
        if not right:  # one digit is another one; which one, varies
            answer[at % 2] = (answer[at % 2] + 1) % 128
        hidden.append(HiddenNumber(50, question, answer))
        wanted.append(float(right))
    read: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        read.append(kwargs["input_ids"].shape[1])

    decoder_body(model).register_forward_pre_hook(note, with_kwargs=True)
    assert numbers_found(model, ids, hidden) == wanted
    side_by_side = sum(len(one.question) + len(one.answer) - 1 for one in hidden)
    assert [count for count in read if count > 20] == ([200, side_by_side] if family == "Llama" else [200])


def test_the_tiny_model_reads_them_where_it_can(words: PreTrainedTokenizerFast) -> None:
    """Each score is that of a whole forward over text, question and answer."""
    model = load_tiny()
    text = torch.tensor(words(load_novel(HELD_OUT_NOVEL)[:2000], add_special_tokens=False).input_ids)[:220]
    ids, hidden = hide_numbers(words, text, 3, Random(5), MEASURED_BY)
    wanted = []
    for number in hidden:
        asked = torch.tensor([[*ids.tolist(), *number.question, *number.answer]])
        choices = logits(model, asked)[0, -len(number.answer) - 1 : -1].argmax(-1)
        wanted.append(float(choices.tolist() == number.answer))
    assert numbers_found(model, ids, hidden) == wanted


def test_a_share_with_its_interval() -> None:
    assert str(NumbersFound((1.0, 0.0, 1.0, 1.0), 1024)) == "3 of 4, 75% (30% to 95%)"  # Wilson 1927


@pytest.mark.parametrize(
    ("original", "target", "lengths"),
    [
        (256, 1024, [64, 128, 256, 512, 1024]),
        (8192, 32768, [512, 2048, 8192, 16384, 32768]),
        (8192, 20000, [512, 2048, 8192, 16384, 20000]),
        (64, 96, [16, 32, 64, 96]),
    ],
)
def test_measured_lengths(original: int, target: int, lengths: list[int]) -> None:
    assert measured_lengths(original, target) == lengths


def test_characters_as_tokens() -> None:
    """A tokenizer of one token a character needs more room, and says so by the same error."""
    tokenizer = make_tiny_tokenizer()
    ids, hidden = hide_numbers(tokenizer, torch.full((300,), 97), 3, Random(0))
    assert len(ids) == 300
    assert [len(number.answer) for number in hidden] == [6, 6, 6]  # with the space before it
