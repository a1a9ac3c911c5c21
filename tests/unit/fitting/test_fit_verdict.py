"""Whether a fitted rule is better: on records made by hand, of 8 documents whose hardness differs by 10 %."""

from __future__ import annotations

import math

import pytest

from hf_posenc.evaluation.records import Record
from hf_posenc.fitting.verdict import judge
from report_records import make_record


def row(method: str, **perplexities: float) -> list[Record]:
    """Records at the lengths named ``at256`` and so on."""
    return [make_record(method, int(name[2:]), value) for name, value in perplexities.items()]


def test_better() -> None:
    rows = {
        "fitted": row("fitted", at64=41, at256=40, at1024=40),
        "none": row("none", at64=40, at256=39.9),
        "ntk": row("ntk", at64=60, at256=60, at1024=64),
        "yarn": row("yarn", at64=41, at256=60, at1024=55),
    }
    verdict = judge(rows)
    assert (verdict.better, verdict.best) == (True, "fitted")
    first, short, original, cost = verdict.lines
    share = 100 * (40 / 55 - 1)
    assert first.startswith(f"the fitted rule is better than every compared rule at 1k: {share:.1f} %")
    assert "against yarn, the next" in first
    assert short.startswith("at 64: no difference from yarn")
    assert original.startswith("at 256: better than")
    assert cost.startswith("cost against the unextended model: +2.5 %")
    assert "at 64" in cost
    assert "+0.3 %" in cost
    assert "at 256" in cost


def test_a_tie() -> None:
    rows = {"fitted": row("fitted", at1024=40), "ntk": row("ntk", at1024=60), "yarn": row("yarn", at1024=40.5)}
    verdict = judge(rows)
    assert (verdict.better, verdict.best) == (None, "fitted")
    assert verdict.lines[0].startswith("at 1k the fitted rule cannot be told apart from yarn: -1.2 %")


def test_a_sure_difference_that_is_worth_nothing_is_a_tie() -> None:
    ours, other = make_record("fitted", 1024, 40), make_record("fitted", 1024, 40.1)  # each document 0.25 % better
    verdict = judge({"fitted": [ours], "yarn": [other]})
    assert verdict.better is None


@pytest.mark.parametrize("better", ["ntk", "yarn"])
def test_worse(better: str) -> None:
    other = "yarn" if better == "ntk" else "ntk"
    rows = {
        "fitted": row("fitted", at256=40, at1024=50),
        other: row(other, at256=60, at1024=60),
        better: row(better, at256=39, at1024=35),
        "none": row("none", at256=30),
    }
    verdict = judge(rows)
    assert (verdict.better, verdict.best) == (False, better)
    assert verdict.lines[0].startswith(f"{better} is better than the fitted rule at 1k: the fitted rule has +42.9 %")
    assert verdict.lines[-1].startswith("cost against the unextended model: +33.3 %")


def test_the_better_one_is_one_of_a_clear_difference() -> None:
    """yarn has the lowest perplexity, but its difference may be nothing; each document is 2 % better under ntk."""
    ours, yarn = make_record("fitted", 1024, 40), make_record("yarn", 1024, 39)
    nats = [one - 1023 * math.log(1 / 0.98) for one in ours.unit_nll]
    verdict = judge({"fitted": [ours], "yarn": [yarn], "ntk": [make_record("ntk", 1024, 40 * 0.98, unit_nll=nats)]})
    assert (verdict.better, verdict.best) == (False, "ntk")
    assert verdict.lines[0].startswith("ntk is better than the fitted rule at 1k: the fitted rule has +2.0 %")


def test_the_unextended_model_is_no_rival() -> None:
    verdict = judge({"fitted": row("fitted", at256=25, at1024=50), "none": row("none", at256=20)})
    assert (verdict.better, verdict.best) == (None, "fitted")
    [line] = verdict.lines
    assert line.startswith("cost against the unextended model: +25.0 %")


def test_the_ratio_is_paired() -> None:
    """Documents that are hard for both do not blur the difference: each is 2 % better here."""
    ours = make_record("fitted", 1024, 40)
    nats = [one - 1023 * math.log(1 / 0.98) for one in ours.unit_nll]
    better = make_record("fitted", 1024, 40 * 0.98, unit_nll=nats)
    verdict = judge({"fitted": [better], "yarn": [ours]})
    assert verdict.better is True
