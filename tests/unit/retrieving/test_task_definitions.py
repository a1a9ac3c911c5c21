"""What each task promises: chance, the same bytes, what grows with the length, supporting facts, refusals, groups."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter, deque
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel, tiny_model_path
from hf_posenc.cli.main import main
from hf_posenc.retrieving.haystack import read_haystack
from hf_posenc.retrieving.measuring_retrieval import retrieval
from hf_posenc.retrieving.prompts import Prompt, PromptMaker
from hf_posenc.retrieving.tasks import expand_groups, register_task, tasks, tasks_and_groups
from hf_posenc.retrieving.tasks.base import PEOPLE, num_written
from hf_posenc.retrieving.tasks.groups import GROUPS
from hf_posenc.retrieving.tasks.nolima import FACTS
from hf_posenc.retrieving.tasks.variable_tracking import variable_tracking
from oracles import solve
from task_solvers import place_before, place_now
from tiny_llama import make_tiny_llama, make_tiny_tokenizer

HERE = Path(__file__).parent
NOVEL = load_novel(HELD_OUT_NOVEL)[2000:60_000]
IN_A_BOOK = ("babilong_qa1", "babilong_qa2", "babilong_qa3", "nolima", "niah_single_3", "niah_multikey_1")
# What a text is filled with, in a task whose text is made for it: a pattern of one of them.
FILLED_WITH = {
    "kv": r'"[\da-f-]{36}": "[\da-f-]{36}"',
    "graph_bfs": r"\w{6} -> \w{6}\n",
    "graph_parents": r"\w{6} -> \w{6}\n",
    "mrcr": r"User: Write a \w+ about \w+\.\nAssistant: ",
    "niah_multikey_2": r"One of the secret numbers of [a-z]+-[a-z]+ is \d{7}\.",
    "niah_multikey_3": r"One of the secret codes of [\da-f-]{36} is [\da-f-]{36}\.",
    "niah_single_1": r"The road is long\.",
}
# Function words: everything else that a sentence or a question says is a content word.
FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the and or as of on in at to by for from with up under over out off not no never still ought be been "
        "is are was were has have had could can would who which he she it their each all both two three four six "
        "eight nine ten forty eighty hundred when after before since soon others alone one",
    )
)


def make(maker: PromptMaker, task: str, length: int, seed: int, num_questions: int = 1) -> tuple[Prompt, ...]:
    depth = 50 if tasks()[task].has_depth and num_questions == 1 else None
    return maker.make(task, length, depth, seed, num_questions)


@pytest.mark.parametrize("task", sorted({*tasks()} - {"cwe", "fwe"}))
def test_a_random_answer_scores_chance(maker: PromptMaker, task: str) -> None:
    """The answers of another text are right as often as one drawn at random."""
    count = 100
    prompts = [make(maker, task, 1300, seed)[0] for seed in range(count)]
    pairs = zip(prompts, [*prompts[1:], prompts[0]], strict=True)
    right = sum(
        num_written(", ".join(other.answers), mine.answers, mine.choices) == len(mine.answers) for mine, other in pairs
    )
    chance = 1 / 8 if task.startswith("babilong") else 1 / len(PEOPLE) if task == "nolima" else 0
    spread = math.sqrt(chance * (1 - chance) / count)
    assert abs(right / count - chance) <= 3 * spread
    every = Counter(answer for prompt in prompts for answer in prompt.answers)
    if task.startswith("babilong"):  # so that no answer is a good guess
        assert len(every) == 8
        assert max(every.values()) < count / 4
        listed = ", ".join(every)  # nor is it one to name them all
        right = sum(num_written(listed, prompt.answers, prompt.choices) for prompt in prompts)
        assert abs(right / count - chance) <= 3 * spread


def hashes() -> str:
    """Return a line for each task, with a hash of some prompts."""
    words = AutoTokenizer.from_pretrained(tiny_model_path())
    maker = PromptMaker(words, read_haystack(words, [NOVEL]), "off")
    lines = []
    for name, task in tasks().items():
        for questions in (1, 3) if task.several_questions else (1,):
            prompts = make(maker, name, 2000, 7, questions)
            lines.append(f"{name} {questions} {hashlib.sha256(repr(prompts).encode()).hexdigest()}")
    return "\n".join(lines)


def test_the_same_seed_gives_the_same_bytes_in_every_process() -> None:
    elsewhere = subprocess.run(
        [sys.executable, "-c", "from test_task_definitions import hashes; print(hashes())"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    ).stdout
    assert elsewhere.strip() == hashes()
    assert len(set(elsewhere.splitlines())) == 2 * len(tasks()) - 2


@pytest.mark.parametrize("task", FILLED_WITH)
def test_what_fills_the_text_grows_with_the_length(
    maker: PromptMaker, words: PreTrainedTokenizerFast, task: str
) -> None:
    counts = []
    for length in (2000, 4000, 8000):
        text = words.decode(make(maker, task, length, 0)[0].text_ids)
        found = re.findall(FILLED_WITH[task], text)
        counts.append(len(found))
        assert task in ("niah_single_1", "mrcr") or len(found) == len(set(found))
    for shorter, longer in ((0, 1), (1, 2)):
        assert 1.9 < counts[longer] / counts[shorter] < 2.4


@pytest.mark.parametrize("task", ["babilong_qa1", "babilong_qa2", "babilong_qa3", "nolima"])
def test_of_a_book_only_the_book_grows(maker: PromptMaker, task: str) -> None:
    """As published: the facts are as many, in more text that has nothing to do with them."""
    counts = [
        [len(make(maker, task, length, seed)[0].needle_places) for seed in range(40)] for length in (1400, 2800, 5600)
    ]
    means = [sum(count) / len(count) for count in counts]
    assert max(means) / min(means) < 1.3
    assert means[0] < 40


@pytest.mark.parametrize("task", ["babilong_qa2", "babilong_qa3"])
def test_a_world_has_about_eight_facts_for_each_question(task: str) -> None:
    for seed in range(20):
        facts = tasks()[task].make(Random(seed), 4096, 20).needles
        assert 8 * 20 <= len(facts) < 1.5 * 8 * 20


def test_a_dictionary_is_valid_json(maker: PromptMaker, words: PreTrainedTokenizerFast) -> None:
    (prompt,) = make(maker, "kv", 3000, 0)
    text = words.decode(prompt.ids)
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert len(found) == len(set(found.values())) == len(re.findall(FILLED_WITH["kv"], text))
    assert list(found.values())[len(found) // 2 - 1 : len(found) // 2 + 2].count(prompt.answers[0]) == 1  # depth 50


def test_a_graph_has_ways_that_lead_astray(maker: PromptMaker, words: PreTrainedTokenizerFast) -> None:
    further = nearer = 0
    for seed in range(10):
        (prompt,) = make(maker, "graph_bfs", 3000, seed)
        text = words.decode(prompt.ids)
        edges = re.findall(r"^(\w+) -> (\w+)$", text, re.MULTILINE)
        start = re.findall(r"2 steps from (\w+)\?", text)[0]
        distances, queue = {start: 0}, deque([start])
        while queue:
            node = queue.popleft()
            for target in (to for source, to in edges if source == node):
                if target not in distances:
                    distances[target] = distances[node] + 1
                    queue.append(target)
        assert {node for node, distance in distances.items() if distance == 2} == set(prompt.answers)
        further += sum(distance > 2 for distance in distances.values())
        nearer += sum(target in distances for source, target in edges if source not in distances)
        assert len(edges) == len(set(edges))
        assert all(source != target for source, target in edges)
    assert further > 100  # the search has to stop
    assert nearer > 20  # not every edge to an answer comes from the search

    for seed in range(10):
        (prompt,) = make(maker, "graph_parents", 3000, seed)
        text = words.decode(prompt.ids)
        node = re.findall(r"does an edge go to (\w+)\?", text)[0]
        edges = re.findall(r"^(\w+) -> (\w+)$", text, re.MULTILINE)
        nearer += any(source == node for source, _ in edges)  # an edge the other way
    assert nearer > 25


@pytest.mark.parametrize(("task", "count"), [("babilong_qa1", 1), ("babilong_qa2", 2), ("babilong_qa3", 3)])
def test_an_answer_has_so_many_supporting_facts(
    maker: PromptMaker, words: PreTrainedTokenizerFast, task: str, count: int
) -> None:
    """The facts that a question names are enough to answer it, and none of them can be left out."""
    solver = place_before if count == 3 else place_now
    for seed in range(12):
        for prompt in make(maker, task, 4000, seed, num_questions=3):
            text = words.decode(prompt.ids)
            facts = [
                words.decode(prompt.ids[position : position + 40]).split("\n")[1] for position in prompt.needle_places
            ]
            assert len(facts) == count
            name = re.findall(r"Where (?:is|was) (?:the )?(.+?) (?:now\?|before it)", text)[-1]
            assert solver("\n".join(facts), name) == solver(text, name) == [*prompt.answers]
            for left_out in facts:
                rest = "\n".join(fact for fact in facts if fact != left_out)
                try:
                    found = solver(rest, name)
                except KeyError:  # nothing is said of it
                    continue
                assert found != [*prompt.answers]


def test_the_verses_of_a_request_differ_in_every_line(
    maker: PromptMaker, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {
        "_FIGURES": ("king",),
        "_VERBS": ("hum", "sing"),
        "_ADJECTIVES": ("pale", "wild"),
        "_PREPOSITIONS": ("near",),
    }
    for name, some in few.items():  # so that lines would often be the same
        monkeypatch.setattr(f"hf_posenc.retrieving.tasks.mrcr.{name}", some)
    monkeypatch.setattr(
        "hf_posenc.retrieving.tasks.mrcr._RHYMES", (("moon", "spoon"), ("bell", "well"), ("hall", "wall"))
    )
    asked, alike = set(), 0
    for seed in range(20):
        (prompt,) = make(maker, "mrcr", 3000, seed)
        text = words.decode(prompt.ids)
        ordinal, kind, subject = re.findall(r"What is the (\w+) (\w+) about (\w+) in", text)[0]
        verses = re.findall(rf"User: Write a {kind} about {subject}\.\nAssistant: (.+)\.", text)
        assert len(verses) == 4
        lines = [line for verse in verses for line in verse.split(", ")]
        assert len(lines) == len(set(lines)) == 16
        alike += len(re.findall(rf"Write a (?:{kind} about (?!{subject})\w+|(?!{kind})\w+ about {subject})\.", text))
        asked.add(ordinal)
    assert asked == {"first", "second", "third", "fourth"}
    assert alike > 20  # requests that share a kind or a subject with the one that is asked about


def stems(sentence: str) -> set[str]:
    found = set(re.findall(r"[a-z]+", sentence.lower())) - FUNCTION_WORDS
    return {word[:4] for word in found if len(word) > 2}


def test_no_content_word_of_a_question_is_in_its_needle() -> None:
    assert len(FACTS) >= 20
    assert len({fact for fact, _ in FACTS}) == len({follows for _, follows in FACTS}) == len(FACTS)
    for fact, follows in FACTS:
        asked = stems(f"In the book above, which person {follows}?") | stems(f"The person who {follows} is")
        assert stems(fact)
        assert stems(follows)
        assert not asked & stems(fact), (fact, follows)
    assert stems("was born nine minutes after") == {"born", "minu"}


def test_no_novel_is_about_the_people_of_the_tasks() -> None:
    novels = " ".join(load_novel(name) for name in (HELD_OUT_NOVEL, *TRAIN_NOVELS))
    assert not {*PEOPLE} & {*re.findall(r"\w+", novels)}
    assert len(set(PEOPLE)) == len(PEOPLE) == 60


@pytest.mark.parametrize(
    "task", ["kv", "graph_bfs", "graph_parents", *IN_A_BOOK, "mrcr", "niah_single_1", "niah_multikey_2"]
)
def test_several_questions_of_a_text_are_answered_by_it(
    maker: PromptMaker, words: PreTrainedTokenizerFast, task: str
) -> None:
    prompts = make(maker, task, 9000, 3, num_questions=12)
    assert len(prompts) == 12
    assert len({tuple(prompt.text_ids) for prompt in prompts}) == 1
    assert len({tuple(prompt.question_ids) for prompt in prompts}) == 12
    for prompt in prompts:
        assert solve(words.decode(prompt.ids).rpartition("\n")[0]) == [*prompt.answers]


class FewValues(Random):
    """Of the values of variables, nearly all drawn are the same."""

    def randint(self, a: int, b: int) -> int:
        return min(a + 3, super().randint(a, b)) if self.random() < 0.9 else super().randint(a, b)


def test_no_chain_of_the_text_has_the_value_of_the_worked_example() -> None:
    for seed in range(20):
        puzzle = variable_tracking(FewValues(seed), 2000, 3)
        values = re.findall(r"VAR \w+ = (\d+)", "\n".join([puzzle.instruction, *puzzle.needles]))
        assert len(values) == len(set(values)) == 4


@pytest.mark.parametrize(
    ("task", "questions", "message"),
    [
        ("nolima", 33, "task 'nolima' has 32 needles, so a text cannot have 33 questions: ask less"),
        ("babilong_qa1", 61, "61 people are wanted, and there are names for 60: ask less"),
        ("babilong_qa2", 65, r"the simulated world has 60 things, so a text cannot have 65 questions"),
        ("mrcr", 401, "task 'mrcr' has at most 400 questions of a text, got 401"),
    ],
)
def test_more_questions_than_a_task_has_are_refused(
    maker: PromptMaker, task: str, questions: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(maker, task, 100_000, 0, questions)


def test_what_does_not_fit_is_refused_before_a_model_is_loaded(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("hf_posenc.checkpoint.loading.load_model", refuse)
    (tmp_path / "short.txt").write_text(NOVEL[:3000])
    ask = ["eval", str(tiny_checkpoint), "--documents", str(tmp_path / "short.txt"), "--context-lengths"]
    for task in (*FILLED_WITH, *IN_A_BOOK):
        assert main([*ask, "90", "--tasks", task]) == 2
        assert f"'{task}'" in capsys.readouterr().err
    for task in IN_A_BOOK:
        assert main([*ask, "9000", "--tasks", task]) == 2
        assert "longer documents," in capsys.readouterr().err


def test_tasks_with_a_text_of_their_own_need_no_documents(words: PreTrainedTokenizerFast) -> None:
    maker = PromptMaker(words, read_haystack(words, ["A word."]), "off")
    for task in FILLED_WITH:
        make(maker, task, 2000, 0)
    for task in IN_A_BOOK:
        with pytest.raises(ValueError, match="longer documents"):
            make(maker, task, 2000, 0)


def test_a_tokenizer_that_does_not_keep_the_answer_is_refused() -> None:
    """One that splits at hyphens and reads words back with spaces between them can write no UUID."""
    backend = Tokenizer(models.WordLevel({"?": 0, "long": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    unknowing = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    with pytest.raises(ValueError, match=r"'[\da-f-]+'.*\w+,.*\?"):
        make(PromptMaker(unknowing, read_haystack(unknowing, [NOVEL]), "off"), "kv", 500, 0)
    backend.model = models.WordLevel({word: at for at, word in enumerate(["?", *PEOPLE])}, unk_token="?")
    names = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    make(PromptMaker(names, read_haystack(names, [NOVEL]), "off"), "nolima", 500, 0)


def test_a_group_is_its_tasks(caplog: pytest.LogCaptureFixture) -> None:
    assert expand_groups(["vt", "babilong", "vt"]) == ["vt", "babilong_qa1", "babilong_qa2", "babilong_qa3"]
    assert not caplog.messages
    assert len(expand_groups(["ruler", "cwe"])) == 11
    assert [*caplog.messages] == [f"tasks of ruler: {GROUPS['ruler'].left_out}"]
    assert "HotpotQA" in caplog.text
    assert {name for group in GROUPS.values() for name in group.tasks} <= {*tasks()}
    assert not {*GROUPS} & {*tasks()}
    assert {*tasks_and_groups()} == {*GROUPS} | {*tasks()}
    with pytest.raises(ValueError, match=r"'ruler'.*niah_single_1,"):
        register_task("ruler", has_depth=True, source="here")(tasks()["vt"].make)
    with pytest.raises(TypeError, match=r"\['ruler'\]"):
        expand_groups("ruler")


def test_a_group_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    records = retrieval(
        make_tiny_llama(max_position_embeddings=2048),
        make_tiny_tokenizer(),
        ["graph"],
        [1200],
        [50],
        documents=[NOVEL],
        progress=False,
    )
    assert [record.task for record in records] == ["graph_bfs", "graph_parents"]
