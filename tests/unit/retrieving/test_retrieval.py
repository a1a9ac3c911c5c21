"""Retrieval: prompts of exact size, both scores against Transformers' own, an oracle, chance, resuming, refusals."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_posenc import patch_model
from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.evaluation import perplexity, read_records
from hf_posenc.evaluation.intervals import Share, share_interval, student_quantile
from hf_posenc.evaluation.records import RetrievalRecord, read_retrieval_records
from hf_posenc.retrieving.haystack import read_haystack
from hf_posenc.retrieving.measuring_retrieval import retrieval
from hf_posenc.retrieving.prompts import PromptMaker
from hf_posenc.retrieving.scoring import Asked, Reply, replies
from oracles import Oracle
from tiny_llama import make_tiny_llama, make_tiny_tokenizer
from tiny_models import make_model

NOVEL = load_novel(HELD_OUT_NOVEL)[2000:40_000]
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def ask(model: Any, tokenizer: Any, lengths: list[int], **kwargs: Any) -> list[RetrievalRecord]:
    return retrieval(model, tokenizer, context_lengths=lengths, documents=[NOVEL], progress=False, **kwargs)


@pytest.mark.parametrize("chat", ["off", "on"])
@pytest.mark.parametrize("length", [200, 777, 2048])
def test_prompt_and_answer_fill_the_length_to_the_token(words: PreTrainedTokenizerFast, chat: Any, length: int) -> None:
    words.chat_template = CHAT
    maker = PromptMaker(words, read_haystack(words, [NOVEL]), chat)
    for depth in (0, 33, 100):
        (prompt,) = maker.make("passkey", length, depth, seed=3)
        assert len(prompt.ids) + prompt.max_new_tokens == length
        assert len(prompt.answer_ids) < prompt.max_new_tokens
        text = words.decode(prompt.ids)
        (key,) = prompt.answers
        assert re.fullmatch(r"[1-9]\d{4}", key)
        assert text.count(f"The pass key is {key}. Remember it. {key} is the pass key.") == 1
        assert text.endswith("What is the pass key?<eos>\n<|assistant|>\nThe pass key is") == (chat == "on")
        assert text.startswith("<|user|>\n") == (chat == "on")
        assert words.decode(prompt.answer_ids) == f" {key}"
        (positions,) = prompt.answer_positions
        assert words.decode([prompt.answer_ids[position] for position in positions]).strip() == key


def test_the_needle_lies_where_it_is_asked_to(words: PreTrainedTokenizerFast) -> None:
    maker = PromptMaker(words, read_haystack(words, [NOVEL]), "off")
    for seed in range(5):
        for depth in (0, 12.5, 50, 90, 100):
            (prompt,) = maker.make("passkey", 1500, depth, seed)
            (position,) = prompt.needle_places
            needle = words(
                f"\nThe pass key is {prompt.answers[0]}. Remember it. {prompt.answers[0]} is the pass key.\n"
            )
            stop = position + len(needle.input_ids)
            assert prompt.ids[position:stop] == needle.input_ids
            head = len(
                words(
                    "A pass key is hidden in the long text below. Find it and remember it. "
                    "You will be asked for it.\n\n"
                ).input_ids
            )
            tail = len(words("\n\nWhat is the pass key?\nThe pass key is").input_ids)
            free = len(prompt.ids) - head - tail - len(needle.input_ids)
            assert abs((position - head) - free * depth / 100) <= (0 if depth in (0, 100) else 32.5)
            before = words.decode(prompt.ids[head:position]).rstrip()
            assert depth in (0, 100) or before[-1] in ".!?\"')" or abs(position - head - free * depth / 100) <= 0.5


def test_a_haystack_of_white_space_holds_the_needle_alone() -> None:
    tokenizer = load_model(tiny_model_path())[1]
    maker = PromptMaker(tokenizer, read_haystack(tokenizer, ["\n \n" * 2000]), "off")
    ((prompt,), (other,)) = (maker.make("passkey", 400, depth, seed=3) for depth in (25, 75))
    assert len(prompt.ids) + prompt.max_new_tokens == 400
    (key,) = prompt.answers
    assert tokenizer.decode(prompt.ids).count(key) == 2
    assert len(tokenizer.decode(prompt.ids).split()) < 70  # needle, task and question
    assert 140 < other.needle_places[0] - prompt.needle_places[0] < 200
    with pytest.raises(ValueError, match="hold no text"):
        read_haystack(tokenizer, [""])


def test_a_prompt_begins_as_the_tokenizer_begins_a_text() -> None:
    tokenizer = make_tiny_tokenizer()
    haystack = read_haystack(tokenizer, [NOVEL])
    (plain,) = PromptMaker(tokenizer, haystack, "auto").make("passkey", 300, 50, 0)
    both = TemplateProcessing(single="<eos> $A <eos>", special_tokens=[("<eos>", 0)])
    tokenizer.backend_tokenizer.post_processor = both
    (begun,) = PromptMaker(tokenizer, haystack, "auto").make("passkey", 301, 50, 0)
    assert (begun.ids[0], begun.ids.count(0), plain.ids.count(0)) == (0, 1, 0)
    assert begun.ids[1:20] == plain.ids[:19]
    tokenizer.chat_template = CHAT  # it holds what special tokens there are
    assert PromptMaker(tokenizer, haystack, "auto").make("passkey", 400, 50, 0)[0].ids[0] != 0


def test_the_same_seed_gives_the_same_prompts(words: PreTrainedTokenizerFast) -> None:
    one, other = (PromptMaker(words, read_haystack(words, [NOVEL]), "off") for _ in range(2))
    other.make("passkey", 300, 0, 0)  # nothing is left over from another prompt
    requests = [("passkey", length, depth, seed) for length in (300, 500) for depth in (0, 50) for seed in (0, 1)]
    prompts = [one.make(*each)[0] for each in requests]
    assert prompts == [other.make(task, length, float(depth), seed)[0] for task, length, depth, seed in requests]
    assert len({prompt.answers for prompt in prompts}) == len(prompts)


def test_a_budget_too_small_is_refused_with_the_counts(words: PreTrainedTokenizerFast) -> None:
    maker = PromptMaker(words, read_haystack(words, [NOVEL]), "off")
    with pytest.raises(ValueError, match=r"'passkey'.*50.*\d+,") as caught:
        maker.make("passkey", 50, 50, 0)
    least = int(re.findall(r"at least (\d+)", str(caught.value))[0])
    assert len(maker.make("passkey", least, 50, 0)[0].ids) < least
    with pytest.raises(ValueError, match="not fit"):
        maker.make("passkey", least - 1, 50, 0)
    with pytest.raises(ValueError, match=r"\d{5}.*\d+"):
        maker.make("passkey", 50_000, 50, 0)


@pytest.mark.parametrize("prefill_chunk", [None, 100])
def test_an_oracle_scores_one(characters: PreTrainedTokenizerFast, prefill_chunk: int | None) -> None:
    model = make_tiny_llama(max_position_embeddings=1024)
    oracle = Oracle(model, characters)
    records = ask(model, characters, [400, 300], depths=[100, 0, 50], prefill_chunk=prefill_chunk)
    assert [(one.context_length, one.depth) for one in records] == [(n, d) for n in (300, 400) for d in (0, 50, 100)]
    for record in records:
        assert (record.score("forced"), record.score("written")) == (1, 1)
        assert (record.n_right, record.n_tokens) == (5, 5)
        assert record.written == f" {record.answers[0]}."
        assert record.nll_sum < 1e-6
    assert oracle.most_at_once == (prefill_chunk or 400 - records[-1].max_new_tokens)


def test_a_word_before_the_key_does_not_count(characters: PreTrainedTokenizerFast) -> None:
    """A model that would say "a 27611" has the digits right."""
    model = make_tiny_llama(max_position_embeddings=1024)
    Oracle(model, characters, lead="a ")
    (record,) = ask(model, characters, [300], depths=[50])
    assert record.written == f"a {record.answers[0]}."
    assert (record.num_forced, record.num_written) == (1, 1)


def test_a_random_model_scores_chance(characters: PreTrainedTokenizerFast) -> None:
    """Of a model that writes nothing but digits, one in ten is right, and no key."""
    torch.manual_seed(0)
    model = make_tiny_llama(max_position_embeddings=1024)
    digits = characters("0123456789").input_ids
    barred = torch.full((128,), -1e4)
    barred[digits] = 0.0
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 20 + barred)
    records = ask(model, characters, [260], depths=[0, 50, 100], samples=20)
    right, tokens = sum(record.n_right for record in records), sum(record.n_tokens for record in records)
    assert tokens == 300
    share = of_prompts([1.0] * right + [0.0] * (tokens - right))
    assert share.low < 0.1 < share.high
    assert sum(record.num_forced or 0 for record in records) == 0
    assert len({record.forced for record in records}) > 10  # it does not say the same of every prompt


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: make_model("Llama"),
    "yarn": lambda: patch_model(make_model("Llama"), "yarn", 4),
    "dynamic_yarn": lambda: patch_model(make_model("Llama"), "dynamic_yarn", 4),
    "window": lambda: make_model("Mistral", sliding_window=16),
    "gemma2": lambda: make_model("Gemma2"),
}


@pytest.mark.parametrize("prefill_chunk", [None, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_is_what_transformers_says(family: str, prefill_chunk: int | None) -> None:
    model = FAMILIES[family]()
    generator = torch.Generator().manual_seed(3)
    prompt, answer = (torch.randint(3, 128, (n,), generator=generator).tolist() for n in (90, 6))
    (got,) = replies(model, prompt, [Asked([], answer, 8)], prefill_chunk=prefill_chunk)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        whole = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0
        )
    losses = -logits.double().log_softmax(-1)[range(6), answer]
    assert got.choices == logits.argmax(-1).tolist()
    assert got.losses == pytest.approx(losses.tolist(), rel=1e-5)
    assert got.written == whole[0, len(prompt) :].tolist()
    stop = got.written[3]
    (ended,) = replies(model, prompt, [Asked([], answer, 8)], stop_ids=[stop])
    assert ended.written == got.written[: got.written.index(stop)]


def test_frequencies_that_depend_on_the_length_are_those_of_one_pass() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = make_model("Llama", rope_parameters=rope)
    prompt, answer = list(range(3, 103)), [5, 9, 7]
    (got,) = replies(model, prompt, [Asked([], answer, 2)])
    with torch.no_grad():
        logits = make_model("Llama", rope_parameters=rope)(input_ids=torch.tensor([prompt + answer]), use_cache=False)
    expected = -logits.logits[0, 99:-1].double().log_softmax(-1)[range(3), answer]
    assert got.losses == pytest.approx(expected.tolist(), rel=1e-5)
    with pytest.raises(ValueError, match=r"prefill_chunk.*rope_type 'dynamic'"):
        ask(model, make_tiny_tokenizer(), [300], prefill_chunk=64)


def test_a_rerun_asks_only_what_is_missing(
    characters: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = make_tiny_llama(max_position_embeddings=1024), tmp_path / "r.jsonl"
    whole = ask(model, characters, [260, 300], depths=[0, 100], output=output)
    lines = output.read_text().splitlines(keepends=True)
    assert read_retrieval_records(output) == whole
    output.write_text("".join(lines[:2]) + lines[2][:50])  # killed while it wrote the third
    requests: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Iterator[Reply]:
        requests.append(len(args[1]))
        return replies(*args, **kwargs)

    monkeypatch.setattr(sys.modules["hf_posenc.retrieving.measuring_retrieval"], "replies", counting)
    again = ask(model, characters, [260, 300], depths=[0, 100], output=output)

    def bare(records: list[RetrievalRecord]) -> list[RetrievalRecord]:
        return [dataclasses.replace(record, seconds=0, peak_memory_bytes=0) for record in records]

    assert bare(again) == bare(whole)
    assert len(requests) == 2
    assert read_retrieval_records(output) == again
    with torch.no_grad():
        model.lm_head.weight[5] += 1
    ask(model, characters, [260], depths=[0], output=output)
    assert len(requests) == 3


def test_both_kinds_of_records_may_share_a_file(characters: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model, output = make_tiny_llama(max_position_embeddings=1024), tmp_path / "r.jsonl"
    (number,) = perplexity(model, [NOVEL], [64], tokenizer=characters, output=output, progress=False)
    (record,) = ask(model, characters, [260], depths=[50], output=output)
    assert read_records(output) == [number]
    assert read_retrieval_records(output) == [record]
    assert ask(model, characters, [260], depths=[50], output=output) == [record]
    assert perplexity(model, [NOVEL], [64], tokenizer=characters, output=output, progress=False) == [number]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tasks": ["passkeys"]}, r"unknown task 'passkeys'\. Did you mean 'passkey'\? Known: babilong_qa1, "),
        ({"tasks": []}, "tasks is empty"),
        ({"depths": [101]}, "percentage from 0 .* to 100, got 101"),
        ({"depths": [float("nan")]}, "got nan"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"chat": "on"}, "no chat template. Pass chat='off'"),
        ({"chat": "yes"}, "chat must be auto, on or off, got 'yes'"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(characters: PreTrainedTokenizerFast, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(make_tiny_llama(), characters, [300], **kwargs)
    with pytest.raises(ValueError, match="context_lengths is empty"):
        ask(make_tiny_llama(), characters, [])
    with pytest.raises(TypeError, match=r"\['passkey'\]"):
        ask(make_tiny_llama(), characters, [300], tasks="passkey")


def test_an_interval_over_texts_holds_the_truth_as_often_as_it_says() -> None:
    """Answers whose texts differ, from beta-binomials, and each text's own Wilson interval, which is too narrow."""
    rng, held, naive = Random(0), 0, 0
    for _ in range(300):
        scores, texts = [], []
        for text in range(5):
            chance = rng.betavariate(0.6 * 4, 0.4 * 4)  # correlation 0.2 within a text
            scores += [float(rng.random() < chance) for _ in range(30)]
            texts += [text] * 30
        share = share_interval(scores, texts)
        held += share.low <= 0.6 <= share.high
        share = of_prompts(scores)
        naive += share.low <= 0.6 <= share.high
    assert held / 300 > 0.93
    assert naive / 300 < 0.75


def test_an_interval_of_questions_depends_on_how_they_share_texts() -> None:
    scores = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    alone = of_prompts(scores)
    assert (alone.counted, alone.is_over) == ("8 prompts", "prompts")
    one = share_interval(scores, [0] * 8)
    assert (one.low, one.high) == (alone.low, alone.high)
    assert (one.counted, one.is_over) == ("8 questions in 1 text", "the questions of one text")
    two = share_interval(scores, [0] * 4 + [1] * 4)
    assert (two.counted, two.is_over) == ("8 questions in 2 texts", "texts")
    # 3 of 4 and 2 of 4: less apart than by chance, so each question counts, with Student's quantile of one degree
    for bound in (two.low, two.high):
        assert abs(5 / 8 - bound) == pytest.approx(12.7062 * math.sqrt(bound * (1 - bound) / 8), rel=1e-4)
    uneven = share_interval([1, 1, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1, 2])
    # 4 of 4, 0 of 2 and 1 of 1 around 5 of 7: 3/2 ((8/7)^2 + (10/7)^2 + (2/7)^2) / 49, over 5/7 2/7 / 7
    effect = 1.5 * (64 + 100 + 4) / 49 / 49 / (5 / 7 * 2 / 7 / 7)
    for bound in (uneven.low, uneven.high):
        error = 4.30265 * math.sqrt(bound * (1 - bound) / (7 / effect))
        assert abs(5 / 7 - bound) == pytest.approx(error, rel=1e-4)
    right = share_interval([1.0] * 40, [at // 10 for at in range(40)])
    assert right.low == pytest.approx(1 / (1 + 3.18245**2 / 40), rel=1e-3)
    assert right.high == 1
    with pytest.raises(ValueError, match="least one"):
        share_interval([], [])


def test_students_quantiles_are_those_of_tables() -> None:
    for degrees, value in ((1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)):
        assert student_quantile(degrees) == pytest.approx(value, rel=2e-3)


def of_prompts(scores: Sequence[float]) -> Share:
    """Each with a text of its own, so that the interval is Wilson's."""
    return share_interval(scores, range(len(scores)))


def test_wilson_intervals_solve_their_equation() -> None:
    """The bounds are the shares p with |share - p| = z sqrt(p (1 - p) / n)."""
    for right, count in ((3, 4), (0, 5), (5, 5), (17, 40)):
        share = of_prompts([1.0] * right + [0.0] * (count - right))
        for bound in (share.low, share.high):
            error = 1.959964 * math.sqrt(bound * (1 - bound) / count)
            assert abs(right / count - bound) == pytest.approx(error, abs=1e-9)
    assert of_prompts([1.0] * 5).high == 1
    assert of_prompts([0.5, 0.5]) == of_prompts([1.0, 0.0])
