"""Which methods are tried on a model, and what they are said to cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.comparing.candidates import Candidate, find_candidates
from hf_posenc.comparing.comparison import Plan, Step, make_plan, measure
from hf_posenc.comparing.config import CompareConfig
from hf_posenc.comparing.timing import Cost, fit, work_of
from hf_posenc.evaluation import perplexity
from hf_posenc.families.family_data import attention_capabilities
from hf_posenc.methods.registry import method_names, methods
from hf_posenc.patching.api import is_patched
from hf_posenc.utils.units import ContextLength, Duration, duration_name
from model_types import tiny_model
from tiny_llama import make_tiny_llama
from tiny_models import make_model

ZERO_SHOT_STATIC = {"ntk", "ntk_by_parts", "ntk_rcd", "yarn", "yarn_rcd", "llama3"}
IN_ATTENTION = {"dynamic", "dynamic_yarn", "self_extend", "dca", "rerope", "leaky_rerope"}


# What is tried


def names(model: Any, *methods: str, **more: Any) -> tuple[list[str], dict[str, str]]:
    found, left_out = find_candidates(model, {"context_length": 256, **more}, methods)
    assert not is_patched(model)
    return [one.method for one in found], left_out


def test_every_method_is_tried_or_named_with_its_reason() -> None:
    found, left_out = names(make_tiny_llama())
    assert found[0] == "none"
    assert set(found) == {"none"} | ZERO_SHOT_STATIC | IN_ATTENTION
    assert (
        set(left_out)
        == {"linear", "longrope", "abf", "fitted", "nope"}
        == set(methods()) - set(found) - method_names("is_encoding")
    )
    assert "needs fine-tuning" in left_out["linear"]
    assert "needs fine-tuning" in left_out["abf"]
    assert "needs long_factor" in left_out["longrope"]
    assert "needs source" in left_out["fitted"]


def test_an_encoding_in_place_of_rope_is_no_way_to_extend() -> None:
    assert names(make_tiny_llama(), "alibi", "yarn")[0] == ["none", "yarn"]
    assert "takes the place of RoPE" in names(make_tiny_llama(), "alibi", "yarn")[1]["alibi"]


def test_methods_can_be_chosen_even_those_that_want_training() -> None:
    assert names(make_tiny_llama(), "pi", "yarn", "none", "linear") == (["none", "linear", "yarn"], {})
    assert names(make_tiny_llama(), "none") == names(make_tiny_llama())
    found, left_out = names(make_tiny_llama(), "abf", "ntk")
    assert found == ["none", "ntk"]
    assert "rope_theta" in left_out["abf"]
    with pytest.raises(ValueError, match="'yarn'"):
        names(make_tiny_llama(), "yran")


def test_what_a_family_cannot_do_is_left_out_with_its_reason() -> None:
    model = make_model("Phi3")
    assert attention_capabilities()["phi3"] is None
    assert set(names(model)[0]) >= IN_ATTENTION
    latent = tiny_model("deepseek_v3")
    refusal = attention_capabilities()["deepseek_v3"]
    assert refusal is not None
    found, left_out = names(latent)
    assert set(found) == ({"none"} | ZERO_SHOT_STATIC) - {"yarn_rcd"}
    assert set(left_out) - {"linear", "longrope", "abf", "fitted", "nope"} == IN_ATTENTION | {"yarn_rcd"}
    assert "give attention_factor" in left_out["yarn_rcd"]
    assert left_out["dynamic_yarn"] == f"model_type 'deepseek_v3': {refusal.reason}"
    lines = plan_of(60, 60, left_out=left_out).text().splitlines()
    (shared,) = (line for line in lines if "'deepseek_v3'" in line)
    assert shared.startswith(
        "  dynamic, dynamic_yarn, dca, leaky_rerope, rerope, self_extend: model_type 'deepseek_v3'"
    )
    assert "  abf, linear, nope: needs fine-tuning" in lines


def test_a_model_that_nothing_suits_says_why_once() -> None:
    scaled = make_tiny_llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
        },
        max_position_embeddings=128,
    )
    with pytest.raises(ValueError, match="already scaled") as scaled_error:
        names(scaled)
    assert str(scaled_error.value).count("already scaled") == 1
    assert set(names(scaled, on_scaled="replace")[0]) >= ZERO_SHOT_STATIC
    # Two layers that look back 64 tokens each carry nothing over 256.
    windowed = make_model("Mistral", sliding_window=64)
    with pytest.raises(ValueError, match=r"128.*256"):
        names(windowed)
    assert "yarn" in names(windowed, sliding_window="off")[0]


# What it costs


def test_work_is_what_pytorch_counts() -> None:
    for tied in (True, False):
        model = make_tiny_llama(tie_word_embeddings=tied, attn_implementation="eager")
        work = work_of(model)
        for length in (32, 64):
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(input_ids=torch.ones(1, length, dtype=torch.long))
            # PyTorch counts all pairs of tokens; half of them are masked.
            assert work.linear * length + 2 * work.quadratic * length**2 == pytest.approx(
                counter.get_total_flops(), rel=0.01
            )


@pytest.mark.parametrize("law", [Cost(1e-3, 1e-6), Cost(0.0, 1e-6), Cost(5e-4, 2e-7)])
def test_the_law_of_two_passes_holds_for_a_long_one(law: Cost) -> None:
    work = Cost(linear=1000.0, quadratic=0.3)
    found = fit(work, (512, law.of(512)), (1024, law.of(1024)))
    assert found.of(32768) == pytest.approx(law.of(32768), rel=1e-6)
    assert found.of(65536) > 2 * found.of(32768)


def test_what_only_starting_costs_grows_as_the_operations_do() -> None:
    # Both passes take 10 ms: their growth says nothing, and a straight line would miss the attention.
    work = Cost(linear=1000.0, quadratic=0.5)
    found = fit(work, (64, 0.010), (128, 0.010))
    assert found.of(128) == pytest.approx(0.010)
    # By hand: (1000 x 4096 + 0.5 x 4096 ** 2) / (1000 x 128 + 0.5 x 128 ** 2) = 91.65 times as many operations.
    assert found.of(4096) == pytest.approx(0.9165, rel=1e-3)
    # A longer pass more than four times as slow: all of it is taken to be quadratic.
    assert fit(work, (64, 0.01), (128, 0.05)).of(1024) == pytest.approx(0.05 * 64)


def plan_of(*seconds: float, **changes: Any) -> Plan:
    methods = ("none", "yarn", "dca", "rerope")[: len(seconds)]
    rows = [None if method == "none" else {"method": method, "context_length": 512} for method in methods]
    steps = tuple(Step(Candidate(method, row), cost) for method, row, cost in zip(methods, rows, seconds, strict=True))
    plan = Plan(256, 512, (64, 128, 256, 512), (), 1, 0, steps, {"linear": "needs fine-tuning"}, (64, 128))
    return replace(plan, **changes)


def test_a_budget_drops_the_most_expensive_rows_and_says_so() -> None:
    plan = plan_of(60, 60, 200, 500).within(330)
    assert [step.name for step in plan.steps] == ["unpatched", "yarn", "dca"]
    assert plan.left_out["rerope"] == "over the budget of 5.5 min: it takes 8.3 min"
    assert plan.left_out["linear"] == "needs fine-tuning"
    assert plan_of(60, 60, 200).within(320) == plan_of(60, 60, 200)
    assert [step.name for step in plan_of(60, 60, 200, 500).within(120).steps] == ["unpatched", "yarn"]
    with pytest.raises(ValueError, match=r"2.0"):
        plan_of(60, 60, 200).within(119)


def test_a_plan_says_what_it_will_do() -> None:
    text = plan_of(60, 60, 200, num_prompts=10, retrieval_lengths=(256, 512)).text()
    assert "256 -> 512 tokens (x2)" in text
    assert "perplexity of 1 text at 64, 128, 256, 512" in text
    assert "retrieval: 10 prompts a row, at 256, 512" in text
    assert "passes of 64 and 128 tokens" in text
    assert text.splitlines()[-4].split() == ["total", "5.3", "min"]
    assert text.endswith("left out:\n  linear: needs fine-tuning")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("45", 45), (" 2 m ", 120)])
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert Duration(text) == seconds
    for wrong in ("", "m", "-1m", "20 minutes", "0"):
        with pytest.raises(ValueError, match="90s, 20m"):
            Duration(wrong)
    assert [duration_name(one) for one in (0.42, 45.2, 126, 5040, 7200)] == [
        "0.42 s",
        "45 s",
        "2.1 min",
        "84.0 min",
        "2.0 h",
    ]


def request(**changes: Any) -> CompareConfig:
    usual: dict[str, Any] = {"context_length": ContextLength(1024), "model_name": "tiny", "hide_progress": True}
    return CompareConfig(**{**usual, **changes})


@pytest.mark.slow  # times passes, so that it wants a quiet machine
def test_the_estimate_is_of_the_right_size() -> None:
    model, tokenizer = load_model(tiny_model_path(), dtype="float32")
    documents = [load_novel(HELD_OUT_NOVEL)[:20_000]]
    plan = make_plan(model, tokenizer, documents, request(methods=["yarn", "rerope"]))
    assert plan.timed[1] == 2 * plan.timed[0] <= 1024
    assert plan.lengths == (64, 128, 256, 512, 1024)
    assert [step.name for step in plan.steps[:1]] == ["unpatched"]
    (record,) = perplexity(model, documents, [1024], tokenizer=tokenizer, progress=False)
    assert record.seconds / 6 < plan.steps[0].seconds < record.seconds * 6
    by_name = {step.name: step.seconds for step in plan.steps}
    assert by_name["yarn"] == by_name["unpatched"]  # other numbers, the same work


def test_a_plan_for_what_needs_none_is_refused() -> None:
    model, tokenizer = load_model(tiny_model_path())
    with pytest.raises(ValueError, match=r"256.*256"):
        make_plan(model, tokenizer, ["a"], request(context_length=256))
    with pytest.raises(ValueError, match=r"1.*1024"):
        make_plan(model, tokenizer, ["a few words"], request())


def test_when_time_is_up_the_rest_is_left_out() -> None:
    model, tokenizer = load_model(tiny_model_path(), dtype="float32")
    documents = [load_novel(HELD_OUT_NOVEL)[:20_000]]
    rows, notes = measure(model, tokenizer, documents, request(context_length=512), plan_of(1, 1, 1), budget=0.0)
    assert list(rows) == ["none", "yarn"]
    assert notes[0] == "left out, for time is up: dca"
    assert [record.context_length for record in rows["yarn"]] == [64, 128, 256, 512]
    assert rows["yarn"][0].method == "yarn"
    assert not is_patched(model)
