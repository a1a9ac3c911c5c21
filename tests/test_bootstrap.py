"""Intervals: how wide, how often right, over what."""

from __future__ import annotations

import math

import pytest
import torch

from hf_posenc.evaluation import perplexity
from hf_posenc.evaluation.bootstrap import block_totals, bootstrap_interval, interval_over


def measure(model, documents):
    return perplexity(model, documents, [20], progress=False)[0]


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
    assert interval_over([(sums, counts)])[2] == "blocks"
