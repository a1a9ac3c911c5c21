"""RULER's tasks: what their prompts hold, by a solver that reads nothing else, and an oracle's scores."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from transformers import PreTrainedTokenizerFast

from hf_posenc.assets import HELD_OUT_NOVEL, load_novel
from hf_posenc.cli.main import main
from hf_posenc.evaluation.records import read_retrieval_records
from hf_posenc.retrieving.measuring_retrieval import retrieval
from hf_posenc.retrieving.prompts import Prompt, PromptMaker
from hf_posenc.retrieving.tasks import get_task, register_task, tasks
from hf_posenc.retrieving.tasks.base import Puzzle, Question, has_words, num_written, vocabulary
from oracles import Oracle, solve
from task_solvers import OF_FEW, UNUSED
from tiny_llama import make_tiny_llama, make_tiny_tokenizer

NOVEL = load_novel(HELD_OUT_NOVEL)[2000:60_000]
NUM_ANSWERS = dict.fromkeys(tasks(), 1) | {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}
NUM_ANSWERS |= {"graph_bfs": 4, "graph_parents": 3, "mrcr": 4}
NUM_NEEDLES = {
    "passkey": 1,
    "niah_single_2": 1,
    "niah_multikey_1": 4,
    "niah_multivalue": 4,
    "niah_multiquery": 4,
    "vt": 5,
}


def make(maker: PromptMaker, task: str, length: int, seed: int, depth: float = 50) -> Prompt:
    return maker.make(task, length, depth if tasks()[task].has_depth else None, seed)[0]


@pytest.mark.parametrize("length", [2000, 5000])
@pytest.mark.parametrize("task", tasks())
def test_the_answer_follows_from_the_text_alone(
    maker: PromptMaker, words: PreTrainedTokenizerFast, task: str, length: int
) -> None:
    prompts = [make(maker, task, length, seed) for seed in range(4)]
    for prompt in prompts:
        text = words.decode(prompt.ids)
        found = solve(text.rpartition("\n")[0])  # without the beginning of the answer
        assert (found == list(prompt.answers)) if prompt.ordered else (set(found) == set(prompt.answers))
        assert len(prompt.answers) == len(set(prompt.answers)) == NUM_ANSWERS[task]
        assert words.decode(prompt.answer_ids) == " " + ", ".join(prompt.answers)
        for positions, answer in zip(prompt.answer_positions, prompt.answers, strict=True):
            assert words.decode([prompt.answer_ids[position] for position in positions]).strip() == answer
    assert len({tuple(prompt.ids) for prompt in prompts}) == 4
    assert task in OF_FEW or len({prompt.answers for prompt in prompts}) == 4
    assert prompts == [make(maker, task, length, seed) for seed in range(4)]


@pytest.mark.parametrize("task", tasks())
def test_prompts_fill_their_budget_and_never_pass_it(maker: PromptMaker, task: str) -> None:
    for length in (1500, 1777, 4096, 6000):
        prompt = make(maker, task, length, seed=1)
        unused = length - len(prompt.ids) - prompt.max_new_tokens
        assert 0 <= unused <= UNUSED[task]
        assert len(prompt.answer_ids) < prompt.max_new_tokens


@pytest.mark.parametrize("task", NUM_NEEDLES)
def test_needles_are_all_there_at_their_places(maker: PromptMaker, words: PreTrainedTokenizerFast, task: str) -> None:
    spread = set()
    for seed in range(6):
        prompt = make(maker, task, 3000, seed, depth=70)
        assert len(prompt.needle_places) == NUM_NEEDLES[task]
        for position in prompt.needle_places:
            line = words.decode(prompt.ids[position : position + 40]).split("\n")[1]
            assert re.match(r"The pass key is|One of the secret numbers of|VAR \w{5} = ", line)
        if tasks()[task].has_depth:
            assert abs(prompt.needle_places[0] / 3000 - 0.7) < 0.08
        else:
            assert list(prompt.needle_places) == sorted(prompt.needle_places)
        spread |= {round(4 * position / 3000) for position in prompt.needle_places}
    assert len(spread) > 1 or NUM_NEEDLES[task] == 1


def test_a_multiquery_asks_in_another_order_than_the_texts(maker: PromptMaker, words: PreTrainedTokenizerFast) -> None:
    in_order = 0
    for seed in range(8):
        prompt = make(maker, "niah_multiquery", 1000, seed)
        text = words.decode(prompt.ids)
        in_order += [*sorted(prompt.answers, key=text.index)] == [*prompt.answers]
    assert in_order < 4


@pytest.mark.parametrize(("length", "times"), [(2000, (6, 1)), (5000, (30, 3))])
def test_common_words_occur_as_often_as_rulers(
    maker: PromptMaker, words: PreTrainedTokenizerFast, length: int, times: tuple[int, int]
) -> None:
    prompt = make(maker, "cwe", length, seed=0)
    entries = re.findall(r"(\d+)\. (\w+)", words.decode(prompt.ids).rpartition("numbered list")[2])
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    counts = Counter(word for _, word in entries)
    assert {counts.pop(word) for word in prompt.answers} == {times[0]}
    assert set(counts.values()) == {times[1]}


def test_frequent_words_fall_with_the_square_of_their_rank(maker: PromptMaker, words: PreTrainedTokenizerFast) -> None:
    prompt = make(maker, "fwe", 6000, seed=0)
    counts = Counter(words.decode(prompt.ids).split("\n\n")[1].split()).most_common(6)
    assert counts[0][0] == "..."
    assert [word for word, _ in counts[1:4]] == list(prompt.answers)
    for rank, (_, count) in enumerate(counts, start=1):
        assert abs(count - counts[0][1] / rank**2) <= 1


@pytest.mark.parametrize("task", tasks())
def test_an_oracle_scores_one(task: str) -> None:
    characters = make_tiny_tokenizer()
    model = make_tiny_llama(max_position_embeddings=8192)
    Oracle(model, characters)
    (record,) = retrieval(
        model,
        characters,
        [task],
        [4000],
        [50],
        documents=["".join(one for one in NOVEL if one.isascii())],
        prefill_chunk=1000,
        progress=False,
    )
    assert record.score("written") == 1
    assert record.score("forced") == (None if task in ("cwe", "fwe", "niah_multivalue") else 1)
    assert record.depth == (50 if tasks()[task].has_depth else None)
    assert sorted(record.written.strip(" .").split(", ")) == sorted(record.answers)


def test_a_task_without_a_depth_gets_as_many_prompts() -> None:
    characters, model = make_tiny_tokenizer(), make_tiny_llama(max_position_embeddings=2048)
    records = retrieval(
        model, characters, ["niah_single_2", "vt"], [1200], [0, 50, 100], 2, documents=[NOVEL], progress=False, seed=5
    )
    assert [(record.task, record.depth, record.seed) for record in records] == [
        *[("niah_single_2", depth, seed) for depth in (0, 50, 100) for seed in (5, 6)],
        *[("vt", None, seed) for seed in range(5, 11)],
    ]
    assert len({record.text_hash for record in records}) == 12
    assert max(record.num_written for record in records) == 0


def test_answers_are_found_as_whole_words() -> None:
    assert has_words("Here, there.", "here")
    assert not has_words("There, nowhere.", "here")
    assert not has_words("1234567", "23456")


def test_of_a_few_choices_the_first_that_is_written_is_the_answer() -> None:
    places = ("attic", "bakery", "cellar")
    assert num_written("in the bakery, not the attic", ["bakery"], places) == 1
    assert num_written("attic, Bakery, cellar", ["bakery"], places) == 0
    assert num_written("bakeries and the Bakery", ["bakery"], places) == 1
    assert num_written("neither", ["bakery"], places) == 0
    assert num_written("attic, bakery", ["bakery", "attic"]) == 2
    assert num_written("the bakery", ["bakery"], places, ended=True) == 0
    assert num_written("the bakery or the attic", ["bakery"], places, ended=True) == 1


def test_a_length_without_room_or_words_is_refused(maker: PromptMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    for task in ("vt", "cwe", "fwe"):
        with pytest.raises(ValueError, match=rf"'{task}'.*80.*\d+"):
            make(maker, task, 80, 0)
    few = tuple(Random(0).sample(vocabulary(), 60))
    monkeypatch.setattr(sys.modules["hf_posenc.retrieving.tasks.common_words"], "vocabulary", lambda: few)
    with pytest.raises(ValueError, match=r"\d+.*\d+"):
        make(maker, "cwe", 3000, 0)


@pytest.fixture
def registered() -> Iterator[str]:
    """A task that this test registers, and takes back: its name."""
    before = dict(tasks())

    @register_task("colour", has_depth=True, source="this test")
    def colour(rng: Random, context_length: int, num_questions: int) -> Puzzle:
        """One colour, hidden once."""
        found = rng.choice(["red", "green", "blue"])
        asked = Question("Which colour is it?", "The colour is", (found,), needles=(0,))
        return Puzzle("A colour is hidden below.", (asked,), (f"The colour is {found}.",))

    yield "colour"
    del tasks()["colour"]
    assert tasks() == before


def test_a_registered_task_is_one_like_the_others(
    registered: str, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "tasks"]) == 0
    assert f"{registered}\n    One colour, hidden once.\n    measured by depth, one question" in capsys.readouterr().out
    argv = ["eval", str(tiny_checkpoint), "--tasks", registered, "--context-lengths", "700", "--depths", "50"]
    assert main([*argv, "--hide-progress", "--output", str(tmp_path / "r.jsonl")]) == 0
    (record,) = read_retrieval_records(tmp_path / "r.jsonl")
    assert (record.task, record.depth) == (registered, 50)
    assert record.answers[0] in ("red", "green", "blue")
    assert f"{registered} " in capsys.readouterr().out
    assert tasks()[registered].source == "this test"


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"'passkey'.*hf_posenc"):
        register_task("passkey", has_depth=True, source="another")(tasks()["vt"].make)
    with pytest.raises(ValueError, match=r"'passkye'..*'passkey'\?"):
        get_task("passkye")
