"""A share of a training: the weights it has, how it is chosen, and what a run with ``keep`` saves and says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import patch_model
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.data.installed_texts import INSTALLED, pieces
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation import read_records
from hf_posenc.training import FinetuneConfig, blending, finetune
from hf_posenc.training.blending import SHORT_TEXTS, next_share, set_share
from hf_posenc.training.retaining import retained_texts
from hf_posenc.training.run_file import read_run
from hf_posenc.utils.dtypes import DtypeChoice, remember_choice
from tiny_models import load_tiny
from tiny_runs import assert_same_run


@pytest.fixture(autouse=True)
def few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blending, "PIECES", 6)


def tiny() -> Any:
    model = load_tiny()
    return model, AutoTokenizer.from_pretrained(tiny_model_path())


def run(folder: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {"method": "ntk", "factor": 1.001, "token_budget": 8 * 256, "seq_len": 256}
    given |= {"learning_rate": 5e-4, "warmup_steps": 1, "eval_documents": 2, "eval_lengths": [256], "save_steps": 100}
    given |= {"task_mix": ["kv=1"]}
    text = load_novel("emma")[:60_000]
    return finetune(*tiny(), [text], FinetuneConfig(str(folder), **{**given, **changes}))


@torch.no_grad()
def perplexity_of(model: Any, ids: torch.Tensor) -> float:
    """As Transformers computes it."""
    return float(model(ids, labels=ids).loss.exp())


def test_weights_lie_on_the_line_between_both_models() -> None:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    before, after = (
        {name: torch.randn(p.shape, generator=generator).bfloat16() for name, p in model.named_parameters()}
        for _ in range(2)
    )
    for share in (0.0, 0.25, 0.85, 1.0):
        set_share(model, before, after, share)
        for name, weight in model.named_parameters():
            by_hand = (1 - share) * before[name].double() + share * after[name].double()
            torch.testing.assert_close(weight.double(), by_hand, rtol=2**-8, atol=0)  # of bfloat16
    assert all(torch.equal(weight, after[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize(
    ("of_kinds", "limit", "kept", "at_most"),
    [
        # By how much perplexity rises, in percent: without a training, by the share, and by its square.
        ([(0, 0, 10), (0, 2, 1)], 2.5, 10, 3),
        ([(0, 0, 10), (0, 2, 1)], 0.5, 4, 4),
        ([(3, -9, 10), (1, 0, 3)], 1.5, 8, 5),  # a training that lowers what its rule costs
        ([(3, -9, 10), (1, 0, 3)], 0.5, 6, 5),  # no share is within, and 6 costs least
        ([(0, 0, 10)], 12.0, 20, 1),
        ([(5, -3, 0)], 1.0, 20, 2),  # the whole costs least
    ],
)
def test_few_shares_are_tried(of_kinds: list[tuple[float, ...]], limit: float, kept: int, at_most: int) -> None:
    def cost(steps: int) -> list[float]:
        share = steps / 20
        return [none + linear * share + square * share**2 for none, linear, square in of_kinds]

    found, following = {0: cost(0)}, 20
    while following is not None:
        found[following] = cost(following)
        following = next_share(found, limit)
    within = [steps for steps in found if max(found[steps]) <= limit]
    assert (max(within) if within else min(found, key=lambda steps: max(found[steps]))) == kept
    by_trying_all = [steps for steps in range(21) if max(cost(steps)) <= limit]
    assert (max(by_trying_all) if by_trying_all else min(range(21), key=lambda steps: max(cost(steps)))) == kept
    assert len(found) - 1 <= at_most


def test_of_an_adapter_the_product_is_scaled() -> None:
    from peft import LoraConfig, get_peft_model

    base, _ = tiny()
    name = "model.layers.0.self_attn.q_proj"
    weight = base.get_submodule(name).weight.detach().double().clone()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    start = {key: p.detach().clone() for key, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(0)
    trained = {key: value + torch.randn(value.shape, generator=generator) / 10 for key, value in start.items()}
    set_share(model, start, trained, 1.0)
    layer = base.get_submodule(name)
    whole = layer.get_delta_weight("default").detach().double()
    set_share(model, start, trained, 0.3)
    changed = model.merge_and_unload().get_submodule(name).weight.detach().double() - weight
    torch.testing.assert_close(changed, 0.3 * whole, rtol=1e-4, atol=1e-6)


def test_pieces_of_texts_come_from_many_places() -> None:
    _, tokenizer = tiny()
    numbered = [f"{number} " * 400 for number in range(100, 148)]
    found = pieces(["short", *numbered], tokenizer, 64, 12)
    firsts = [int(tokenizer.decode(piece).split()[0]) for piece in found]
    assert firsts == list(range(100, 148, 4))
    assert pieces(["short"], tokenizer, 64, 12) == []


@pytest.mark.parametrize("kind", INSTALLED)
def test_every_machine_has_texts_of_its_own(kind: str) -> None:
    found = pieces(INSTALLED[kind](), tiny()[1], 64, 12)
    assert [len(piece) for piece in found] == [64] * 12
    assert len({tuple(piece.tolist()) for piece in found}) >= 6


def test_so_much_of_a_training_is_kept_as_short_texts_allow(tmp_path: Path) -> None:
    own = retained_texts(*tiny(), 6 * 256, 256, seed=1).ids  # what the model with seed 0 is measured on
    whole = run(tmp_path / "whole")
    kept = run(tmp_path / "kept", keep="1%")
    before, trained, blended = (perplexity_of(model, own) for model in (tiny()[0], whole.model, kept.model))
    assert blended / before <= 1.0101  # it allows for a mean of other tokens
    assert trained / before > 1.03
    blend = kept.blend
    assert 0 < blend.share < 1
    assert blend.is_within
    assert blend.differences[blend.share]["the model's own texts"].value == pytest.approx(blended / before, abs=2e-3)
    assert set(blend.differences[blend.share]) == {"held-out documents", "the model's own texts", *INSTALLED}
    larger = min(share for share in blend.differences if share > blend.share)
    assert max(ratio.value for ratio in blend.differences[larger].values()) > 1.01
    assert len(blend.differences) <= 6
    parts = {"method": "ntk", "factor": 1.001}
    start, end = dict(tiny()[0].named_parameters()), dict(whole.model.named_parameters())
    for name, weight in kept.model.named_parameters():
        torch.testing.assert_close(weight, torch.lerp(start[name], end[name], blend.share), rtol=1e-5, atol=1e-6)
    records = read_records(tmp_path / "kept" / SHORT_TEXTS)
    assert {(one.method, one.tokens_trained) for one in records} == {
        ("none", 0),
        (parts["method"], 0),
        (parts["method"], 2048),
    }
    card = (tmp_path / "kept/README.md").read_text("utf-8")
    assert "## Short texts" in card
    assert str(blend.differences[blend.share]["code"]) in card
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    assert perplexity_of(saved, own) == pytest.approx(blended, rel=1e-4)


def test_a_limit_that_is_not_reached_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path / "without", learning_rate=1e-4)
    result = run(tmp_path / "with", learning_rate=1e-4, keep=0.5)
    assert result.blend.share == 1
    assert_same_run(tmp_path / "without", tmp_path / "with", 8)


def test_the_last_stage_is_compared_with_the_untrained_model_under_its_rule(tmp_path: Path) -> None:
    """Under that of the first stage it costs less, and nothing of the training would be kept."""
    given = {"method": "linear", "factor": None, "seq_len": None, "keep": 0.5, "eval_lengths": [256]}
    result = run(tmp_path, **given, stages=["512:1024", "1024:2048"])
    own = retained_texts(*tiny(), 6 * 256, 256, seed=1).ids
    before = perplexity_of(tiny()[0], own)
    costs = {factor: perplexity_of(patch_model(tiny()[0], "linear", factor), own) for factor in (2, 4)}
    measured = result.blend.differences[0]["the model's own texts"].value
    assert costs[4] / before == pytest.approx(measured, rel=5e-3)
    assert costs[2] < 0.9 * costs[4]


def test_an_extension_that_costs_more_is_said_before_and_the_best_share_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = run(
            tmp_path,
            method="linear",
            factor=4,
            seq_len=512,
            token_budget=16 * 512,
            keep=0.01,
            lora=True,
            learning_rate=4e-3,
        )
    assert "before this training the model costs" in caplog.text
    blend = result.blend
    assert not blend.is_within
    worst = {share: max(ratio.value for ratio in of.values()) for share, of in blend.differences.items()}
    assert {0, 0.5, 1} < set(worst)
    assert worst[blend.share] == min(worst.values()) < worst[0]
    assert "no share is" in caplog.text


@pytest.mark.parametrize("given", ["x", "101%", -0.1])
def test_a_limit_is_a_share(tmp_path: Path, given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="keep"):
        FinetuneConfig(str(tmp_path), keep=given)
    assert FinetuneConfig(str(tmp_path), keep="1%").keep == FinetuneConfig(str(tmp_path), keep=0.01).keep == 0.01


def test_a_run_file_may_give_the_limit_in_percent(tmp_path: Path) -> None:
    for words, value in (('"1.5%"', 0.015), ("0.015", 0.015), ("1", 1.0)):
        (tmp_path / "run.toml").write_text(f"keep = {words}\n")
        assert read_run(tmp_path / "run.toml", (FinetuneConfig,)) == {"keep": value}


def test_a_share_is_measured_as_it_is_saved() -> None:
    """On a CPU without bfloat16 a checkpoint in it is widened, and its weights are rounded when they are saved."""
    model, _ = tiny()
    remember_choice(model, DtypeChoice(torch.float32, torch.bfloat16, "this CPU has no bfloat16"))
    limit = blending.RetentionLimit({}, 0.01)
    limit.remember(model)
    trained = {name: weight.detach() * 1.001 for name, weight in model.named_parameters()}
    limit._set(model, trained, 10)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, torch.lerp(limit._start[name], trained[name], 0.5).bfloat16().float())
