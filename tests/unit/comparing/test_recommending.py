"""What is recommended, from constructed rows whose answer is known by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hf_posenc.comparing.candidates import OTHER, STAGED, STATIC, UNPATCHED
from hf_posenc.comparing.recommending import recommend
from hf_posenc.evaluation import Record, paired_interval
from report_records import make_record
from report_records import make_retrieval_record as make_answer

BUCKETS = 32
TEXT = [3.0 + 0.15 * math.sin(7 * at) for at in range(BUCKETS)]  # nats of the buckets of 16k tokens


def row(method: str, *more: float, jitter: float = 0.0, right: tuple[int, int] | None = None) -> list[Any]:
    """A row whose loss is that of the text plus ``more`` below and above the original length, of 8k."""
    below, above = more
    nats = [512 * (TEXT[at] + (below if at < BUCKETS // 2 else above) + jitter * (-1) ** at) for at in range(BUCKETS)]

    def record(count: int) -> Record:
        mean = math.fsum(nats[:count]) / (512 * count)
        return make_record(
            method,
            512 * count,
            math.exp(mean),
            factor=1.0 if method == "none" else 2.0,
            original_max_position_embeddings=8192,
            num_documents=1,
            n_tokens=512 * count,
            nll_sum=math.fsum(nats[:count]),
            position_bucket=512,
            position_nll=nats[:count],
            position_tokens=[512] * count,
            unit_nll=nats[:count],
            unit_tokens=[512] * count,
        )

    found = () if right is None else range(right[1])
    prompts = [make_answer(method, 16384, 0.0, at, at < (right or (0, 0))[0]) for at in found]
    return [record(BUCKETS // 2), record(BUCKETS), *prompts]


BROKEN = row("none", 0.0, 2.0)


def take(**rows: list[Any]) -> Any:
    kinds = {"none": UNPATCHED, "dynamic_yarn": STAGED, "dca": OTHER}
    return recommend(rows, {name: kinds.get(name, STATIC) for name in rows})


def test_a_difference_is_paired() -> None:
    # 1 % on every bucket: the text's own variation, 0.35 nats a bucket, drops out.
    one, other = row("yarn", 0.01, 0.01)[1], row("ntk", 0.0, 0.0)[1]
    found = paired_interval(one, other)
    assert (found.value, found.ci_low, found.ci_high) == pytest.approx([math.exp(0.01)] * 3)
    assert str(found) == "+1.0 % (+1.0 to +1.0)"
    assert not found.is_tie
    # The same 1 % in the mean, of +21 % and -19 % alternately, may be nothing.
    noisy = paired_interval(row("yarn", 0.01, 0.01, jitter=0.2)[1], other)
    assert noisy.value == pytest.approx(math.exp(0.01))
    assert noisy.ci_low < 1 < noisy.ci_high
    assert noisy.is_tie
    # By hand: 32 units of sd 0.2, so the mean's is 0.2 / sqrt(32) and the interval 1.96 of it on either side.
    assert noisy.ci_high - noisy.ci_low == pytest.approx(2 * 1.96 * 0.2 / math.sqrt(32), rel=0.15)
    with pytest.raises(ValueError, match="text_hash"):
        paired_interval(replace(one, text_hash="other"), other)


def test_the_lowest_is_taken_and_what_servers_run_is_named() -> None:
    found = take(
        none=BROKEN, yarn=row("yarn", 0.02, 0.02), ntk=row("ntk", 0.03, 0.03), dynamic_yarn=row("dynamic_yarn", 0, 0)
    )
    assert (found.method, found.best, found.served, found.ties) == (
        "dynamic_yarn",
        "dynamic_yarn",
        "yarn",
        ("dynamic_yarn",),
    )
    why, short, servers = found.lines
    assert why.startswith("take dynamic_yarn: perplexity ")
    assert why.endswith("the lowest")
    assert f"unpatched {BROKEN[1].perplexity:.2f}" in why
    assert short == "short texts (8k) cost 0.0 %"
    assert "yarn is the best: +2.0 % (+2.0 to +2.0)" in servers


def test_static_comes_before_staged_where_they_tie() -> None:
    tie = take(none=BROKEN, yarn=row("yarn", 0.01, 0.01, jitter=0.1), dynamic_yarn=row("dynamic_yarn", 0, 0))
    assert (tie.method, tie.best, tie.ties) == ("yarn", "dynamic_yarn", ("yarn", "dynamic_yarn"))
    assert "a tie with the lowest, dynamic_yarn: +1.0 %" in tie.lines[0]
    assert "every server runs it" in tie.lines[0]
    assert tie.lines[1] == "short texts (8k) cost 1.0 %"
    sure = take(none=BROKEN, yarn=row("yarn", 0.01, 0.01), dynamic_yarn=row("dynamic_yarn", 0, 0))
    assert sure.method == "dynamic_yarn"


def test_what_is_too_little_to_matter_is_a_tie_however_sure() -> None:
    rows = {"none": BROKEN, "dynamic_yarn": row("dynamic_yarn", 0, 0.0)}
    assert take(**rows, dca=row("dca", -0.003, -0.003)).method == "dynamic_yarn"
    assert take(**rows, dca=row("dca", -0.02, -0.02)).method == "dca"


def test_a_model_that_needs_no_method_is_left_as_it_is() -> None:
    found = take(none=row("none", 0, 0.001), yarn=row("yarn", 0.01, 0.0))
    assert (found.method, found.best) == ("none", "none")
    assert found.lines[0].startswith("take the model as it is")
    assert found.holds
    assert not take(none=BROKEN, yarn=row("yarn", 0.0, 2.5)).holds
    better_beyond = take(none=row("none", 0, 0.2), yarn=row("yarn", 0.01, 0.0))
    assert better_beyond.method == "yarn"


def test_too_little_text_is_no_verdict_on_how_far_it_reads() -> None:
    noisy = [0.6 * (-1) ** (at // 4) for at in range(BUCKETS)]

    def of(method: str) -> list[Any]:
        one = row(method, 0, 0)[-1]
        nats = [512 * (3 + more) for more in noisy]
        return [replace(one, position_nll=nats, unit_nll=nats, nll_sum=sum(nats), perplexity=math.exp(3))]

    found = take(none=of("none"), yarn=of("yarn"))
    assert found.method == "none"
    assert found.holds is None


def test_who_retrieves_less_is_out() -> None:
    found = take(
        none=[*BROKEN, *row("none", 0, 2, right=(0, 20))[2:]],
        yarn=row("yarn", 0.02, 0.02, right=(19, 20)),
        dca=row("dca", 0, 0, right=(8, 20)),
        ntk=row("ntk", 0.05, 0.05, right=(17, 20)),
    )
    # 8 of 20 is at most 61 % and 19 of 20 at least 76 %; 17 of 20 may be as good.
    assert (found.method, found.best) == ("yarn", "yarn")
    assert "the lowest of those that retrieve; there it retrieves 95 % (76–99)" in found.lines[0]
    assert found.lines[-1].endswith("the model as it is 0 % (0–16), dca 40 % (22–61)")


def test_it_says_where_the_best_ends() -> None:
    found = take(none=BROKEN, linear=row("linear", 0.7, 0.7), yarn=row("yarn", 0.6, 0.6))
    assert found.method == "yarn"
    assert any("worse than unpatched at the original length already: fine-tune it" in line for line in found.lines)
    ends = take(none=BROKEN, yarn=row("yarn", 0.0, 1.0))
    assert any("without training it reads to 8k only: fine-tune it" in line for line in ends.lines)


def test_nothing_to_choose_by() -> None:
    with pytest.raises(ValueError, match="no perplexity"):
        take(none=BROKEN, yarn=row("yarn", 0, 0, right=(1, 1))[2:])
