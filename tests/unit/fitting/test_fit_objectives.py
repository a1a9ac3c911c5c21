"""What a fit lowers: losses against Transformers' own, their direction, the registry, and weights as words."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.functional import cross_entropy

from attention_models import ORIGINAL, sharp_model
from hf_posenc.errors import UnknownNameError
from hf_posenc.fitting.config import OBJECTIVES, FitConfig
from hf_posenc.fitting.hidden_numbers import HiddenNumber
from hf_posenc.fitting.objectives import get_objective, objectives, register_objective
from hf_posenc.fitting.objectives.base import Objective
from hf_posenc.fitting.problem import FitProblem
from rule_fits import TARGET, TEXT, fitting, recorded, rule_equal_to
from tiny_models import logits, native, token_ids

CONFIG = FitConfig(context_length=TARGET, block=32, queries=16, layers=2, questions=6, short_share=0.5)
NEEDLES = [
    HiddenNumber(10, [5, 6, 7], [8, 9]),
    HiddenNumber(90, [5, 6], [10, 11]),
    HiddenNumber(200, [5, 7, 9], [8, 12, 4]),
]


def with_needles(problem: FitProblem) -> FitProblem:
    problem.needles = [NEEDLES]
    return problem


def loss_of(objective: Objective) -> torch.Tensor:
    return torch.stack(list(objective.losses())).sum()


def test_every_objective_is_registered() -> None:
    assert set(objectives()) == set(OBJECTIVES)
    assert all(kind.name == name for name, kind in objectives().items())


@pytest.mark.parametrize("teacher", ["dca", None])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_against_the_gradient_lowers_the_loss(tmp_path: Path, name: str, teacher: str | None) -> None:
    model = sharp_model("Llama")
    recording = recorded(model, tmp_path / "teacher", teacher)
    rule = rule_equal_to(model, "ntk")
    with fitting(model, rule, recording) as problem:
        objective = get_objective(name)(with_needles(problem), CONFIG)
        state, drawn = problem.generator.get_state(), objective.state()
        losses = list(objective.losses())
        assert losses
        assert all(float(loss.detach()) > 0 for loss in losses)
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        gradient = rule.log_divisors.grad
        assert gradient is not None
        assert bool(gradient.isfinite().all())
        with torch.no_grad():
            rule.log_divisors -= 1e-3 * gradient / gradient.norm()
            problem.generator.set_state(state)
            objective.load_state(drawn)
            after = float(loss_of(objective))
        before = float(sum(loss.detach() for loss in losses))
        # To first order it falls by 1e-3 times the norm; the second order may take half of it.
        assert after < before - 0.5e-3 * float(gradient.norm())


@pytest.mark.parametrize("method", ["ntk", "yarn"])
def test_losses_are_those_of_transformers_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A rule of a published method's numbers, over recordings of that method."""
    model = sharp_model("Llama")
    built = native(model, method, 4)
    nats = cross_entropy(logits(built, TEXT)[0, :-1], TEXT[0, 1:], reduction="none")
    recording = recorded(model, tmp_path / "teacher", method)
    with torch.no_grad(), fitting(model, rule_equal_to(model, method), recording) as problem:
        with_needles(problem)
        monkeypatch.setattr(problem, "place", lambda *args: 150)
        monkeypatch.setattr(problem, "integer", lambda low, high: 0)
        found = {name: float(loss_of(kind(problem, CONFIG))) for name, kind in objectives().items()}
    assert found["full_length"] == pytest.approx(float(nats.mean()), rel=1e-5)
    assert found["last_block"] == pytest.approx(float(nats[150:182].mean()), rel=1e-5)
    assert found["short_blocks"] == pytest.approx(float(nats[:31].mean()), rel=1e-5)
    assert found["teacher_tokens"] == pytest.approx(0, abs=1e-6)
    assert found["attention_matching"] == pytest.approx(0, abs=1e-8)
    # The same draws of needles: those that end within 150 tokens, each asked for behind them.
    drawn = torch.randint(2, (CONFIG.questions,), generator=problem_generator()).tolist()
    losses = []
    for needle in (NEEDLES[index] for index in drawn):
        asked = torch.tensor([[*TEXT[0, :150].tolist(), *needle.question, *needle.answer]])
        rows = logits(built, asked)[0, -len(needle.answer) - 1 : -1]
        losses.append(float(cross_entropy(rows, torch.tensor(needle.answer))))
    assert set(drawn) == {0, 1}
    wanted = sum(losses) / len(losses)
    with torch.no_grad(), fitting(model, rule_equal_to(model, method), recording) as problem:
        with_needles(problem)
        monkeypatch.setattr(problem, "place", lambda *args: 150)
        monkeypatch.setattr(problem, "integer", lambda low, high: 0)
        assert float(loss_of(get_objective("needles")(problem, CONFIG))) == pytest.approx(wanted, rel=1e-5)


def problem_generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_teacher_tokens_is_a_divergence_from_the_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp_model("Llama")
    recording = recorded(model, tmp_path / "teacher", "ntk")
    with torch.no_grad(), fitting(model, rule_equal_to(model, "yarn"), recording) as problem:
        monkeypatch.setattr(problem, "place", lambda *args: 0)
        found = float(loss_of(get_objective("teacher_tokens")(problem, CONFIG)))
    # A block at the very beginning has nothing before it: both are whole models.
    teacher, student = (
        logits(native(model, one, 4), TEXT[:, :32])[0].double().log_softmax(-1) for one in ("ntk", "yarn")
    )
    assert found == pytest.approx(float((teacher.exp() * (teacher - student)).sum(-1).mean()), rel=1e-4)


def test_attention_matching_weighs_queries_alike_and_draws_every_layer_before_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharp_model("Llama", num_hidden_layers=5)
    recording = recorded(model, tmp_path / "teacher", "dca")
    replayed: list[tuple[int, int, int]] = []
    errors: list[torch.Tensor] = []
    with torch.no_grad(), fitting(model, rule_equal_to(model, "ntk"), recording) as problem:
        replay = problem.attention.replay

        def noting(module: Any, recording: Any, rows: torch.Tensor) -> Any:
            positions = recording.query_positions[rows]
            short = int((positions < ORIGINAL).sum())
            replayed.append((module.layer_idx, short, len(rows) - short))
            found, wanted = replay(module, recording, rows)
            errors.append((found - wanted).double().square().sum() / wanted.double().square().sum())
            return found, wanted

        monkeypatch.setattr(problem.attention, "replay", noting)
        config = FitConfig(context_length=TARGET, queries=20, layers=2, short_share=0.3)
        objective = get_objective("attention_matching")(problem, config)
        for _ in range(2):
            errors.clear()
            loss = float(loss_of(objective))
            # Of two layers, 6 of 20 queries in short texts and 14 in long ones.
            wanted = 6 * (errors[0] + errors[2]) + 14 * (errors[1] + errors[3])
            assert loss == pytest.approx(float(wanted) / 40, rel=1e-5)
            assert abs(errors[0] - errors[1]) > 0.1 * errors[1]
    assert {(short, long) for _, short, long in replayed} == {(6, 0), (0, 14)}
    assert len({index for index, *_ in replayed}) == 4


def test_blocks_begin_within_the_text(tmp_path: Path) -> None:
    model = sharp_model("Llama")
    with fitting(model, rule_equal_to(model, "ntk")) as problem:
        short = [problem.place(TARGET, 32, 1.0) for _ in range(200)]
        long = [problem.place(TARGET, 32, 0.0) for _ in range(400)]
        assert (min(short), max(short)) == (0, 32)
        assert (min(long), max(long)) == (64, 223)
        mixed = [problem.place(TARGET, 32, 0.25) < ORIGINAL for _ in range(800)]
        assert sum(mixed) == pytest.approx(200, abs=50)
        assert {problem.place(ORIGINAL, 48, 0.0) for _ in range(300)} == set(range(16))
        assert problem.place(ORIGINAL, 100, 0.0) == 0
        assert problem.place(ORIGINAL, ORIGINAL - 1, 0.0) == 0
        # A block that has no room past the original length: its end is still there.
        assert {problem.place(2 * ORIGINAL, ORIGINAL, 0.0) for _ in range(30)} == {ORIGINAL - 1}
        assert problem.place(2 * ORIGINAL, 3 * ORIGINAL, 0.0) == 0


def test_an_unknown_objective_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'needles'"):
        get_objective("needels")


def test_a_name_is_registered_once() -> None:
    class Needles2(Objective):
        name: ClassVar[str] = "needles"

    with pytest.raises(ValueError, match="'needles'"):
        register_objective(Needles2)  # type: ignore[type-abstract]  # refused by its name


def test_needles_without_numbers_in_the_texts(tmp_path: Path) -> None:
    model = sharp_model("Llama")
    with fitting(model, rule_equal_to(model, "ntk")) as problem, pytest.raises(ValueError, match="needs a tokenizer"):
        get_objective("needles")(problem, CONFIG)


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        (["needles"], {"needles": 1.0}),
        (["attention_matching", "needles=0.25"], {"attention_matching": 1.0, "needles": 0.25}),
        (["last_block=1e-2", "short_blocks=3"], {"last_block": 0.01, "short_blocks": 3.0}),
    ],
)
def test_weights(words: list[str], weights: dict[str, float]) -> None:
    assert FitConfig(context_length=256, objectives=words).weights() == weights


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["needels"], "unknown objective 'needels'.*Did you mean 'needles'"),
        (["needles", "needles=2"], "'needles' is given twice"),
        (["needles=two"], "NAME=WEIGHT.*'needles=two'"),
        (["needles="], "NAME=WEIGHT.*'needles='"),
        (["needles=0"], "must be greater than 0, got 0"),
        (["needles=-1"], "must be greater than 0, got -1"),
        (["needles=nan"], "must be a finite number"),
        ([], "is empty"),
    ],
)
def test_weights_that_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FitConfig(context_length=256, objectives=words).weights()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"learning_rate": 0.0}, "learning.rate"),
        ({"keep_rotations": -1.0}, "keep.rotations"),
        ({"smoothness": -0.1}, "smoothness"),
        ({"short_share": 1.5}, "short.share.*between 0 and 1, got 1.5"),
        ({"held_out": -1}, "held.out"),
        ({"held_out_numbers": -1}, "numbers"),
        ({"teacher": "alibi"}, "teacher.*must be a method for RoPE, got 'alibi'"),
        ({"teacher": "dac"}, "Did you mean 'dca'"),
        ({"teacher_options": {"chunk": 3}}, "takes no option 'chunk'"),
        ({"start": "dca"}, "start.*takes static methods, got 'dca'"),
        ({"compare": ["yarn", "dynamic_yarn"]}, "compare.*takes static methods, got 'dynamic_yarn'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    FitConfig(context_length=256).check()
    with pytest.raises((ValueError, TypeError), match=message):
        FitConfig(context_length=256, **settings).check()


def test_texts_are_not_all_the_same() -> None:
    """A full-length objective over two longer texts draws both, at several places."""
    model = sharp_model("Llama")
    with torch.no_grad(), fitting(model, rule_equal_to(model, "ntk")) as problem:
        problem.texts = [token_ids(TARGET)[0], token_ids(TARGET + 9)[0].flip(0)]
        objective = get_objective("short_blocks")(problem, CONFIG)
        assert len({round(float(loss_of(objective)), 4) for _ in range(12)}) > 8
