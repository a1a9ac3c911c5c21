"""Intervals: how wide, how often right, over what."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from hf_posenc.evaluation import Record, paired_interval, perplexity
from hf_posenc.evaluation.intervals import block_totals, bootstrap_interval, is_tie, resampled_units
from report_records import make_record


def measure(model, documents, protocol="truncated", **settings):
    return perplexity(model, documents, [20], protocol, progress=False, **settings)[0]


def random_documents(count):
    return list(torch.randint(1, 128, (count, 40), generator=torch.Generator().manual_seed(1)))


def test_interval_widens_with_the_spread_and_vanishes_without():
    counts = [100] * 20
    narrow = bootstrap_interval([300.0 + (-1) ** i for i in range(20)], counts)
    wide = bootstrap_interval([300.0 + 10 * (-1) ** i for i in range(20)], counts)
    assert wide[0] < narrow[0] < math.exp(3) < narrow[1] < wide[1]
    assert bootstrap_interval([300.0] * 20, counts) == pytest.approx((math.exp(3), math.exp(3)), rel=1e-12)
    assert bootstrap_interval([300.0, 310.0], [100, 100], seed=1) == bootstrap_interval(
        [300.0, 310.0], [100, 100], seed=1
    )


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """95 % intervals of samples whose true perplexity is known: near 95 % must hold it."""
    generator = torch.Generator().manual_seed(3)
    hits = 0
    for sample in range(200):
        sums = (300 + 20 * torch.randn(40, generator=generator)).tolist()
        low, high = bootstrap_interval(sums, [100] * 40, seed=sample)
        hits += low < math.exp(3) < high
    assert 0.88 < hits / 200 < 0.99


def test_interval_is_over_documents_only_where_there_are_enough(tiny_llama):
    model = tiny_llama()
    assert measure(model, random_documents(4)).ci_unit == "blocks"
    record = measure(model, random_documents(5))
    assert record.ci_unit == "documents"
    assert record.ci_low < record.perplexity < record.ci_high
    same = measure(model, random_documents(1) * 5)
    assert same.ci_low == pytest.approx(same.perplexity, rel=1e-12)
    assert same.ci_high == pytest.approx(same.perplexity, rel=1e-12)


@pytest.mark.parametrize(("num_tokens", "sizes"), [(3, [1, 1, 1]), (63, [15, 15, 15, 15, 3]), (1024, [32] * 32)])
def test_blocks(num_tokens, sizes):
    losses = torch.rand(num_tokens)
    sums, counts = block_totals(losses)
    assert counts == sizes
    assert sum(sums) == pytest.approx(losses.double().sum().item(), rel=1e-12)
    assert resampled_units([(sums, counts)]) == (sums, counts, "blocks")


@pytest.mark.parametrize(("count", "unit"), [(6, "documents"), (2, "blocks")])
@pytest.mark.parametrize("average", ["tokens", "windows"])
def test_a_pair_is_compared_unit_by_unit(tiny_llama, count, unit, average):
    documents = random_documents(count)
    one, other = (
        measure(model, documents, "sliding_window", stride=7, max_tokens=40, average=average)
        for model in (tiny_llama(), tiny_llama(num_hidden_layers=1))
    )
    ratio = paired_interval(one, other)
    assert (ratio.value, ratio.ci_unit) == (one.perplexity / other.perplexity, unit)
    assert ratio.ci_low < ratio.value < ratio.ci_high
    units = torch.tensor([one.unit_nll, other.unit_nll, one.unit_tokens], dtype=torch.float64)
    assert math.exp(units[0].sum() / units[2].sum()) == pytest.approx(one.perplexity, rel=1e-12)
    drawn = torch.randint(units.shape[1], (20000, units.shape[1]))  # resampled by hand, another time
    ratios = torch.exp((units[0][drawn].sum(1) - units[1][drawn].sum(1)) / units[2][drawn].sum(1))
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert [ratio.ci_low, ratio.ci_high] == pytest.approx([low, high], abs=0.15 * (high - low))


def test_a_shift_that_all_units_share_is_clear_although_the_units_differ(tiny_llama):
    record = measure(tiny_llama(), random_documents(6))
    nats = [nll + 0.001 * tokens for nll, tokens in zip(record.unit_nll, record.unit_tokens, strict=True)]
    worse = replace(record, unit_nll=nats, perplexity=record.perplexity * math.exp(0.001))
    assert worse.perplexity < record.ci_high  # one by one they cannot be distinguished
    ratio = paired_interval(worse, record)
    assert (ratio.ci_low, ratio.value, ratio.ci_high) == pytest.approx([math.exp(0.001)] * 3, rel=1e-9)
    assert ratio.is_clear
    assert not paired_interval(record, record).is_clear


def test_only_the_same_tokens_make_a_pair(tiny_llama):
    record, other = (measure(tiny_llama(), random_documents(count)) for count in (6, 7))
    with pytest.raises(ValueError, match="text_hash"):
        paired_interval(record, other)
    with pytest.raises(ValueError, match=r"\('tokens'.*'windows'\)"):
        paired_interval(record, replace(record, average="windows"))
    with pytest.raises(ValueError, match="unit_tokens differs"):
        paired_interval(record, replace(record, unit_tokens=[1]))


def test_records_of_other_key_tokens_tie_where_their_own_intervals_meet():
    one = make_record("yarn", perplexity=40.0)  # 38 to 42
    for value, ties in ((44.0, True), (45.0, False)):  # from 41.8, and from 42.75
        other = make_record("ntk", perplexity=value)
        other = replace(other, unit_tokens=[other.unit_tokens[0] + 1, *other.unit_tokens[1:]])
        assert is_tie(one, other) == is_tie(other, one) == ties


def test_a_line_without_units_is_no_record():
    values = json.loads(make_record().to_json())
    del values["unit_nll"]
    with pytest.raises(ValueError, match="unit_nll"):
        Record.from_values(values)
