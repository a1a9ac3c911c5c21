"""The other programs the benchmark times give our numbers: a comparison of times means nothing otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from lm_eval_packages import find_lm_eval


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark, small."""
    import benchmark_evaluation

    for name, value in {"DOCUMENTS": 2, "DOCUMENT_TOKENS": 300, "LENGTHS": [40, 100], "WINDOW": 64}.items():
        monkeypatch.setattr(benchmark_evaluation, name, value)
    yield benchmark_evaluation
    del sys.modules["benchmark_evaluation"]


def test_the_yarn_authors_procedure_and_evaluate_give_our_numbers(benchmark: ModuleType) -> None:
    inputs = benchmark.Inputs()
    assert [len(row) for row in inputs.ids] == pytest.approx([300, 300], abs=3)
    for theirs, mine in (
        (benchmark.yarn_curve, benchmark.ours_curve),
        (benchmark.evaluate_one_length, benchmark.ours_one_length),
    ):
        assert theirs(inputs) == pytest.approx(mine(inputs), rel=1e-5)
    pooled = benchmark.ours(inputs, [100], bos="prepended")[100]
    assert pooled < benchmark.evaluate_one_length(inputs)[100] * (1 - 1e-3)  # as the table says


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # lm-eval's own
def test_lm_eval_gives_our_number(benchmark: ModuleType) -> None:
    find_lm_eval()
    inputs = benchmark.Inputs()
    assert benchmark.lm_eval_rolling(inputs) == pytest.approx(benchmark.ours_rolling(inputs), rel=1e-5)
