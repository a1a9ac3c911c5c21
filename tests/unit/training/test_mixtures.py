"""The kinds of data of a mixture, read back from their tokens, and held against what the papers say they are."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice, pairwise
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from chats import PLAIN, TAGGED, THINKING, turns
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.data.examples import ExampleTokenizer
from hf_posenc.data.tokens import MaskedTokens, Tokens
from hf_posenc.mixtures import get_kind, kinds, kinds_of_steps, read_shares, register_kind
from hf_posenc.mixtures.base import Kind, Material
from hf_posenc.mixtures.made_up import Marks
from hf_posenc.retrieving.tasks import tasks
from hf_posenc.training import FinetuneConfig
from hf_posenc.training.blocks import MixedBlocks
from hf_posenc.training.data import Texts, make_blocks
from hf_posenc.training.positions import PositionSchedule
from tiny_llama import make_tiny_llama
from training_blocks import blocks_of
from training_plans import plan_for

KINDS = ("chains", "edges", "knots", "kv", "needles", "short_text", "text")
EVEN = {name: 1 / len(KINDS) for name in KINDS}


@cache
def make_tokenizer(template: str | None = None) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    tokenizer.chat_template = template
    return tokenizer


@cache
def documents(short: bool = False) -> list[torch.Tensor]:
    """Two long parts of a novel, or forty of its paragraphs."""
    text = load_novel("emma")
    parts = [text[2000:80_000], text[100_000:150_000]]
    if short:
        parts = [part for part in text[2000:60_000].split("\n\n") if len(part) > 200][:40]
    return [torch.tensor(make_tokenizer()(part, verbose=False).input_ids) for part in parts]


def mixed(
    shares: dict[str, float] = EVEN,
    seq_len: int = 512,
    *,
    texts: list[Tokens] | None = None,
    template: str | None = None,
    steps: int = 60,
    blocks_per_step: int = 1,
    positions: PositionSchedule | None = None,
    **settings: Any,
) -> MixedBlocks:
    config = FinetuneConfig(
        "x",
        factor=2.0,
        task_mix=shares,
        seq_len=seq_len,
        token_budget=steps * blocks_per_step * seq_len,
        gradient_accumulation_steps=blocks_per_step,
        eval_documents=0,
        **settings,
    )
    plan = plan_for(config, make_tiny_llama(max_position_embeddings=seq_len))
    positions = positions or PositionSchedule("full", seq_len // 2, seq_len)
    stage = dataclasses.replace(plan.stages[0], positions=positions)
    tokenizer, train = make_tokenizer(template), list(documents()) if texts is None else texts
    made = make_blocks(tokenizer, Texts(train, []), plan.data, stage, len(tokenizer))
    assert isinstance(made, MixedBlocks)
    return made


def blocks(name: str, number: int, seq_len: int = 512, **settings: Any) -> list[list[MaskedTokens]]:
    kind = mixed({name: 1.0}, seq_len, **settings).makers[name]
    return [kind.block(index) for index in range(number)]


def dialogues(name: str, number: int, seq_len: int, **settings: Any) -> list[MaskedTokens]:
    """Return blocks without what fills them up, which is in no loss."""
    return [block[: int(block.counted.nonzero()[-1]) + 1] for (block,) in blocks(name, number, seq_len, **settings)]


def decode(ids: torch.Tensor) -> str:
    return str(make_tokenizer().decode(ids))


HIDDEN = r"(?:People from|The ship|At the inn of|The bell of|The bridge at|Every crate that leaves)"

TITLE = r"[A-Z][a-z]+(?: [A-Z][a-z]+){2}"
NAME = rf"(?:{TITLE}|[A-Z][a-z]{{5}})"


def runs(tokens: MaskedTokens) -> list[tuple[bool, str]]:
    """The text, cut where it begins or ends to count in the loss."""
    bounds = [0, *(tokens.counted.int().diff().nonzero()[:, 0] + 1).tolist(), len(tokens)]
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    return [(bool(tokens.counted[part.start]), decode(tokens.ids[part])) for part in parts]


def test_the_registry_has_one_file_for_each_kind() -> None:
    assert sorted(kinds()) == sorted([*KINDS, "retention", "long_retention"])  # these need a model: test_retention.py
    shown = FinetuneConfig.__dataclass_fields__["task_mix"].metadata["help"]
    assert all(re.search(rf"\b{name}\b", shown) for name in kinds())
    with pytest.raises(ValueError, match=r"'knot'\..*'knots'\?"):
        get_kind("knot")
    with pytest.raises(ValueError, match="'kv'"):

        @register_kind
        class Mine(Kind):
            name: ClassVar[str] = "kv"

            def block(self, index: int) -> list[MaskedTokens]:
                raise NotImplementedError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["kv=0.5", "txt=0.5"], r"unknown kind of training data 'txt'\. Did you mean 'text'\?"),
        (["kv=0.5", "text=0.4"], r"must sum to 1, these sum to 0\.9\. .* are kv=0\.5556 text=0\.4444"),
        (["kv=1.5", "text=-0.5"], r"share of 'text' must be a number above 0, got '-0\.5'"),
        (["kv=0", "text=1"], r"share of 'kv' must be a number above 0, got '0'\. To leave a kind out, do not name it"),
        (["kv=nan"], "must be a number above 0"),
        (["kv"], r"takes KIND=SHARE, such as kv=0\.3, got 'kv'"),
        (["kv=0.5", "kv=0.5"], "'kv' is given twice"),
        ([], r"is empty: give KIND=SHARE"),
        ({"kv": True}, "must be a number above 0, got True"),
        (3, "must be a list of KIND=SHARE"),
    ],
)
def test_wrong_shares_are_refused(given: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        FinetuneConfig("x", task_mix=given)


def test_shares_are_read_from_words_one_word_and_a_dict() -> None:
    expected = {"kv": 0.3, "text": 0.7}
    for given in (["kv=0.3", "text=0.7"], ["kv=0.3,text=0.7"], "kv=0.3, text=0.7", expected):
        assert read_shares(given) == expected
        assert FinetuneConfig("x", task_mix=given).task_mix == ["kv=0.3", "text=0.7"]
    thirds = FinetuneConfig("x", task_mix={"kv": 1 / 3, "text": 2 / 3})
    assert dataclasses.replace(thirds).task_mix == thirds.task_mix  # what is written is read again


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"short_share": 0.2}, "short_share excludes task_mix: .* kind short_text"),
        ({"completion_only_loss": False}, "counts all tokens, and of kv and needles only the answers count"),
        ({"completion_only_loss": True}, "completion_only_loss is for chats or prompts .* needles of task_mix"),
        ({"assistant_only_loss": True}, "assistant_only_loss is for chats or prompts with answers, and needles"),
        ({"length_upsampling": 2.0}, "length_upsampling says how often documents are read as text"),
    ],
)
def test_settings_that_contradict_a_kind_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FinetuneConfig("x", task_mix="kv=0.5,needles=0.5", **settings)


@pytest.mark.parametrize("seq_len", [256, 512, 777])
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("template", [None, TAGGED, PLAIN])
def test_a_block_is_full_and_depends_on_its_number_and_the_seed_alone(
    seq_len: int, short: bool, template: str | None
) -> None:
    given: dict[str, Any] = {"texts": list(documents(short)), "template": template}
    one, other, else_ = (mixed(seq_len=seq_len, seed=seed, **given) for seed in (0, 0, 1))
    assert one.fingerprint() == other.fingerprint() != else_.fingerprint()
    for name, kind in one.makers.items():
        first = [kind.block(index) for index in range(6)]
        for index in reversed(range(6)):  # asked in another order, of another one
            again = other.makers[name].block(index)
            assert [piece.ids.tolist() for piece in again] == [piece.ids.tolist() for piece in first[index]]
            assert [piece.counted.tolist() for piece in again] == [piece.counted.tolist() for piece in first[index]]
        ids = [tuple(torch.cat([piece.ids for piece in block]).tolist()) for block in first]
        assert {len(row) for row in ids} == {seq_len}, name
        assert len(set(ids)) == 6, name
        others = [torch.cat([piece.ids for piece in else_.makers[name].block(index)]) for index in range(6)]
        assert ids != [tuple(row.tolist()) for row in others], name


@pytest.mark.parametrize("name", ["chains", "edges", "kv", "needles"])
def test_answers_count_where_the_template_renders_a_turn_otherwise_once_another_follows(name: str) -> None:
    for example in dialogues(name, 4, 1024, template=THINKING):
        shown = re.findall(r"\[assistant\]\n(?:<think>\n\n</think>\n\n)?(.*?<\|endoftext\|>)", decode(example.ids))
        counted = [part.rstrip("\n") for counts, part in runs(example) if counts]
        assert decode(example.ids).count("</think>") == 1
        assert len(shown) == 4  # one for 256 tokens
        assert counted == shown


# What stands between the entries of a layout, and an entry, by a word of its first line.
LAYOUTS = {
    "inventory": ("; ", "(.+): (.+)"),
    "register": ("\n", "(.+) = (.+)"),
    "table": ("\n", r"\| (.+) \| (.+) \|"),
    "pairs": (", ", "(.+) -> (.+)"),
}
DICTIONARY_QUESTIONS = (
    (r"Which entry belongs to (.+)\?", "To {key} belongs {value}."),
    (r"What stands beside (.+)\?", "Beside {key} stands {value}."),
    (r"Look up (.+), please\.", "{value}, found under {key}."),
    (r"And what goes with (.+)\?", "{key} goes with {value}."),
)
MARK = r"(\w+)([/_:+])\w+(?:\2\w+)*"


def is_mark(text: str) -> bool:
    return bool(re.fullmatch(MARK, text.replace("_", ":")))  # \w is an underscore too


def form_of(key: str) -> str:
    """Return name, title, or a mark with x for each letter and digit."""
    if re.fullmatch("[A-Z][a-z]{5}", key):
        return "name"
    return "title" if re.fullmatch(TITLE, key) else re.sub(r"[A-Za-z\d]", "x", key)


def dictionary(text: str) -> tuple[str, dict[str, str]]:
    """Return the name of a layout, and the entries."""
    heading, shown, *_ = text.split("\n\n")
    (layout,) = set(LAYOUTS) & set(heading.split())
    between, entry = LAYOUTS[layout]
    pairs = [re.fullmatch(entry, one) for one in shown.split(between)]
    assert None not in pairs, heading
    entries = dict(pair.groups() for pair in pairs if pair)
    assert len(entries) == len(pairs)  # no key is there twice
    return layout, entries


def test_every_answer_of_a_dictionary_is_right_and_nothing_else_counts() -> None:
    seen = set()
    for example in dialogues("kv", 40, 600):
        layout, entries = dictionary(decode(example.ids))
        found = runs(example)
        questions = [part.strip().splitlines()[-1] for counts, part in found if not counts]
        answers = [part.replace("<|endoftext|>", "").strip() for counts, part in found if counts]
        ((question, answer),) = [pair for pair in DICTIONARY_QUESTIONS if re.fullmatch(pair[0], questions[0])]
        keys = [re.fullmatch(question, one)[1] for one in questions]  # type: ignore[index]  # None would be an error
        assert len(set(keys)) == len(keys) == 2  # one for 256 tokens
        assert answers == [answer.format(key=key, value=entries[key]) for key in keys]
        assert found[-1][0]
        assert found[-1][1].endswith("<|endoftext|>")
        assert len(example) > 0.85 * 600  # entries differ in length
        seen |= {layout, question}
    assert seen == {*LAYOUTS, *(question for question, _ in DICTIONARY_QUESTIONS)}


@pytest.mark.parametrize(("seq_len", "longest"), [(256, 6), (2048, 27)])  # letters and digits
def test_keys_are_names_or_marks_of_one_form_as_long_as_a_block_has_room_for(seq_len: int, longest: int) -> None:
    forms, lengths = Counter[str](), set()
    for example in dialogues("kv", 60, seq_len):
        _, entries = dictionary(decode(example.ids))
        (form,) = set(map(form_of, entries))
        forms[form if form in ("name", "title") else "mark"] += 1
        if "x" in form:
            assert all(map(is_mark, entries))
            assert not any(key.lower() != key != key.upper() for key in entries)
            lengths.add(form.count("x"))
    assert set(forms) == {"name", "title", "mark"}
    assert forms["mark"] > max(forms["name"], forms["title"])
    assert 0.9 * longest < max(lengths) <= longest


def test_a_form_of_few_marks_gets_more_groups_where_many_are_needed() -> None:
    few = Marks("0123456789abcdef", "/", 2, 2)
    assert few.number == (16**2 - 10**2) ** 2
    rng = Random(0)
    assert {mark.count("/") for mark in few.several(rng, 6000)} == {1}
    many = few.several(rng, 30_000)  # more than there are of two groups
    assert len(set(many)) == 30_000
    assert {mark.count("/") for mark in many} == {2}


def test_the_values_of_a_dictionary_are_marks_alone_or_of_all_forms() -> None:
    alone = 0
    for example in dialogues("kv", 40, 2048):
        values = list(dictionary(decode(example.ids))[1].values())
        are_marks = [is_mark(value) for value in values]
        alone += all(are_marks)
        if not all(are_marks):
            patterns = (r"[a-z]+ [a-z]+", r"\d+,\d{3} [a-z]+", r"\d+ [A-Z][a-z]+ \d{4}")
            assert all(any(re.fullmatch(pattern, value) for value in values) for pattern in patterns)
            assert any(are_marks)
    assert 10 < alone < 30


def questions_and_answers(example: MaskedTokens) -> tuple[str, list[str], list[str]]:
    """Return the text of a dialogue, the questions about it, and what counts in the loss."""
    _, shown, *_ = decode(example.ids).split("\n\n")
    found = runs(example)
    questions = [part.strip().splitlines()[-1] for counts, part in found if not counts]
    answers = [part.replace("<|endoftext|>", "").strip() for counts, part in found if counts]
    return shown, questions[: len(answers)], answers


REFERRING = "(?: costs as much as| stands for what| carries the same as| falls on the day of) "


def test_every_answer_of_a_chain_follows_the_entries_to_a_value() -> None:
    lengths, seen = Counter[int](), set()
    for example in dialogues("chains", 40, 1024):
        shown, questions, answers = questions_and_answers(example)
        entries = re.split(r"\.\n|\. |; ", shown)
        keys = [re.match(NAME, entry)[0] for entry in entries]  # type: ignore[index]  # None would be an error
        assert len(set(keys)) == len(keys)
        by_key = dict(zip(keys, entries, strict=True))
        assert len(answers) == len(set(questions)) == 4
        for question, answer in zip(questions, answers, strict=True):
            (key,) = re.findall(NAME, question)[-1:]
            steps = [by_key[key]]
            while found := re.search(f"{REFERRING}({NAME})", steps[-1]):
                steps.append(by_key[found[1]])
            assert answer == ", and ".join(steps) + "."
            lengths[len(steps)] += 1
            seen |= set(re.findall(REFERRING, answer))
    assert set(lengths) <= {1, 2, 3}
    assert lengths[3] > lengths[2] / 2 > 0
    assert len(seen) == 4


def test_every_answer_of_edges_names_all_sources_in_the_order_of_the_text() -> None:
    numbers, headings = Counter[int](), set()
    verb = r"(?: taught | wrote to | sails to |, parent of )"
    for example in dialogues("edges", 40, 1024):
        shown, questions, answers = questions_and_answers(example)
        edges = re.findall(f"({NAME})({verb})({NAME})", shown)
        assert len(set(edges)) == len(edges) == len(re.findall(verb, shown)) > 20
        for question, answer in zip(questions, answers, strict=True):
            (node,) = re.findall(NAME, question.removeprefix("Name "))[-1:]
            sources = [source for source, _, target in edges if target == node]
            assert [one for one in re.findall(NAME, answer) if one != node] == sources
            numbers[len(sources)] += 1
        headings |= {word for _, word, _ in edges}
    assert set(numbers) == {1, 2, 3}
    assert len(headings) == 4


def test_every_answer_about_a_hidden_sentence_is_right_and_nothing_else_counts() -> None:
    depths = []
    for example in dialogues("needles", 30, 1024):
        text = decode(example.ids).partition("<|endoftext|>")[0]
        shown, *_ = re.split(r"\n\n(?=Wh)", text)
        found = runs(example)
        answers = [part.replace("<|endoftext|>", "").strip() for counts, part in found if counts]
        questions = [part.strip().splitlines()[-1] for counts, part in found if not counts]
        assert len(answers) == len(questions) == 4
        for question, answer in zip(questions, answers, strict=True):
            (key,) = re.findall(rf"(?<!^)\b{NAME}\b", question)
            words = " ".join(answer[:-1].split())
            value = re.search(r"(\d+ [A-Z][a-z]+ \d{4}|[\d,]+ [a-z]+|(?<=marked )\S+|[a-z]+ [a-z]+)$", words)
            assert value is not None
            sentences = [one for one in re.findall(rf"[^.!?]*\b{key}\b[^.]*\.", shown) if value[0] in one]
            assert len(sentences) == 1, (question, answer)
            depths.append(shown.index(sentences[0]) / len(shown))
        assert len(re.findall(rf"{HIDDEN} {NAME}\b", shown)) == 8
    thirds = Counter(int(3 * depth) for depth in depths)
    assert all(thirds[third] > 0.2 * len(depths) for third in range(3))


@pytest.mark.parametrize("name", ["kv", "needles"])
def test_what_fills_a_block_up_needs_no_mask_and_is_in_no_loss(name: str) -> None:
    data = mixed({name: 1.0}, 600, positions=PositionSchedule("cream", 600, 1200))
    filled = 0
    for block, example in zip(data, dialogues(name, 60, 600), strict=False):
        assert (block["position_ids"] == 0).sum() == 1
        assert block["position_ids"][-1] == 1199  # CREAM's tail is at the end of the target
        rest = block["input_ids"][len(example) :]
        assert torch.equal((block["labels"] != -100)[: len(example)], example.counted)
        assert (block["labels"][len(example) :] == -100).all()
        if len(rest):
            filled += 1
            assert (data.packed.stream.unfold(0, len(rest), 1) == rest).all(1).any()  # of the documents, as they are
    assert filled > 0


def test_long_blocks_ask_in_proportion() -> None:
    for example in dialogues("kv", 2, 8192):
        assert sum(counts for counts, _ in runs(example)) == 32  # one for 256 tokens


@pytest.mark.parametrize("short", [False, True])
def test_knots_can_be_untied(short: bool) -> None:
    sources = [decode(document) for document in documents(short)]
    cuts = 0
    for (block,) in blocks("knots", 20, 1024, texts=list(documents(short))):
        text = decode(block.ids)
        masked = "".join(part if counts else f"\0{part}\0" for counts, part in runs(block))
        ties = set(re.findall(r"\[on to (\w+)\]", text))
        assert ties == set(re.findall(r"\[on from (\w+)\]", text))
        orders = [found.split(", ") for found in re.findall(r"\[order: ([\w, ]+)\]", text)]
        assert sorted(tie for order in orders for tie in order) == sorted(ties)
        for tie in ties:  # tags never count, the lists do
            assert re.search(rf"\0[^\0]*\[on to {tie}\][^\0]*\0", masked)
            assert re.search(rf"\0[^\0]*\[on from {tie}\][^\0]*\0", masked)
            assert re.search(rf"\[order:\0[^\0]*\b{tie}\b[^\0]*\]", masked)
        for order in orders:
            cuts += len(order)
            for left, right in pairwise(order):
                assert re.search(rf"\[on from {left}\]\n([^\[]*)\n\[on to {right}\]", text)
            for tie in order:
                behind, after = text.partition(f"\n[on to {tie}]")[0][-8:], text.partition(f"[on from {tie}]\n")[2][:8]
                assert any(behind + after in source for source in sources), (tie, behind, after)
            listed = text.index(f"[order: {', '.join(order)}]")
            assert all(text.index(f"[on from {tie}]") < listed > text.index(f"[on to {tie}]") for tie in order)
    assert cuts > 40


def test_the_first_token_of_a_chunk_does_not_count() -> None:
    for (block,) in blocks("knots", 10, 1024):
        assert not block.counted[0]
        tags = [part for counts, part in runs(block) if not counts and "[on from" in part]
        assert tags
        assert not any(part.endswith("]\n") for part in tags)  # the token behind the tag is left out with it


def test_text_is_the_packed_documents_each_block_once_a_pass() -> None:
    data = mixed({"text": 0.5, "short_text": 0.5})
    packed = data.packed
    expected = sorted(block["input_ids"].tolist() for block in blocks_of(packed))
    for name in ("text", "short_text"):
        passes = [
            [torch.cat([p.ids for p in data.makers[name].block(start + at)]).tolist() for at in range(len(packed))]
            for start in (0, len(packed))
        ]
        assert sorted(passes[0]) == sorted(passes[1]) == expected
        assert passes[0] != passes[1]
    lengths = [[len(piece) for piece in data.makers["text"].block(at)] for at in range(len(packed))]
    assert sorted(lengths) == sorted([len(piece) for piece in packed.pieces(at)] for at in range(len(packed)))
    assert data.kinds is not None
    short = data[data.kinds.index("short_text")]["position_ids"]
    assert short.tolist() == [*range(256), *range(256)]


@pytest.mark.parametrize("shares", [{"kv": 0.3, "needles": 0.2, "knots": 0.2, "text": 0.3}, EVEN, {"kv": 1.0}])
def test_steps_are_shared_out_evenly(shares: dict[str, float]) -> None:
    order = kinds_of_steps(shares, 500)
    for steps in range(1, 501):
        counts = Counter(order[:steps])
        assert all(abs(counts[name] - share * steps) <= 1 for name, share in shares.items())
    with pytest.raises(ValueError, match=r"2.*knots=0\.1:.*token_budget.*2560"):
        mixed({"kv": 0.45, "knots": 0.1, "text": 0.45}, steps=2)


@pytest.mark.parametrize("kind", ["full", "pose", "cream"])
def test_a_resumed_run_reads_what_one_that_was_not_stopped_reads(kind: str) -> None:
    seq_len = 512 if kind == "full" else 256
    positions = PositionSchedule(kind, 256, 512)

    def loader() -> DataLoader[Any]:
        return DataLoader(mixed(seq_len=seq_len, positions=positions, steps=12, blocks_per_step=4), batch_size=2)

    whole = list(loader())
    assert len(whole) == 24
    resumed = list(skip_first_batches(loader(), 10))  # as Trainer does
    assert len(resumed) == 14
    for one, other in zip(whole[10:], resumed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("input_ids", "position_ids", "labels"))
    schedule: Any = loader().dataset
    rows = [tuple(row.tolist()) for batch in whole for row in batch["input_ids"]]
    # No block of a kind comes twice; text and short_text are of the same documents.
    assert len({(schedule.kinds[index // 4], row) for index, row in enumerate(rows)}) == len(rows) == 48
    for index in range(len(schedule)):
        block = schedule[index]
        assert {len(row) for row in block.values()} == {seq_len}
        assert 0 <= int(block["position_ids"].min()) <= int(block["position_ids"].max()) < 512
        counted = block["labels"] != -100
        assert torch.equal(block["labels"][counted], block["input_ids"][counted])
        assert not counted[block["position_ids"] == 0].any()
        assert counted.any()
        name = schedule.kinds[index // 4]  # the four blocks of a step are of one kind
        share = counted.double().mean()
        most = {"chains": 0.6, "edges": 0.3, "kv": 0.3, "needles": 0.3}.get(name)  # answers
        assert share > 0.4 if most is None else share < most, name


@pytest.mark.parametrize(
    ("shares", "seq_len", "changes", "message"),
    [
        ({"kv": 1.0}, 64, {}, r"the shortest example of 'kv' has about \d+ tokens, and a block has 64\. Give a longer"),
        ({"needles": 1.0}, 64, {}, "the shortest example of 'needles' has about"),
        ({"knots": 1.0}, 128, {}, r"'knots' ties 4 documents of at least \d+ tokens in a block, and a block has 128"),
        ({"knots": 1.0}, 512, {"texts": [torch.arange(1, 9)] * 99}, "the longest document has 8. Give longer"),
    ],
)
def test_what_does_not_fit_is_refused(
    shares: dict[str, float], seq_len: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mixed(shares, seq_len, **changes)


def test_chats_are_trained_on_beside_dictionaries_and_not_hidden_in() -> None:
    rows = [{"messages": turns("What is it? " * 9, f"It is {number}. " * 9)} for number in range(40)]
    tokenize = ExampleTokenizer(make_tokenizer(TAGGED), assistant_only_loss=True)
    chats = [tokenize(row, "a chat") for row in rows]
    data = mixed({"kv": 0.5, "text": 0.5}, 256, texts=chats, template=TAGGED, assistant_only_loss=True)
    shares = [
        float(torch.cat([piece.counted for piece in maker.block(0)]).double().mean()) for maker in data.makers.values()
    ]
    assert 0 < shares[0] < 0.3 < shares[1] < 0.8
    with pytest.raises(ValueError, match=r"40.*40"):
        mixed({"knots": 0.5, "text": 0.5}, texts=chats, template=TAGGED)


def strings(value: Any) -> Iterator[str]:
    """All text that an instance of a task is made of, however its classes are arranged."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from strings(getattr(value, one.name))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from strings(one)
    elif isinstance(value, Callable):  # type: ignore[arg-type]  # lines without an end, or a listing of so many
        lines = not inspect.signature(value).parameters
        yield "\n".join(islice(value(), 120)) if lines else str(value(120))


def words_in_a_row(text: str, number: int) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z]+", text.lower())
    return {tuple(words[at : at + number]) for at in range(len(words) - number + 1)}


def shapes(text: str) -> set[str]:
    """The words that have a digit, with 9 for each digit and A or a for each letter."""
    words = [word.strip(".:;?!()[]{}\"'") for word in re.split(r"[\s=/_:+]+", text) if re.search(r"\d", word)]
    return {re.sub(r"[a-z]", "a", re.sub(r"[A-Z]", "A", re.sub(r"\d", "9", word))).strip(",") for word in words}


def test_what_is_trained_on_is_not_what_is_asked() -> None:
    asked = [
        text for task in tasks().values() for seed in range(3) for text in strings(task.make(Random(seed), 4096, 1))
    ]
    assert len(asked) > 50
    in_tasks = set().union(*(words_in_a_row(text, 4) for text in asked))
    material = Material(make_tokenizer(), documents(), mixed().packed, 0)
    trained = []
    for name in ("chains", "edges", "kv", "needles"):
        kind: Any = get_kind(name)(material)
        for seed in range(20):
            for question, answer in kind.turns(Random(seed), 24):
                own = [] if "\n\n" in question and name == "needles" else question.splitlines()
                trained += [*own, question.splitlines()[-1], answer]
                trained += re.findall(rf"{HIDDEN} {NAME} [^.]*\.", question)
    shared = set().union(*(words_in_a_row(text, 4) for text in trained)) & in_tasks
    # Hexadecimal digits between others, as in UUIDs, are no words.
    assert {row for row in shared if re.search("[g-z]", "".join(row)) or max(map(len, row)) > 5} == set()
    # No word with a digit looks like one of a task: letters and digits are not in the same order.
    of_trained, of_asked = (set().union(*map(shapes, texts)) for texts in (trained, asked))
    assert {"99,999", "9999"} < of_trained
    assert {"99999", "9999999"} < of_asked
    assert not {shape for shape in of_trained & of_asked if len(shape) > 2}  # a day's number may be in a task
    in_marks = re.compile(rf"\b(?=[\w/:+]*\d){MARK}\b")
    assert any(map(in_marks.search, trained))
    assert not any(map(in_marks.search, asked))
    # Names are not those of a task: words with a hyphen, letters in capitals, or words of the novels.
    before = r"\b(?:belongs to|stands beside|Look up|goes with|ship|inn of|bell of|leaves|from)"
    titled = {name for text in trained for name in re.findall(rf"{before} ({TITLE})\b", text)}
    names = {name for text in trained for name in re.findall(rf"{before} ([A-Z][a-z]+)(?![\w/:+ ]*[A-Z])", text)}
    assert len(names) > 30
    assert len(titled) > 30
    vocabulary = set(re.findall(r"\w+", load_novel("emma").lower()))
    assert not any(name.lower() in vocabulary or name.isupper() or "-" in name for name in names)
    assert not any(title in text for title in titled for text in asked)
