"""How far rows read and retrieve: constructed curves whose answer is known by hand, and real numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.assets import tiny_model_path
from hf_posenc.cli.main import main
from hf_posenc.evaluation import Record, reach, reach_lines
from hf_posenc.evaluation.effective_length import LossReach
from hf_posenc.reporting import report
from report_records import make_record
from report_records import make_retrieval_record as make_answer

ORIGINAL, LONGEST, WIDTH = 8192, 16384, 256


def by_position(method: str, loss: Callable[[int], float], **changes: Any) -> list[Record]:
    """One document's records at 8k and 16k, whose bucket at position p has the mean loss of ``loss(p)``."""
    records = []
    for length in (ORIGINAL, LONGEST):
        counts = [WIDTH - (at == 0) for at in range(length // WIDTH)]
        nats = [loss(at * WIDTH) * count for at, count in enumerate(counts)]
        facts: dict[str, Any] = {
            "original_max_position_embeddings": ORIGINAL,
            "num_documents": 1,
            "n_tokens": sum(counts),
            "nll_sum": math.fsum(nats),
            "position_bucket": WIDTH,
            "position_nll": nats,
            "position_tokens": counts,
        }
        mean = math.fsum(nats) / sum(counts)
        records.append(make_record(method, length, math.exp(mean), **{**facts, **changes}))
    return records


def text(position: int) -> float:
    """A text whose pages are easy and hard alternately: 2.9 and 3.1 nats."""
    return 3.0 + (0.1 if position // WIDTH % 2 else -0.1)


def unpatched(position: int) -> float:
    return text(position) + (2.0 if position >= ORIGINAL else 0.0)


def loss_reach(loss: Callable[[int], float]) -> LossReach:
    rows = reach([*by_position("none", unpatched), *by_position("yarn", loss)])
    assert [row.name for row in rows] == ["unpatched", "yarn x4"]
    found = rows[1].loss
    assert isinstance(found, LossReach)
    return found


@pytest.mark.parametrize(
    ("loss", "length"),
    [
        (text, 16384),
        (lambda p: text(p) + (1.0 if p >= 12288 else 0.0), 12288),  # breaks at 12k
        (lambda p: text(p) + (0.3 if p == 10240 else 0.0), 16384),  # one hard page
        (lambda p: text(p) + (1.0 if 8192 <= p < 14336 else 0.0), 8192),  # broken, then an easy end
        (lambda p: text(p) + 0.05, 16384),  # worse all over by less than the text varies
        (lambda p: text(p) + 0.5, None),
    ],
)
def test_where_a_loss_by_position_breaks(loss: Callable[[int], float], length: int | None) -> None:
    found = loss_reach(loss)
    assert (found.length, found.by, found.reference) == (length, "loss by position", "unpatched")
    assert found.is_longest == (length == LONGEST)


def test_what_is_no_worse_follows_from_how_the_buckets_vary() -> None:
    # 24 buckets of 256 tokens from a quarter of the original on, 2.9 and 3.1 alternately; the second half of the
    # original, 4096 tokens, against the eighth before 16k, 2048.
    spread = 0.1 * math.sqrt(24 / 23) * math.sqrt(256)
    noise = 1.959964 * spread * math.sqrt(1 / 4096 + 1 / 2048)
    assert 0.08 < noise < 0.09
    assert loss_reach(text).tolerance == pytest.approx(100 * math.expm1(noise), rel=1e-9)
    # The whole stretch past the original is 8192 tokens, and less is excused there.
    whole = 1.959964 * spread * math.sqrt(1 / 4096 + 1 / 8192)
    assert loss_reach(lambda p: text(p) + (0.99 * whole if p >= ORIGINAL else 0)).length == LONGEST
    assert loss_reach(lambda p: text(p) + (1.01 * whole if p >= ORIGINAL else 0)).length != LONGEST


def test_a_text_that_does_not_vary_excuses_one_percent() -> None:
    def step(size: float) -> Callable[[int], float]:
        return lambda p: 3.0 + (math.log(size) if p >= ORIGINAL else 0)

    for size, length in ((1.009, LONGEST), (1.011, ORIGINAL)):
        rows = reach([*by_position("none", lambda p: 3.0), *by_position("ntk", step(size))])
        assert isinstance(rows[1].loss, LossReach)
        assert rows[1].loss.length == length


# Perplexity and its interval at 512, 2k, 8k and 16k: SmolLM2-135M on Persuasion, the README's first table.
SMOLLM2 = {
    "none": [(28.327, 19.96, 41.53), (33.115, 27.13, 39.36), (28.955, 26.84, 31.07), (58.194, 40.23, 87.82)],
    "linear": [(53.454, 39.55, 74.6), (66.646, 55.08, 78.55), (61.08, 56.72, 65.1), (63.269, 59.81, 66.87)],
    "yarn": [(29.616, 20.95, 43.9), (33.765, 27.74, 40.14), (29.55, 27.34, 31.71), (29.98, 28.3, 31.82)],
}


def smollm2(method: str, **changes: Any) -> list[Record]:
    facts = {"num_documents": 1, "original_max_position_embeddings": 8192, "factor": 1.0 if method == "none" else 2.0}
    return [
        make_record(
            method,
            length,
            perplexity,
            ci_low=low,
            ci_high=high,
            n_tokens=length - 1,
            nll_sum=math.log(perplexity) * (length - 1),
            **{**facts, **changes},
        )
        for length, (perplexity, low, high) in zip((512, 2048, 8192, 16384), SMOLLM2[method], strict=True)
    ]


def test_without_buckets_the_lengths_tell_and_the_line_says_so() -> None:
    lines = reach_lines([*smollm2("linear"), *smollm2("yarn"), *smollm2("none")])
    # Of the interval at 8k, by hand: ln(31.07 / 26.84) / 3.92 x sqrt(8191) = 3.379 nats a token. From 2k to 8k, 6144
    # tokens, ln 28.955 x 8191 - ln 33.115 x 2047 leaves 3.3210 nats a token.
    # yarn from 8k to 16k: (ln 29.98 x 16383 - ln 29.55 x 8191) / 8192 = 3.4149, 0.0939 more, 0.1118 being excused.
    assert lines == [
        "unpatched: reads to 8k (perplexity by length, within 13 %), retrieval not measured",
        "linear x2: worse than unpatched at 8k already, by 114 % (perplexity by length, within 13 %), "
        "retrieval not measured, short texts (8k) cost 110.9 %",
        "yarn x2: reads to at least 16k (perplexity by length, within 12 %), "
        "retrieval not measured, short texts (8k) cost 2.1 %",
    ]


def test_what_was_not_measured_is_said() -> None:
    (alone,) = reach_lines(smollm2("yarn"))
    assert "against itself: no unpatched row" in alone
    assert alone.endswith("cost on short texts not measured")
    (long_only,) = reach_lines([one for one in smollm2("none") if one.context_length != 8192])
    assert "no length from 4k to 8k was measured" in long_only
    other_text = smollm2("yarn", text_hash="other")
    assert "cost on short texts not measured" in reach_lines([*smollm2("none"), *other_text])[1]
    unsure = [replace(one, ci_low=one.perplexity / 9, ci_high=one.perplexity * 9) for one in smollm2("none")]
    assert re.search(r"too little text: with 16,383 tokens scored, \d{4} % more or less is", reach_lines(unsure)[0])
    assert "original length is not known" in reach_lines(smollm2("none", original_max_position_embeddings=None))[0]
    assert "no protocol" in reach_lines(smollm2("none", protocol="of tomorrow"))[0]
    (retrieved,) = reach_lines([make_answer("none", 256, 0.0, 0, True)])
    assert retrieved.startswith("unpatched: loss not measured, retrieves to at least 256 ")


def test_other_protocols_tell_too() -> None:
    def of(method: str, losses: dict[int, float], **changes: Any) -> list[Record]:
        return [
            make_record(method, length, math.exp(loss), n_tokens=2000, nll_sum=2000 * loss, **changes)
            for length, loss in losses.items()
        ]

    plain, longer = {128: 3.2, 256: 3.0, 512: 5.0}, {128: 3.2, 256: 3.0, 512: 3.005}
    last = {"protocol": "last_k", "last_k": 64}
    rows = reach([*of("none", plain, **last), *of("yarn", longer, **last)])
    assert [row.loss.length for row in rows if isinstance(row.loss, LossReach)] == [256, 512]
    # A window over the same tokens at every length: nothing varies, so 1 % is all that is excused.
    window = {"protocol": "sliding_window", "stride": 32}
    for more, length in ((0.009, 512), (0.011, 256)):
        rows = reach([*of("none", plain, **window), *of("yarn", {**longer, 512: 3.0 + more}, **window)])
        assert isinstance(rows[1].loss, LossReach)
        assert rows[1].loss.length == length
        assert rows[1].loss.tolerance == pytest.approx(1.0)


def test_rows_of_one_method_are_kept_apart() -> None:
    records = [*smollm2("none"), *smollm2("yarn"), *smollm2("yarn", tokens_trained=1000, label="b")]
    assert [line.partition(":")[0] for line in reach_lines(records)] == [
        "unpatched",
        "yarn x2",
        "yarn x2 · b, after 1,000 tokens",
    ]
    two = [*smollm2("none"), *smollm2("none", model="some/other")]
    assert [row.name for row in reach(two)] == ["unpatched · tiny", "unpatched · other"]


def test_a_row_is_held_against_the_unpatched_model_in_its_own_dtype() -> None:
    records = smollm2("none") + smollm2("yarn")
    lower = [replace(one, dtype="bfloat16", perplexity=2 * one.perplexity) for one in records]
    rows = {row.name: row.short_cost for row in reach([*records, *lower])}
    assert list(rows) == ["unpatched · float32", "unpatched · bfloat16", "yarn x2 · float32", "yarn x2 · bfloat16"]
    assert rows["yarn x2 · float32"] == rows["yarn x2 · bfloat16"] == pytest.approx(2.05, abs=0.01)


def test_losses_of_different_texts_make_no_verdict() -> None:
    plain = by_position("none", unpatched)
    worse = by_position("yarn", lambda position: text(position) + 0.5, run_key="yarn-1")
    easy = by_position("yarn", lambda position: text(position) - 0.5, run_key="yarn-2", text_hash="an easier text")
    (alone,) = reach([*plain, *worse])[1:]
    for records in ([*plain, *worse, *easy], [*easy, *plain, *worse]):
        rows = {row.name: row.loss for row in reach(records)}
        assert list(rows) == ["unpatched", "yarn x4", "yarn x4, run 2"]
        of_easy = rows["yarn x4" if records[0] is easy[0] else "yarn x4, run 2"]
        assert isinstance(of_easy, LossReach)
        assert of_easy.reference == "itself"  # there is no unpatched row on it
        assert alone.loss in rows.values()
        assert isinstance(alone.loss, LossReach)
        assert alone.loss.length is None  # as that text alone says
    (once,) = reach([*worse, *worse])  # a repeat is no other run
    assert once.name == "yarn x4"


def test_lengths_measured_on_other_documents_make_no_curve() -> None:
    """Short lengths on many documents and long ones on the few that are so long are two measurements."""
    short, long = by_position("none", unpatched, num_documents=1)
    rows = reach([replace(short, num_documents=9), long])
    assert [row.name for row in rows] == ["unpatched", "unpatched, run 2"]


def answers(length: int, right: int, num_prompts: int = 20, task: str = "passkey") -> list[Any]:
    return [make_answer("yarn", length, 0.0, seed, seed < right, task=task) for seed in range(num_prompts)]


@pytest.mark.parametrize(
    ("right", "words"),
    [
        # Wilson's interval of 18 of 20, by hand: (0.9 + 0.0960 -/+ 1.96 x 0.08245) / 1.1921
        ((20, 18, 16), "retrieves to 512 (passkey >= 85 %; there 90 % right, interval 70–97)"),
        ((20, 20, 17), "retrieves to at least 1k (passkey >= 85 %; there 85 % right, interval 64–95)"),
        ((20, 16, 20), "retrieves to 256 (passkey >= 85 %; there 100 % right, interval 84–100)"),
        # 85 % of 8 of 20 is 34 %
        (
            (8, 7, 6),
            "retrieves to 512 (passkey >= 34 %, 85 % of its own 40 % at 256; there 35 % right, interval 18–57)",
        ),
        (
            (8, 6, 9),
            "retrieves to 256 (passkey >= 34 %, 85 % of its own 40 % at 256; there 40 % right, interval 22–61)",
        ),
        ((0, 20, 20), "retrieves at no length (passkey >= 85 %; at 256 0 % right, interval 0–16)"),
    ],
)
def test_retrieval_reaches_where_all_shorter_lengths_do(right: tuple[int, ...], words: str) -> None:
    records = [record for length, n in zip((256, 512, 1024), right, strict=True) for record in answers(length, n)]
    (line,) = reach_lines(records[::-1])
    assert words in line
    again = [*records, *records]  # repeats of one prompt do not make it surer
    assert reach_lines(again) == [line]


def test_a_row_is_held_against_the_unpatched_model_up_to_the_original_length() -> None:
    unpatched = [
        make_answer("none", length, 0.0, seed, seed < right)
        for length, right in ((128, 19), (256, 10), (512, 0))
        for seed in range(20)
    ]
    patched = [*answers(256, 8), *answers(512, 9)]
    first, second = reach_lines([*patched, *unpatched])
    needed = "passkey >= 42 %, 85 % of the unpatched model's 50 % at 256"
    assert f"retrieves to 256 ({needed}; there 50 % right, interval 30–70)" in first
    assert f"retrieves at no length ({needed}; at 256 40 % right" in second
    elsewhere = [replace(one, chat=True) for one in unpatched]  # prompts of another kind say nothing
    assert "85 % of its own 40 % at 256" in reach_lines([*patched, *elsewhere])[1]


def test_questions_of_one_text_are_told_with_their_texts() -> None:
    shared = {"questions_per_text": 10}
    records = [
        make_answer(
            "yarn", 256, None, seed, True, **shared, question=at, shared_text=str(seed), text_hash=f"{seed} {at}"
        )
        for seed in range(2)
        for at in range(10)
    ]
    assert "there 100 % right of 20 questions in 2 texts, interval 11–100)" in reach_lines(records)[0]
    assert "there 100 % right of 10 questions in 1 text, interval 72–100)" in reach_lines(records[:10])[0]


def test_questions_that_share_a_text_are_a_task_of_their_own() -> None:
    """They have other needles around them, so they neither count with single questions nor set a level for them."""

    def shared(method: str, right: int) -> list[Any]:
        return [
            make_answer(method, 256, None, 0, at < right, questions_per_text=10, question=at, text_hash=str(at))
            for at in range(10)
        ]

    (line,) = reach_lines([*answers(256, 20), *shared("yarn", 4)])
    assert "(passkey >= 85 %; there 100 % right, interval 84–100)" in line
    assert "(passkey, 10 questions of a text >= 34 %, 85 % of its own 40 % at 256; there 40 % right" in line
    assert "85 % of its own 40 % at 256" in reach_lines([*answers(256, 8), *shared("none", 5)])[1]


@pytest.mark.parametrize(("right", "expected"), [(2, "retrieves to at least 256"), (1, "retrieves at no length")])
def test_a_model_that_cannot_do_a_task_reaches_nothing(right: int, expected: str) -> None:
    (line,) = reach_lines(answers(256, right))
    assert f"{expected} (passkey >= {'8 %, 85 % of its own 10 %' if right == 2 else '85 %;'}" in line


def test_each_task_is_told_and_written_answers_count_where_their_order_is_free() -> None:
    free = {"task": "niah_multivalue", "num_forced": None, "answers": ["1", "2"]}
    both = [make_answer("yarn", 256, 0.0, seed, False, **free, num_written=2) for seed in range(9)]
    (line,) = reach_lines([*answers(256, 3), *both])
    assert "retrieves to at least 256 (passkey >= 13 %, 85 % of its own 15 % at 256; there 15 % right" in line
    assert "retrieves to at least 256 (niah_multivalue >= 85 %; there 100 % right" in line


@pytest.mark.slow
def test_eval_ends_with_how_far_each_row_reaches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["eval", str(tiny_model_path()), "--documents", "novel:persuasion", "--context-lengths", "128", "256"]
    argv += ["1k", "--cut", "--max-documents", "32", "--method", "none", "yarn", "--factor", "4", "--hide-progress"]
    assert main([*argv, "--output", str(tmp_path / "r.jsonl")]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if ": " in line and "retrieval not measured" in line]
    found = re.match(r"unpatched: reads to (\d+) \(loss by position, within", lines[0])
    assert found is not None
    assert 256 <= int(found[1]) <= 384  # it was trained on 256, and is lost soon after
    assert "yarn x4: worse than unpatched at 256 already" in lines[1]  # as the demo shows: it needs fine-tuning


def of_buckets(*means: float, documents: int = 1, last: int = 16, factor: float = 1.0, method: str = "none") -> Record:
    """A record of buckets of 16 tokens, with ``last`` tokens in the last one, of a model trained on 128."""
    tokens = [16 * documents] * (len(means) - 1) + [last]
    nats = [mean * count for mean, count in zip(means, tokens, strict=True)]
    length = 16 * len(means)
    facts = {"num_documents": documents, "original_max_position_embeddings": 128, "factor": factor}
    buckets = {"position_bucket": 16, "position_nll": nats, "position_tokens": tokens, "n_tokens": sum(tokens)}
    mean = sum(nats) / sum(tokens)
    return make_record(method, length, math.exp(mean), nll_sum=sum(nats), **facts, **buckets)  # type: ignore[arg-type]  # mixed


def test_with_too_little_text_it_is_said_what_was_seen_and_how_much_is_needed() -> None:
    """ "reads to 304 (within 157 %)" was said of such, and later nothing but that it cannot be judged."""
    little = of_buckets(*[3.0, 4.2] * 16)
    line = reach_lines([little])[0]
    assert line.startswith("unpatched: reads to at least 512, as far as so little text tells (too little text: with ")
    worse = of_buckets(*[3.0, 4.2] * 8, *[3.9, 5.1] * 8, factor=4.0, method="yarn")  # 82 % is less than chance
    (row,) = reach([little, worse])[1:]
    assert isinstance(row.loss, LossReach)
    assert (row.loss.length, row.loss.tolerance) == (256, pytest.approx(20.0))
    assert row.loss.tokens_needed
    assert row.loss_sentence().endswith(f". Measure about {row.loss.tokens_needed:,} tokens to be sure.")
    found = re.search(r"with 512 tokens scored, (\d+) % more or less is chance; about ([\d,]+) tokens are", line)
    assert found is not None
    # By hand: the buckets of the usual stretch have 0.69 nats between them, of 16 tokens each.
    needed = int(found[2].replace(",", ""))
    excused = math.log1p(int(found[1]) / 100)
    assert needed == pytest.approx(512 * (excused / math.log(1.2)) ** 2, rel=0.1)
    enough = of_buckets(*[3.0, 3.1] * 16)
    assert "reads to at least 512" in reach_lines([enough])[0]


def test_the_verdicts_stand_at_the_top_of_a_report(tmp_path: Path) -> None:
    records = [*smollm2("none"), *smollm2("yarn"), *answers(256, 19)]
    paths = report(records, tmp_path)
    sentences = ["unpatched: reads to 8k. To read further, extend it: hf", "yarn x2: reads to at least 16k, short"]
    for file in (paths.html, paths.markdown):
        text = re.sub("</?strong>", "", file.read_text()).replace("&nbsp;", " ")
        positions = [text.index(words) for words in ("In short", *sentences, "retrieves to at least 256 (passkey")]
        assert positions == sorted(positions)
        assert positions[-1] < text.index("Perplexity: ", positions[0] + 200)
    assert "<li><strong>yarn x2</strong>: reads to at least 16k, short texts (8k) cost" in paths.html.read_text()
    judged = "How the losses were judged: unpatched: perplexity by length, within 13 %; yarn x2: perplexity by length"
    assert judged in paths.markdown.read_text().replace("\xa0", " ").replace("&nbsp;", " ")
    only = report(smollm2("none"), tmp_path / "no-retrieval").markdown.read_text()
    assert "How far it retrieves" not in only
    markdown = report(answers(256, 19), tmp_path / "no-perplexity").markdown.read_text()
    assert "How far it reads" not in markdown


@pytest.mark.parametrize(
    ("factor", "broken_from", "added", "last"),
    [
        (4, 32, 0.0, "cost 0.0 %."),
        (4, 32, 0.009, "cost 0.9 %."),
        (4, 32, 0.012, "Where short texts matter, dynamic_yarn leaves them as they are."),
        (8, 32, 0.0, "Measure texts of 1k too."),
        (4, 16, 0.0, "Fine-tune it (hf-posenc finetune), or extend it less."),
        (4, 4, 0.0, "Fine-tune it (hf-posenc finetune), or take dynamic_yarn, which leaves short texts as they are."),
    ],
)
def test_a_sentence_ends_with_what_to_do_next(factor: float, broken_from: int, added: float, last: str) -> None:
    means = [(3.0, 3.04)[at % 2] for at in range(32)]
    changed = [mean + added + (2 if at >= broken_from else 0) for at, mean in enumerate(means)]
    rows = [
        record
        for name, losses in (("none", means), ("yarn", changed))
        for record in (
            of_buckets(*losses, factor=1.0 if name == "none" else factor, method=name),
            of_buckets(*losses[:8], factor=1.0 if name == "none" else factor, method=name),
        )
    ]
    assert reach(rows)[1].loss_sentence().endswith(last)


def test_no_verdict_goes_beyond_what_was_measured() -> None:
    """Documents of 506 tokens end within the bucket from 496 to 511."""
    assert "reads to at least 506 (" in reach_lines([of_buckets(*[3.0, 3.05] * 16, last=10)])[0]
    ten = of_buckets(*[3.0, 3.05] * 16, documents=10, last=100)
    assert "reads to at least 506 (" in reach_lines([ten])[0]


@pytest.mark.parametrize(
    ("factor", "broken_from", "expected"),
    [
        (4, 32, "reads to at least 512 ("),
        (2, 32, "reads to at least 512, past its target of 256 ("),
        (8, 32, "reads to at least 512, the longest measured; its target is 1k ("),
        (4, 16, "reads to 256, short of its target of 512 ("),
    ],
)
def test_a_verdict_is_held_against_the_target(factor: float, broken_from: int, expected: str) -> None:
    means = [(3.0, 3.02)[at % 2] + (2 if at >= broken_from else 0) for at in range(32)]
    plain, row = of_buckets(*means), of_buckets(*means, factor=factor, method="yarn")
    assert expected in reach_lines([plain, row])[1]


@pytest.mark.parametrize("changes", [{"average": "windows"}, {"key_tokens": {"chosen_by": "another model"}}])
def test_the_short_cost_is_of_numbers_made_alike(changes: dict[str, Any]) -> None:
    assert reach([*smollm2("none"), *smollm2("yarn")])[1].short_cost == pytest.approx(2.05, abs=0.01)
    assert reach([*smollm2("none"), *smollm2("yarn", **changes)])[1].short_cost is None
