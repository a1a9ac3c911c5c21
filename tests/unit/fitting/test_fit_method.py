"""``fit_method`` on the tiny model, 256 to 1024 tokens: what it is worth, what it leaves alone, what it refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from attention_models import sharp_model
from hf_posenc import patch_model
from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.evaluation import perplexity
from hf_posenc.fitting.config import FitConfig
from hf_posenc.fitting.descent import Descent, Step
from hf_posenc.fitting.fitting import FitResult, fit_method
from model_types import sharp_model as sharp_type
from model_types import tiny_model
from tiny_llama import make_tiny_llama, make_tiny_tokenizer
from tiny_models import assert_same_state, load_tiny, logits, make_model, state, token_ids


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_path())


@pytest.fixture(scope="module")
def novels() -> list[str]:
    return [load_novel("emma")[20000:25000], load_novel(HELD_OUT_NOVEL)[20000:25000]]


@pytest.fixture(scope="module")
def fit(novels: list[str], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One fit: the model, what it was before, the result, and the folder."""
    model, folder = load_tiny(), tmp_path_factory.mktemp("fit") / "work"
    model.lm_head.weight.requires_grad_(False)  # which is the embedding's, too
    before = {
        "state": state(model),
        "config": copy.deepcopy(model.config.to_dict()),
        "frozen": [name for name, one in model.named_parameters() if not one.requires_grad],
        "logits": logits(model, torch.arange(300)[None]),
    }
    config = FitConfig(
        context_length=1024,
        teacher="rerope",
        steps=30,
        keep_rotations=13,
        layers=4,
        compare=["none", "ntk", "yarn"],
        held_out_numbers=2,
        hide_progress=True,
    )
    result = fit_method(model, tokenizer, novels, config, work_dir=folder)
    return {"model": model, "before": before, "result": result, "folder": folder, "config": config}


def test_it_is_better_than_published_rules(fit: dict[str, Any], novels: list[str], tokenizer: Any) -> None:
    """Perplexity measured again, from the options alone; the unextended model at 256, where it is at home."""
    result: FitResult = fit["result"]
    ids = [torch.tensor(tokenizer(novels[1], add_special_tokens=False).input_ids[:1024])]

    def measured(method: str | None, *lengths: int, **options: Any) -> list[float]:
        model = load_tiny() if method is None else patch_model(load_tiny(), method, 4, **options)
        return [one.perplexity for one in perplexity(model, ids, list(lengths), "truncated", progress=False)]

    (plain,) = measured(None, 256)
    short, long = measured("fitted", 256, 1024, **result.options)
    for method in ("ntk", "yarn"):
        other_short, other_long = measured(method, 256, 1024)
        assert long < 0.9 * other_long
        assert short < 0.95 * other_short
    assert short < 1.1 * plain
    assert result.verdict is not None
    assert (result.verdict.better, result.verdict.best) == (True, "fitted")
    table = {name: {one.context_length: one.perplexity for one in row} for name, row in result.records.items()}
    assert list(table) == ["fitted", "none", "ntk", "yarn"]
    assert [table["fitted"][256], table["fitted"][1024]] == pytest.approx([short, long], rel=1e-4)
    assert list(table["none"]) == [64, 128, 256]
    assert table["none"][256] == pytest.approx(plain, rel=1e-4)


def test_what_it_says_about_the_rule(fit: dict[str, Any], novels: list[str], tokenizer: Any) -> None:
    result: FitResult = fit["result"]
    options = result.options
    assert len(options["long_factor"]) == 32
    assert options["short_factor"] == options["long_factor"]
    # Pairs of at least 13 rotations in 256 tokens: theta ** -(i / 32) >= 13 * 2 pi / 256.
    fast = sum(1e4 ** (-i / 32) >= 13 * 2 * torch.pi / 256 for i in range(32))
    assert options["long_factor"][:fast] == [1.0] * fast
    assert all(value != 1 for value in options["long_factor"][fast:])
    assert sum(options["long_factor"][-8:]) / 8 > 2
    assert {name: options[name] for name in options if name.startswith("fitted")} == {
        "fitted_rope_theta": 10000.0,
        "fitted_original_length": 256,
        "fitted_length": 1024,
    }
    assert len(result.steps) == 30
    assert result.steps[-1].losses["attention_matching"] < result.steps[0].losses["attention_matching"]
    facts = result.facts
    assert (facts["teacher"], facts["objectives"]) == ("rerope", ["attention_matching"])
    assert (facts["tokens"], facts["steps"], facts["seed"], facts["context_length"]) == (1024, 30, 0, 1024)
    assert set(result.numbers_found) == {
        "fitted",
        min(("ntk", "yarn"), key=lambda one: result.records[one][-1].perplexity),
    }
    assert all(len(found.scores) == 2 for found in result.numbers_found.values())


def test_the_model_is_as_it_was(fit: dict[str, Any]) -> None:
    model, before = fit["model"], fit["before"]
    assert_same_state(state(model), before["state"])
    assert model.config.to_dict() == before["config"]
    assert model.config._attn_implementation == "sdpa"
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == before["frozen"]
    assert before["frozen"]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    assert torch.equal(logits(model, torch.arange(300)[None]), before["logits"])


def test_the_same_request_again_computes_nothing(
    fit: dict[str, Any], novels: list[str], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_posenc.fitting.descent.Descent.step", lambda *args: pytest.fail("computed again"))
    monkeypatch.setattr("safetensors.torch.save_file", lambda *args: pytest.fail("recorded again"))
    again = fit_method(load_tiny(), tokenizer, novels, fit["config"], work_dir=fit["folder"])
    assert again.options == fit["result"].options
    shown = {name: [one.perplexity for one in row] for name, row in again.records.items()}
    assert shown == {name: [one.perplexity for one in row] for name, row in fit["result"].records.items()}


def test_a_recording_of_another_original_length_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The regions of the teacher depend on it."""
    documents = [token_ids(300)[0]]
    fit_method(sharp_model("Llama"), None, documents, small(), work_dir=tmp_path)
    before = (tmp_path / "teacher-0" / "recording.json").read_text()
    config = small(original_max_position_embeddings=48)
    fit_method(sharp_model("Llama"), None, documents, config, work_dir=tmp_path)
    assert json.loads((tmp_path / "teacher-0" / "recording.json").read_text())["identity"] not in before


def small(**settings: Any) -> FitConfig:
    """A fit of a model of 64 tokens on ids, in a moment."""
    given = {"context_length": 256, "steps": 2, "queries": 8, "block": 16, "questions": 2, "fitted_numbers": 3}
    given |= {"held_out": 0, "compare": [], "hide_progress": True, **settings}
    return FitConfig(**given)  # type: ignore[arg-type]  # of several kinds


@pytest.mark.parametrize(
    "settings",
    [
        {"teacher": "none", "objectives": ["attention_matching", "last_block", "teacher_tokens"], "steps": 4},
        {"teacher": "yarn", "objectives": ["teacher_tokens=0.5", "last_block"], "start": "grid"},
        {"teacher": "dynamic_yarn", "start": "ntk", "monotone": True, "lower_bound": "critical"},
        {"objectives": ["full_length", "short_blocks"], "fit_temperature": False, "smoothness": 0.1},
        {"short_list": "plain", "teacher_options": {"chunk_size": 32}},
        {"max_texts": 2, "seed": 3, "steps": 3.0},
    ],
)
def test_other_settings(settings: dict[str, Any]) -> None:
    model = sharp_model("Llama")
    before = state(model)
    documents = [token_ids(300)[0], token_ids(260)[0].flip(0)]
    result = fit_method(model, None, documents, small(**settings))
    assert_same_state(state(model), before)
    assert result.verdict is None
    assert result.records == {}
    options = result.options
    rotations = [64 * 1e4 ** (-i / 8) / (2 * torch.pi) for i in range(8)]
    assert (options["attention_factor"] == 1) == (settings.get("fit_temperature") is False)
    if settings.get("monotone"):
        assert options["long_factor"] == sorted(options["long_factor"])
        assert all(
            value >= 4 * (1 - 1e-6) for value, one in zip(options["long_factor"], rotations, strict=True) if one < 1
        )
    assert options["short_factor"] == ([1.0] * 8 if settings.get("short_list") == "plain" else options["long_factor"])
    assert result.facts["tokens"] == 256 * settings.get("max_texts", 1)
    patch_model(model, "fitted", **options)
    assert torch.isfinite(logits(model, token_ids(256))).all()


def test_a_work_folder_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "work"
    fit_method(sharp_model("Llama"), None, [token_ids(300)[0]], small(objectives=["full_length"]), work_dir=folder)
    assert [path.name for path in folder.iterdir()] == ["fit_state-0.json"]


def test_needles_are_hidden_in_the_texts(tokenizer: Any, novels: list[str]) -> None:
    config = FitConfig(
        **{**vars(small()), "context_length": 512, "steps": 1, "objectives": ["needles"], "block": 64}  # type: ignore[arg-type]  # of several kinds
    )
    result = fit_method(load_tiny(), tokenizer, novels[:1], config)
    assert result.steps[0].losses["needles"] > 0
    with pytest.raises(ValueError, match="needs a tokenizer"):
        fit_method(sharp_model("Llama"), None, [token_ids(300)[0]], small(objectives=["needles"]))


def test_two_fits_are_the_same_to_the_bit() -> None:
    documents = [token_ids(300)[0]]
    first, second = (fit_method(sharp_model("Llama"), None, documents, small()).options for _ in range(2))
    assert first == second
    assert first != fit_method(sharp_model("Llama"), None, documents, small(seed=1)).options


def test_take_best_saves_the_better_rule(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, novels: list[str]) -> None:
    """A fit of no use: it begins at linear with a learning rate that changes nothing, and ntk is better at 512."""
    given = {"context_length": 512, "start": "linear", "learning_rate": 1e-9, "keep_rotations": 1e9, "held_out": 1}
    given |= {"compare": ["ntk"], "held_out_numbers": 0}
    for take in (False, True):
        result = fit_method(load_tiny(), tokenizer, novels, small(**given, take_best=take))
        assert result.verdict is not None
        assert (result.verdict.better, result.verdict.best) == (False, "ntk")
        assert result.facts.get("instead") == ("ntk" if take else None)
        wanted = [2 ** (i / 31) if take else 2.0 for i in range(32)]
        assert result.options["long_factor"] == pytest.approx(wanted, rel=1e-5)


def refused(
    folder: Path, model: Any, match: str, documents: Any = None, tokenizer: Any = None, **settings: Any
) -> None:
    """A fit that must fail before anything is written, with the model as it was."""
    documents = [token_ids(300)[0]] if documents is None else documents
    before = model.config.to_dict()
    implementation = model.config._attn_implementation
    with pytest.raises((ValueError, TypeError), match=match):
        fit_method(model, tokenizer, documents, small(**settings), work_dir=folder / "work")
    assert not list(folder.iterdir())
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == implementation
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_texts_that_are_too_short(tmp_path: Path) -> None:
    refused(tmp_path, make_tiny_llama(), "has 200: 56 tokens are missing", [token_ids(200)[0]])
    refused(tmp_path, make_tiny_llama(), "2 documents of 256 tokens are needed", held_out=1)
    refused(tmp_path, make_tiny_llama(), "documents is empty", [])


def test_an_extended_model(tmp_path: Path) -> None:
    model = patch_model(make_tiny_llama(), "ntk", 4)
    refused(tmp_path, model, r"extended already \(ntk, factor 4\).*give the base model, or call unpatch_model")
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    refused(tmp_path, make_tiny_llama(rope_parameters=rope), r"extended already \(linear, factor 2\)")


@pytest.mark.parametrize("length", [64, 32])
def test_a_target_that_is_no_extension(tmp_path: Path, length: int) -> None:
    refused(tmp_path, make_tiny_llama(), "must be longer than the original length, 64 tokens", context_length=length)


def test_teachers_that_cannot_be(tmp_path: Path) -> None:
    refused(tmp_path, make_tiny_llama(), "must be a method for RoPE, got 'alibi'", teacher="alibi")
    refused(tmp_path, make_tiny_llama(), "unknown method 'dcaa'.*Did you mean 'dca'", teacher="dcaa")


@pytest.mark.parametrize("teacher", ["dca", "none", "yarn"])
def test_a_family_that_attends_in_its_own_way(tmp_path: Path, teacher: str) -> None:
    documents = [token_ids(8192 * 2)[0]]
    refused(
        tmp_path,
        tiny_model("deepseek_v3"),
        "'deepseek_v3': multi-head latent attention",
        documents,
        teacher=teacher,
        context_length=128,
    )


@pytest.mark.parametrize("teacher", ["none", "yarn"])
def test_layers_whose_windows_hold_all_positions(tmp_path: Path, teacher: str) -> None:
    refused(tmp_path, tiny_model("cohere2"), "'cohere2' is not supported", teacher=teacher)


def test_documents_that_are_no_ids(tmp_path: Path) -> None:
    ids = token_ids(300)[0]
    refused(
        tmp_path,
        make_tiny_llama(),
        "token ids must be whole numbers",
        [torch.where(ids == ids[5], float("nan"), ids.float())],
    )
    refused(tmp_path, make_tiny_llama(), "holds token id 128, but", [ids + 1])
    refused(tmp_path, make_tiny_llama(), "need tokenizer=", ["a text " * 100])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"teacher": name}, "logits that are not finite, in float32") for name in ("yarn", "dca")],
)
def test_weights_that_are_not_finite(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    model = make_model("Llama")
    model.get_decoder().layers[0].self_attn.v_proj.weight.data[0, 0] = float("nan")
    refused(tmp_path, model, message, **settings)
    with pytest.raises(ValueError, match=r"\(NaN\)"):
        patch_model(model, "dca", 4)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["last_block", "needles", "teacher_tokens"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "diffllama"])
def test_models_that_need_more_than_keys_and_values(tmp_path: Path, model_type: str, name: str) -> None:
    """Recurrent layers, and two calls of attention in a layer; what of the text is not recorded would be missing."""
    settings = {"original_max_position_embeddings": 64, "objectives": ["attention_matching", name]}
    message = f"'{name}' cannot be used with model_type '{model_type}'.*Take attention_matching, full_length or"
    refused(tmp_path, sharp_type(model_type), message, tokenizer=make_tiny_tokenizer(), **settings)


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2_moe", "qwen3_moe"])
def test_models_with_other_layers_or_experts(model_type: str) -> None:
    """What needs no recorded prefix is the loss of Transformers' own model; experts alone are no reason to refuse."""
    model = sharp_type(model_type)
    settings = {"original_max_position_embeddings": 64, "objectives": ["attention_matching", "full_length"]}
    if model_type == "qwen3_moe":
        settings["objectives"] = ["last_block", "teacher_tokens"]
    assert fit_method(model, None, [token_ids(300)[0]], small(**settings)).facts["steps"] == 2


def test_a_head_with_layers_of_its_own() -> None:
    model = sharp_type("modernbert-decoder")
    assert fit_method(model, None, [token_ids(300)[0]], small(original_max_position_embeddings=64)).facts["steps"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": "none"}, "unknown method 'none'"),
        ({"start": "nope"}, "rotates every pair"),
        ({"teacher": "none", "teacher_options": {"chunk_size": 8}}, "has no options"),
        ({"start": "abf"}, "rope_theta"),
        ({"keep_rotations": 1e-6, "fit_temperature": False}, "nothing is left to fit"),
    ],
)
def test_a_fit_with_nothing_to_begin_at(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    refused(tmp_path, make_tiny_llama(), message, **settings)


def test_a_budget_that_is_too_short(tmp_path: Path) -> None:
    documents = [token_ids(600)[0]]
    for settings, message in (
        ({"steps": 50}, r"20 steps need .* or a shorter context_length\. "),
        ({"steps": 5}, "5 steps need"),
        ({"steps": 50, "seeds": 2, "held_out": 1}, "20 steps for each of 2 seeds and the measurement of 3 rules need"),
    ):
        with pytest.raises(ValueError, match=f"{message}"):
            fit_method(sharp_model("Llama"), None, documents, small(budget=0.001, **settings), work_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["teacher-0"]


class Clock:
    """Time that passes only in steps and passes, a second each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, step = 100.0, Descent.step
        monkeypatch.setattr("hf_posenc.fitting.budget.time.perf_counter", lambda: self.now)
        monkeypatch.setattr(Descent, "seconds_of_a_step", lambda descent: 1.0)
        monkeypatch.setattr("hf_posenc.fitting.fitting.time_pass", lambda rotary, ids: 10.0)

        def timed(descent: Descent) -> Step:
            self.now += 1
            return step(descent)

        monkeypatch.setattr(Descent, "step", timed)


def test_a_budget_is_shared_by_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """130 seconds: 30 for three rules on one held-out text, the rest for two fits."""
    Clock(monkeypatch)
    config = small(steps=200, seeds=2, budget=130.0, held_out=1, teacher="none", compare=["yarn"])
    result = fit_method(sharp_model("Llama"), None, [token_ids(600)[0]], config)
    assert len(result.steps) == result.facts["steps"] == 50
    assert result.verdict is not None
    assert result.verdict.lines[-1].startswith("2 fits with different seeds differ by")


def test_a_fit_goes_on_with_as_many_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget, or another one, changes the number: the rate and the mean of the last steps would be wrong."""
    Clock(monkeypatch)
    documents, taken = [token_ids(300)[0]], []
    for budget in (None, 25.0, 25.0, 30.0):
        before = json.loads((tmp_path / "fit_state-0.json").read_text())["history"] if taken else []
        result = fit_method(sharp_model("Llama"), None, documents, small(steps=40, budget=budget), work_dir=tmp_path)
        fresh = fit_method(sharp_model("Llama"), None, documents, small(steps=len(result.steps)))
        assert result.options == fresh.options
        taken.append((len(result.steps), [[step.losses, step.seconds] for step in result.steps] == before))
    assert taken == [(40, False), (25, False), (25, True), (30, False)]
