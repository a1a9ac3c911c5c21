"""Several questions of one text: each reply is that of a forward of its own, each question like any other."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_posenc import patch_model
from hf_posenc.assets import HELD_OUT_NOVEL, load_novel
from hf_posenc.cli.main import main
from hf_posenc.evaluation.losses import length_dependent_rope_types, reset_dynamic_frequencies
from hf_posenc.evaluation.records import RetrievalRecord, read_retrieval_records
from hf_posenc.retrieving.measuring_retrieval import retrieval
from hf_posenc.retrieving.prompts import PromptMaker
from hf_posenc.retrieving.scoring import Asked, replies
from hf_posenc.retrieving.tasks import register_task, tasks
from hf_posenc.retrieving.tasks.base import PEOPLE, Puzzle, Question
from model_types import rotary_types, sharp_model, sharpened
from oracles import Oracle, solve
from task_solvers import OF_FEW, UNUSED
from tiny_llama import make_tiny_llama
from tiny_models import make_model

NOVEL = load_novel(HELD_OUT_NOVEL)[2000:60_000]
ASCII = "".join(one for one in NOVEL if one.isascii())
SEVERAL = [name for name, task in tasks().items() if task.several_questions]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: make_model("Llama"),
    "window": lambda: make_model("Mistral", sliding_window=16),
    "gemma2": lambda: make_model("Gemma2"),
    "recurrent": lambda: sharp_model("qwen3_next"),
    "length-dependent": lambda: make_model("Llama", rope_parameters=DYNAMIC),
    **{
        method: lambda method=method: patch_model(make_model("Llama"), method, 4)
        for method in ("yarn", "dynamic", "dynamic_yarn", "dca", "rerope", "leaky_rerope", "self_extend")
    },
    "staged window": lambda: patch_model(make_model("Gemma2"), "dynamic_yarn", 4),
    "scope=sequence": lambda: patch_model(make_model("Llama"), "dynamic", 4, scope="sequence"),
}
NEEDLE = (
    r"The pass key of|One of the secret (?:numbers|codes) of|VAR \w{5} = |, \"[\w-]{36}\":|\w{6} -> \w{6}|"
    r"User: Write a|(?:" + "|".join(PEOPLE) + ") "
)
OWN_PASS = ("length-dependent", "scope=sequence")


def ask(model: Any, tokenizer: Any, lengths: list[int], **kwargs: Any) -> list[RetrievalRecord]:
    return retrieval(model, tokenizer, context_lengths=lengths, documents=[ASCII], progress=False, **kwargs)


def count_fed(model: PreTrainedModel) -> list[int]:
    """Return a list that the number of tokens of each forward is added to."""
    fed: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return fed


# ---- what a model replies ----


def expected_losses(model: PreTrainedModel, prompt: list[int], one: Asked) -> list[float]:
    """Return the losses of one forward of everything."""
    with torch.no_grad():
        reset_dynamic_frequencies(model)
        logits = model(input_ids=torch.tensor([prompt + one.answer_ids]), use_cache=False).logits[0]
        reset_dynamic_frequencies(model)
    rows = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
    found: list[float] = (-rows[range(len(one.answer_ids)), one.answer_ids]).tolist()
    return found


def expected_reply(model: PreTrainedModel, prompt: list[int], one: Asked) -> tuple[list[float], list[int]]:
    """Return the losses of one forward of everything, and what ``generate`` writes."""
    losses = expected_losses(model, prompt, one)
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=one.max_new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return losses, whole[0, len(prompt) :].tolist()


def some_questions(model: PreTrainedModel, text: list[int], generator: torch.Generator) -> list[Asked]:
    """Return questions of several lengths: answered wrong at once, right to the end, and right for two tokens."""

    def ids(count: int) -> list[int]:
        return torch.randint(3, 128, (count,), generator=generator).tolist()

    questions = [ids(count) for count in (7, 1, 4)]
    answers = [ids(4)]
    for question, kept in zip(questions[1:], (4, 2), strict=True):
        _, written = expected_reply(model, text + question, Asked([], [0], 4))
        other = [(token + 1) % 128 for token in written]
        answers.append(written[:kept] + other[kept:])
    return [Asked(question, answer, 9) for question, answer in zip(questions, answers, strict=True)]


@pytest.mark.filterwarnings("ignore:dynamic with scope='sequence'")
@pytest.mark.parametrize("prefill_chunk", [None, 23])
@pytest.mark.parametrize("name", MODELS)
def test_each_reply_is_that_of_a_forward_of_its_own(name: str, prefill_chunk: int | None) -> None:
    model = sharpened(MODELS[name]())
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(3, 128, (150,), generator=generator).tolist()  # over two stages or regions, and windows
    asked = some_questions(model, text, generator)
    fed = count_fed(model)
    got = list(replies(model, text, asked, prefill_chunk=prefill_chunk))
    assert bool(length_dependent_rope_types(model)) == (name in OWN_PASS)
    assert sum(fed) < (len(text) + 80 if name not in OWN_PASS else 10**9)
    for one, reply in zip(asked, got, strict=True):
        losses, written = expected_reply(model, text + one.question_ids, one)
        assert reply.losses == pytest.approx(losses, abs=1e-5, rel=0)
        assert reply.written == written
    right = [one.choices == asked[at].answer_ids for at, one in enumerate(got)]
    assert right == [False, True, False] or name in OWN_PASS
    again = list(replies(model, text, asked[::-1], prefill_chunk=prefill_chunk))[::-1]
    assert [one.written for one in again] == [one.written for one in got]


@pytest.mark.parametrize("name", ["llama", "eager", "yarn", "window", "gemma2", "recurrent", "dca", "dynamic_yarn"])
def test_questions_are_fed_side_by_side_where_a_mask_can_part_them(name: str) -> None:
    """Many questions of a text, those of a group of rows in one forward: their number does not change a reply."""
    eager = {"eager": lambda: make_model("Llama", attn_implementation="eager")}
    model = sharpened({**MODELS, **eager}[name]())
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(3, 128, (90,), generator=generator).tolist()
    asked = some_questions(model, text, generator)
    side_by_side = name in ("llama", "eager", "yarn")
    asked *= 60 if side_by_side else 4  # of more rows than fit into one forward; one after the other takes long
    fed = count_fed(model)
    got = list(replies(model, text, asked))
    assert (len(fed) < len(asked)) is side_by_side
    assert max(fed[1:]) <= (1024 if side_by_side else 10)
    for one, reply in zip(asked, got, strict=True):
        (alone,) = replies(model, text + one.question_ids, [dataclasses.replace(one, question_ids=[])])
        assert reply.losses == pytest.approx(alone.losses, abs=1e-5, rel=0)
        assert (reply.choices, reply.written) == (alone.choices, alone.written)


# No retrieval: without a head of its own (Llama 4), with a cache of its own or none (BEAM, Blt, MiniMax, Mllama), or,
# with as few layers as here, without the attention layer that Transformers asks for the length (RecurrentGemma).
NOT_ASKED = {"beam", "blt", "llama4", "llama4_text", "minimax", "mllama", "recurrent_gemma"}


@pytest.mark.slow  # two minutes
@pytest.mark.filterwarnings("ignore")  # of Transformers, about tiny configs
def test_every_model_type_parts_questions_by_the_mask_it_is_given() -> None:
    apart = {}
    for model_type in sorted({*rotary_types()} - NOT_ASKED):
        model = sharp_model(model_type)
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(3, 100, (60,), generator=generator).tolist()
        drawn = [torch.randint(3, 100, (count,), generator=generator).tolist() for count in (10, 4, 7)]
        asked = [Asked(ids[:-3], ids[-3:]) for ids in drawn]
        wanted = [expected_losses(model, text + one.question_ids, one) for one in asked]
        fed = count_fed(model)
        got = list(replies(model, text, asked))
        if len(fed) == 2:
            apart[model_type] = max(
                abs(found - loss)
                for reply, losses in zip(got, wanted, strict=True)
                for found, loss in zip(reply.losses, losses, strict=True)
            )
    assert len(apart) > 50
    assert max(apart.values()) < 1e-5


def test_a_greedy_answer_ends_where_it_should() -> None:
    model = make_model("Llama")
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(3, 128, (40,), generator=generator).tolist()
    asked = some_questions(model, text, generator)
    full = [one.written for one in replies(model, text, asked)]
    for most in (0, 1, 3):
        short = [dataclasses.replace(one, max_new_tokens=most) for one in asked]
        assert [one.written for one in replies(model, text, short)] == [written[:most] for written in full]
    for stop in (full[0][0], full[1][2], full[2][5]):
        ended = [written[: written.index(stop)] if stop in written else written for written in full]
        assert [one.written for one in replies(model, text, asked, stop_ids=[stop])] == ended
    six = [dataclasses.replace(one, is_done=lambda written: len(written) >= 6) for one in asked]
    done = [one.written for one in replies(model, text, six)]
    assert [written[:6] for written in full] == [written[:6] for written in done]
    assert all(len(written) == 6 for written in done)


# ---- what a text holds ----


@pytest.mark.parametrize("task", SEVERAL)
def test_every_question_of_a_text_follows_from_it(
    maker: PromptMaker, words: PreTrainedTokenizerFast, task: str
) -> None:
    prompts = maker.make(task, 4000, None, 3, 12)
    assert prompts == maker.make(task, 4000, 50, 3, 12)  # a depth does not matter
    assert [prompt.question for prompt in prompts] == list(range(12))
    assert len({tuple(prompt.question_ids) for prompt in prompts}) == 12
    assert task in OF_FEW or len({prompt.answers for prompt in prompts}) == 12
    used = [len(prompt.ids) + prompt.max_new_tokens for prompt in prompts]
    assert 4000 - UNUSED[task] <= max(used) <= 4000
    for one in prompts:
        assert one.text_ids is prompts[0].text_ids
        found = solve(words.decode(one.ids).rpartition("\n")[0])
        assert (found == list(one.answers)) if one.ordered else (set(found) == set(one.answers))
        for position in one.needle_places:
            line = words.decode(one.ids[position : position + 40]).lstrip("\n")
            assert re.match(NEEDLE, line)


@pytest.mark.parametrize("task", ["passkey", "niah_single_2", "niah_multikey_1"])
def test_needles_lie_in_equal_parts_of_the_text(maker: PromptMaker, words: PreTrainedTokenizerFast, task: str) -> None:
    count = 20
    depths = set()
    for seed in range(3):
        prompts = maker.make(task, 6000, None, seed, count)
        found = [prompt.depth for prompt in prompts if prompt.depth is not None]
        assert len(found) == count
        assert found == sorted(found)
        slack = 100 * 32.5 / 4500  # to the end of a sentence
        if task != "niah_multikey_1":  # whose distractors have parts of their own
            for part, depth in enumerate(found):
                assert 100 * part / count - slack <= depth <= 100 * (part + 1) / count + slack
        for one in prompts:
            (place,) = one.needle_places
            assert one.answers[0] in words.decode(one.ids[place : place + 60])
            assert place / len(one.text_ids) == pytest.approx((one.depth or 0) / 100, abs=0.03)
        depths |= {*found}
    assert len(depths) > count  # and not at the same places of them


def test_the_lines_of_a_chain_keep_their_order(maker: PromptMaker) -> None:
    prompts = maker.make("vt", 4000, None, 0, 8)
    assert all(list(prompt.needle_places) == sorted(prompt.needle_places) for prompt in prompts)
    mixed = sorted((place, prompt.question) for prompt in prompts for place in prompt.needle_places)
    assert sum(one != other for (_, one), (_, other) in pairwise(mixed)) > 20


@pytest.fixture
def of_lines() -> Iterator[str]:
    """A task whose text is a list of its own lines, as dictionaries are."""

    @register_task("of_lines", has_depth=True, source="this test", several_questions=True)
    def of_lines(rng: Random, context_length: int, num_questions: int) -> Puzzle:
        """Values of keys."""
        numbers = rng.sample(range(10_000, 100_000), num_questions)
        last = 10**9 if context_length < 5000 else 30
        return Puzzle(
            instruction="Here are entries.",
            questions=tuple(
                Question(f"What is entry {n}?", "It is", (str(2 * n),), needles=(at,)) for at, n in enumerate(numbers)
            ),
            needles=tuple(f"entry {n} is {2 * n}" for n in numbers),
            lines=lambda: (f"other {number} is {3 * number}" for number in range(last)),
        )

    yield "of_lines"
    del tasks()["of_lines"]


def test_needles_are_hidden_among_the_lines_of_a_task(
    maker: PromptMaker, words: PreTrainedTokenizerFast, of_lines: str
) -> None:
    for depth in (0, 40, 100):
        (one,) = maker.make(of_lines, 2000, depth, 0)
        lines = words.decode(one.text_ids).partition("\n\n")[2].splitlines()
        (at,) = [at for at, line in enumerate(lines) if not line.startswith("other")]
        assert lines[at] == f"entry {int(one.answers[0]) // 2} is {one.answers[0]}"
        assert lines[:at] + lines[at + 1 :] == [f"other {number} is {3 * number}" for number in range(len(lines) - 1)]
        assert at / (len(lines) - 1) == pytest.approx(depth / 100, abs=0.05)  # of lines, which are longer later on
        assert 0 <= 2000 - len(one.ids) - one.max_new_tokens < 20
    prompts = maker.make(of_lines, 2000, None, 0, 9)
    assert [round(prompt.depth or 0) // 11 for prompt in prompts] == pytest.approx(range(9), abs=1)
    with pytest.raises(ValueError, match=r"\d+.*\d+"):
        maker.make(of_lines, 6000, 0, 0)


# ---- what is measured ----


@pytest.mark.parametrize("task", SEVERAL)
def test_an_oracle_scores_one_on_every_question(characters: PreTrainedTokenizerFast, task: str) -> None:
    model = make_tiny_llama(max_position_embeddings=8192)
    Oracle(model, characters)
    fed = count_fed(model)
    records = ask(model, characters, [2500], tasks=[task], questions=3, samples=2, prefill_chunk=1000)
    assert [(record.seed, record.question, record.questions_per_text) for record in records] == [
        (seed, question, 3) for seed in (0, 1) for question in range(3)
    ]
    assert [record.score("written") for record in records] == [1] * 6
    assert [record.score("forced") for record in records] == [None if task == "niah_multivalue" else 1] * 6
    assert {record.depth is not None for record in records} == {len(record.needle_places) == 1 for record in records}
    assert not tasks()[task].has_depth or records[0].depth is not None
    assert len({record.text for record in records}) == len({record.shared_text for record in records}) == 2
    assert len({record.text_hash for record in records}) == len({record.run_key for record in records}) == 6
    assert sum(fed) < 2 * 2500 + 6 * 800


@pytest.mark.parametrize(("tail", "right"), [(".", 1), ("0.", 0)])
def test_writing_goes_on_until_the_answer_has_ended(characters: PreTrainedTokenizerFast, tail: str, right: int) -> None:
    """A model that writes "123450" has every digit right, and has not written 12345."""
    model = make_tiny_llama(max_position_embeddings=2048)
    Oracle(model, characters, tail=tail + " And so on.")
    records = ask(model, characters, [1000], questions=2)
    assert [(record.num_forced, record.num_written) for record in records] == [(1, right)] * 2
    for one in records:
        assert one.written == f" {one.answers[0]}{'.' if right else tail + ' And so on.'}"


def test_a_text_is_read_again_only_for_questions_that_are_missing(
    characters: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model, output = make_tiny_llama(max_position_embeddings=2048), tmp_path / "r.jsonl"
    wanted: dict[str, Any] = {"questions": 4, "samples": 3, "output": output}
    whole = ask(model, characters, [1000], **wanted)
    assert read_retrieval_records(output) == whole
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:6]) + lines[6][:50])  # killed while it wrote the third of the second text
    fed = count_fed(model)
    again = ask(model, characters, [1000], **wanted)

    def bare(records: list[RetrievalRecord]) -> list[RetrievalRecord]:
        return [dataclasses.replace(record, seconds=0, peak_memory_bytes=0, nll_sum=0) for record in records]

    assert bare(again) == bare(whole)
    # Fewer questions side by side are other matrix products, which some CPUs round otherwise.
    assert [record.nll_sum for record in again] == pytest.approx([record.nll_sum for record in whole], rel=1e-6)
    assert read_retrieval_records(output) == again
    assert sum(count > 500 for count in fed) == 2
    fed.clear()
    assert ask(model, characters, [1000], **wanted) == again
    assert sum(count > 500 for count in fed) == 0
    single = ask(model, characters, [1000], depths=[50], output=output)
    assert (single[0].questions_per_text, single[0].shared_text, single[0].text) == (1, "", single[0].text_hash)


def test_records_of_before_are_read(characters: PreTrainedTokenizerFast) -> None:
    (record,) = ask(make_tiny_llama(max_position_embeddings=512), characters, [300], depths=[50])
    values = dataclasses.asdict(record)
    for name in ("questions_per_text", "question", "shared_text"):
        del values[name]
    assert RetrievalRecord.from_values(values) == record


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tasks": ["vt", "cwe"]}, r"3 questions of one text were requested, and task 'cwe' has one\. .* samples .*vt"),
        (
            {"depths": [0, 50]},
            r"depths cannot be used with several questions of one text: .* Leave depths or questions",
        ),
        ({"questions": 0}, "questions must be at least 1, got 0"),
        ({"questions": 40}, r"does not fit into 900 tokens: instruction, 40 needles .* at least \d+, or ask fewer"),
        ({"questions": 9000}, r"9000 keys of two words are wanted, and there are words for \d+"),
    ],
)
def test_what_cannot_be_is_refused(characters: PreTrainedTokenizerFast, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(make_tiny_llama(), characters, [900], **{"questions": 3, **kwargs})


def test_the_command_asks_and_refuses_before_a_model_is_loaded(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, book = tmp_path / "r.jsonl", tmp_path / "book.txt"
    book.write_text(ASCII)
    argv = ["eval", str(tiny_checkpoint), "--tasks", "passkey", "--documents", str(book), "--hide-progress"]
    argv += ["--context-lengths", "1000"]
    assert main([*argv, "--questions", "5", "--samples", "2", "--output", str(output)]) == 0
    records = read_retrieval_records(output)
    assert [(record.seed, record.question) for record in records] == [(seed, at) for seed in (0, 1) for at in range(5)]
    monkeypatch.setattr("hf_posenc.checkpoint.loading.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    capsys.readouterr()
    for more, message in (
        (["--questions", "500"], "does not fit into 1000 tokens: instruction, 500 needles and question take"),
        (["--questions", "2", "--depths", "10"], "--depths cannot be used with several questions of one text"),
        (["--questions", "2", "--tasks", "fwe"], "2 questions of one text were requested, and task 'fwe' has one"),
    ):
        assert main([*argv, *more]) == 2
        assert message in capsys.readouterr().err
