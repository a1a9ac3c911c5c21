"""Low-rank changes of W_q and W_k: what they are worth, what they leave alone, how they go on, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from adapted_models import FEW_STEPS
from adapted_models import adapt_config as config
from hf_posenc import load_extended, patched, save_extended, verify_model
from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.errors import InvalidRequestError, InvalidTypeError, UnknownNameError
from hf_posenc.fitting import config as fit_config
from hf_posenc.fitting import layer_matching, short_matching
from hf_posenc.fitting.adapter import Adapter
from hf_posenc.fitting.cost import cost_in_words
from hf_posenc.fitting.fitting import FitResult, fit_method
from hf_posenc.fitting.layer_changes import LayerChanges
from hf_posenc.patching.presets import Preset
from tiny_models import assert_same_state, load_tiny, logits, state, token_ids

TEXTS = [load_novel(name)[20000:25000] for name in ("emma", "mansfieldpark", HELD_OUT_NOVEL)]


@pytest.fixture(scope="module", autouse=True)
def steps_are_taken_once() -> Iterator[None]:
    """So few steps leave large errors, and taking them again is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_config, "_MOST_ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def fit() -> dict[str, Any]:
    model = load_tiny()
    before = state(model)
    result = fit_method(model, AutoTokenizer.from_pretrained(tiny_model_path()), TEXTS, config())
    return {"model": model, "before": before, "result": result}


@torch.no_grad()
def attention_outputs(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """What each layer's W_o gets."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: found.append(args[0][0]))
        for layer in model.model.layers
    ]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def test_layers_attend_more_like_the_teacher_on_a_text_that_was_not_fitted_on(fit: dict[str, Any]) -> None:
    """The first layer, which gets the same input as the teacher's, under patch_model's own rotary embedding."""
    result: FitResult = fit["result"]
    ids = AutoTokenizer.from_pretrained(tiny_model_path())(TEXTS[2], return_tensors="pt").input_ids[:, :1024]
    model = load_tiny()
    with patched(model, "dca", 4):
        teacher = attention_outputs(model, ids)[0]

    def error() -> float:
        with patched(model, result.method, context_length=1024, **result.options):
            found = attention_outputs(model, ids)[0]
        return float((found - teacher).square().sum() / teacher.square().sum())

    rule_alone = error()
    assert result.adapter is not None
    with result.adapter.applied(model):
        adapted = error()
    assert adapted < 0.85 * rule_alone
    before, after = (sum(errors) for errors in zip(*result.adapter.errors, strict=True))
    assert after < 0.6 * before
    assert 0.3 * rule_alone < result.adapter.errors[0][0] < 1.5 * rule_alone  # of other texts, half of it in pieces
    assert error() == rule_alone


def test_the_adapted_model_reads_better_and_is_judged(fit: dict[str, Any]) -> None:
    records = fit["result"].records
    assert list(records) == ["adapted", "none", "ntk"]
    adapted, rule = (records[name][-1] for name in ("adapted", "ntk"))
    assert adapted.perplexity < 0.9 * rule.perplexity
    assert (adapted.method, adapted.options) == (rule.method, rule.options)
    assert records["adapted"][-1].label == "adapted"
    verdict = fit["result"].verdict
    assert (verdict.better, verdict.best) == (True, "adapted")
    assert "the adapted model" in verdict.lines[0]


def test_the_model_is_as_it_was(fit: dict[str, Any]) -> None:
    assert_same_state(state(fit["model"]), fit["before"])
    assert not any("lora" in name for name, _ in fit["model"].named_modules())


def extended(result: FitResult, *, merged: bool) -> Any:
    from hf_posenc import patch_model

    assert result.adapter is not None
    model = patch_model(load_tiny(), result.method, context_length=1024, **result.options)
    wrapped = result.adapter.wrap(model)
    return wrapped.merge_and_unload() if merged else wrapped


def test_merged_weights_are_a_checkpoint_of_plain_transformers(fit: dict[str, Any], tmp_path: Path) -> None:
    model, ids = extended(fit["result"], merged=True), token_ids(600)
    verify_model(model)
    save_extended(model, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(plain, ids), logits(model, ids), rtol=0, atol=1e-5)
    base = load_tiny()
    changed = {name for name, weight in base.state_dict().items() if not torch.equal(weight, plain.state_dict()[name])}
    assert changed == {
        f"model.layers.{index}.self_attn.{name}.weight"
        for index in range(base.config.num_hidden_layers)
        for name in ("q_proj", "k_proj")
    }


def test_an_adapter_is_one_that_peft_reads(fit: dict[str, Any], tmp_path: Path) -> None:
    model, ids = extended(fit["result"], merged=False), token_ids(600)
    load_tiny().save_pretrained(tmp_path / "base")
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    save_extended(model, tmp_path / "adapter", base_model=str(tmp_path / "base"))
    loaded = load_extended(tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=0, atol=1e-5)


def test_a_stopped_run_goes_on_with_the_layers_that_are_left(
    fit: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    matched, attend = [], layer_matching.LayerMatching._under_the_rule

    def stops(self: Any, layer: Any, *args: Any) -> Any:
        if layer.module.layer_idx == 3:
            raise KeyboardInterrupt
        matched.append(layer.module.layer_idx)
        return attend(self, layer, *args)

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    monkeypatch.setattr(layer_matching.LayerMatching, "_under_the_rule", stops)
    model = load_tiny()
    with pytest.raises(KeyboardInterrupt):
        fit_method(model, tokenizer, TEXTS, config(), work_dir=tmp_path)
    assert set(matched) == {0, 1, 2}
    assert_same_state(state(model), fit["before"])
    matched.clear()
    monkeypatch.setattr(
        layer_matching.LayerMatching,
        "_under_the_rule",
        lambda self, layer, *args: matched.append(layer.module.layer_idx) or attend(self, layer, *args),
    )
    resumed = fit_method(model, tokenizer, TEXTS, config(), work_dir=tmp_path)
    assert set(matched) == {3, 4, 5}
    assert resumed.adapter is not None
    assert resumed.adapter.errors == fit["result"].adapter.errors
    for name, weight in fit["result"].adapter.weights.items():
        assert torch.equal(resumed.adapter.weights[name], weight), name


def test_a_run_stopped_in_the_steps_on_short_texts_goes_on(
    fit: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    """Of its five steps that were saved, none is taken again."""
    taken, draw = [], short_matching._draw

    def stops(texts: Any, original: int, seed: int, step: int) -> torch.Tensor:
        if step == 5 and len(taken) == 5:
            taken.append(-1)
            raise KeyboardInterrupt
        taken.append(step)
        return draw(texts, original, seed, step)

    monkeypatch.setattr(short_matching, "_draw", stops)
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_model_path()), load_tiny()
    with pytest.raises(KeyboardInterrupt):
        fit_method(model, tokenizer, TEXTS, config(), work_dir=tmp_path)
    assert_same_state(state(model), fit["before"])
    resumed = fit_method(model, tokenizer, TEXTS, config(), work_dir=tmp_path).adapter
    assert taken == [0, 1, 2, 3, 4, -1, 5]
    assert resumed is not None
    for name, weight in fit["result"].adapter.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_another_number_of_steps_on_short_texts_fits_no_layer_again(
    fit: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_model_path()), load_tiny()
    fewer = FEW_STEPS | {"short_steps": 2}
    first = fit_method(model, tokenizer, TEXTS, config(adapt_options=fewer), work_dir=tmp_path).adapter
    monkeypatch.setattr(layer_matching, "LayerMatching", None)  # the teacher reads nothing either
    again = fit_method(model, tokenizer, TEXTS, config(), work_dir=tmp_path).adapter
    assert first is not None
    assert again is not None
    assert again.errors == first.errors == fit["result"].adapter.errors
    for name, weight in fit["result"].adapter.weights.items():
        assert torch.equal(again.weights[name], weight), name
    assert any(not torch.equal(first.weights[name], weight) for name, weight in again.weights.items())


def copied_by_hand(ids: torch.Tensor, least: int, length: int) -> set[int]:
    """Positions of pairs whose last one before, in the same piece, is more than ``least`` tokens before."""
    found, tokens = set(), ids.tolist()
    for at in range(len(ids) - 1):
        begin = at // length * length
        if (at + 1) // length * length == begin:
            same = [there for there in range(begin, at) if tokens[there : there + 2] == tokens[at : at + 2]]
            found |= {at} if same and at - same[-1] > least else set()
    return found


@pytest.mark.parametrize(("least", "length"), [(1, 300), (16, 300), (16, 100)])
def test_copied_pairs(least: int, length: int) -> None:
    ids = token_ids(300)[0] % 7
    expected = copied_by_hand(ids, least, length)
    assert 20 < len(expected) < 250
    assert layer_matching._copied(ids, least, length).tolist() == sorted(expected)


def test_errors_are_of_the_rank_that_is_kept() -> None:
    texts = [token_ids(1024)[0], token_ids(1024)[0].flip(0)]
    errors = []
    for rank in (1, 64):
        request = config(held_out=0, adapt_options=FEW_STEPS | {"rank": rank, "short_steps": 0})
        adapter = fit_method(load_tiny(), None, texts, request).adapter
        assert adapter is not None
        errors.append(adapter.errors)
    assert errors[0][0][0] == errors[1][0][0]  # before the first layer is changed
    assert all(one > many for (_, one), (_, many) in zip(*errors, strict=True))


def test_a_layer_whose_error_stays_large_takes_the_steps_again(fit: dict[str, Any], monkeypatch: Any) -> None:
    """Each measurement of an error is of 16 draws."""
    once = [after for _, after in fit["result"].adapter.errors]
    draws, of_layers = 0, []
    error, reduce = layer_matching.LayerMatching._error, LayerChanges.reduce

    def counted(*args: Any) -> torch.Tensor:
        nonlocal draws
        draws += 1
        return error(*args)

    def at_the_end(changes: LayerChanges, rank: int) -> Any:
        nonlocal draws
        of_layers.append(draws)
        weights, draws = reduce(changes, rank), -16  # of the measurement that follows
        return weights

    monkeypatch.setattr(layer_matching.LayerMatching, "_error", counted)
    monkeypatch.setattr(LayerChanges, "reduce", at_the_end)
    monkeypatch.setattr(fit_config, "_MOST_ROUNDS", 3)
    monkeypatch.setattr(layer_matching, "_LARGE_ERROR", sum(sorted(once)[-2:]) / 2)
    request = config(adapt_options=FEW_STEPS | {"short_steps": 0})
    adapter = fit_method(load_tiny(), AutoTokenizer.from_pretrained(tiny_model_path()), TEXTS, request).adapter
    assert adapter is not None
    worst = once.index(max(once))
    for layer, steps in enumerate(of_layers):
        assert steps in ((16 + 40 + 16 + 40 + 16, 16 + 3 * 40 + 32) if layer == worst else (16 + 40 + 16,))
    again = [after for _, after in adapter.errors]
    assert again[worst] < once[worst]
    assert again[:worst] + again[worst + 1 :] == once[:worst] + once[worst + 1 :]


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_layer_reads_every_part_of_every_text(number: int, monkeypatch: Any) -> None:
    """One of four steps reads a quarter of a whole text with all before it, and the others a piece."""
    parts: list[tuple[bool, int, int, int]] = []
    texts = [token_ids(1024)[0].roll(at) for at in range(number)]
    again = [(copied_by_hand(text, 16, 1024), copied_by_hand(text, 16, 256)) for text in texts]
    draw, draw_of_piece = layer_matching.LayerMatching._draw, layer_matching.LayerMatching._draw_of_piece

    def of_text(matching: Any, *args: Any) -> Any:
        row, rows, read = draw(matching, *args)
        assert read.start is None
        parts.append((True, row, int(rows[0]) // 256, int(rows[-1]) // 256))
        assert read.stop == 256 * (parts[-1][3] + 1)
        assert sum(at in again[row][0] for at in rows.tolist()) >= 32  # of 96 queries
        return row, rows, read

    def of_piece(matching: Any, *args: Any) -> Any:
        row, rows, read = draw_of_piece(matching, *args)
        parts.append((False, row - number, read.start // 256, int(rows[-1]) // 256))
        assert read.stop == read.start + 256
        assert int((rows < read.start + 64).sum()) >= 32
        assert sum(at in again[row - number][1] for at in rows.tolist()) >= 32
        return row, rows, read

    monkeypatch.setattr(layer_matching.LayerMatching, "_draw", of_text)
    monkeypatch.setattr(layer_matching.LayerMatching, "_draw_of_piece", of_piece)
    request = config(max_texts=number, held_out=0, adapt_options={"rank": 2, "steps": 16 * number, "short_steps": 0})
    fit_method(load_tiny(), None, texts, request)
    first = parts[16 : 16 * (1 + number)]  # after the measurement before the first step
    assert all(begins == ends for _, _, begins, ends in first)
    whole = [(text, quarter) for is_whole, text, quarter, _ in first if is_whole]
    pieces = [(text, piece) for is_whole, text, piece, _ in first if not is_whole]
    everything = {(text, part) for text in range(number) for part in range(4)}
    assert len(whole) == len(set(whole))
    assert set(whole) == set(pieces) == everything
    assert len(pieces) == 3 * len(whole)


def test_the_changes_of_each_seed_are_measured_with_its_own_rule() -> None:
    """The perplexities that are said are those of fits with one seed."""

    def fitted(**changes: Any) -> FitResult:
        request = config(compare=["none"], adapt_options={"steps": 8, "short_steps": 1}, **changes)
        return fit_method(load_tiny(), AutoTokenizer.from_pretrained(tiny_model_path()), TEXTS, request)

    alone = [fitted(seed=seed).records["adapted"][-1].perplexity for seed in (3, 4)]
    verdict = fitted(seed=3, seeds=2).verdict
    assert f"{alone[0]:.2f}" != f"{alone[1]:.2f}"
    assert verdict is not None
    assert verdict.lines[-1].endswith(f": {alone[0]:.2f}, {alone[1]:.2f}")


def test_texts_in_pieces_are_read_as_the_unextended_model_reads_each_piece() -> None:
    model, ids = load_tiny(), token_ids(1000)[0]
    read: list[torch.Tensor] = []
    hook = model.model.register_forward_hook(lambda module, args, output: read.append(output.last_hidden_state))
    request = config(context_length=1000, max_texts=1, held_out=0, adapt_options={"steps": 1, "short_steps": 0})
    fit_method(model, None, [ids, ids.flip(0)], request)
    hook.remove()
    [whole, pieces] = next(states for states in read if states.shape[:2] == (2, 1000))
    with torch.no_grad():
        alone = [load_tiny().model(part[None], use_cache=False).last_hidden_state[0] for part in ids.split(256)]
        with patched(load_tiny(), "dca", context_length=1000) as teacher:
            taught = teacher.model(ids[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(pieces, torch.cat(alone), rtol=0, atol=1e-3)
    torch.testing.assert_close(whole, taught, rtol=0, atol=1e-3)


def test_steps_on_short_texts_bring_the_distributions_back(fit: dict[str, Any], tmp_path: Path) -> None:
    """On a text that was not fitted on, against Transformers' own loss function."""
    ids = AutoTokenizer.from_pretrained(tiny_model_path())(TEXTS[2], return_tensors="pt").input_ids[:, :512]
    right = logits(load_tiny(), ids.view(2, 256)).log_softmax(-1)
    result: FitResult = fit["result"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())

    def adapter(short_steps: int) -> Adapter | None:
        request = config(held_out=0, adapt_options=FEW_STEPS | {"short_steps": short_steps})
        return fit_method(load_tiny(), tokenizer, TEXTS[:2], request, work_dir=tmp_path).adapter

    def divergence(adapter: Adapter | None) -> float:
        assert adapter is not None
        model = load_tiny()
        with patched(model, result.method, context_length=1024, **result.options), adapter.applied(model):
            found = logits(model, ids.view(2, 256)).log_softmax(-1)
        return float(torch.nn.functional.kl_div(found, right, log_target=True, reduction="sum")) / 512

    assert divergence(adapter(40)) < 0.9 * divergence(adapter(0))


def test_the_divergence_is_that_of_pytorch() -> None:
    model = load_tiny()
    hidden, wanted = (torch.randn(300, model.config.hidden_size, generator=torch.manual_seed(at)) for at in (0, 1))
    hidden.requires_grad_(True)
    found = short_matching.divergence(model, hidden, wanted)
    [gradient] = torch.autograd.grad(found, hidden)
    ours, theirs = (model.lm_head(states).log_softmax(-1) for states in (hidden, wanted))
    expected = torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="sum") / 300
    [expected_gradient] = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("rule", ["yarn", "folder", "preset"])
def test_the_rule_is_kept(rule: str, tmp_path: Path, monkeypatch: Any) -> None:
    texts = [token_ids(1024)[0], token_ids(1024)[0].flip(0)]
    fitted = fit_method(load_tiny(), None, texts, config(held_out=0, adapt_options=None, steps=2, layers=2))
    wanted = ("yarn", {}) if rule == "yarn" else ("fitted", fitted.options)
    if rule == "folder":
        rule = str(fitted.save(tmp_path / "rule.json"))
    elif rule == "preset":
        preset = Preset("tiny-4x", "", ("llama",), "fitted", 4.0, 256, (), "", fitted.options)
        monkeypatch.setattr("hf_posenc.patching.presets.presets", lambda: {"preset": preset})
    request = config(held_out=0, adapt_options={"rule": rule, "steps": 1, "short_steps": 0})
    result = fit_method(load_tiny(), None, texts, request)
    assert result.steps == []
    assert (result.method, json.loads(json.dumps(result.options))) == wanted
    with pytest.raises(InvalidRequestError, match="no rule was fitted"):
        result.save(tmp_path / "again.json")


@pytest.mark.parametrize("rule", ["linear", "ntk"])
def test_layers_are_fitted_under_the_rule_of_every_pair(rule: str, monkeypatch: Any) -> None:
    """The fast pairs too, which a fitted rule leaves alone."""
    seen: list[torch.Tensor] = []

    def stops(rotary: Any, parameters: Any, rotation: Any) -> None:
        seen.append(parameters.inv_freq())
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_matching, "RuleAttention", stops)
    texts = [token_ids(1024)[0], token_ids(1024)[0].flip(0)]
    with pytest.raises(KeyboardInterrupt):
        fit_method(load_tiny(), None, texts, config(held_out=0, adapt_options={"rule": rule}))
    with patched(load_tiny(), rule, context_length=1024) as model:
        torch.testing.assert_close(seen[0], model.model.rotary_emb.inv_freq, rtol=1e-5, atol=0)


def test_a_rule_with_another_list_for_long_texts_is_refused(tmp_path: Path) -> None:
    texts = [token_ids(1024)[0], token_ids(1024)[0].flip(0)]
    fitted = fit_method(load_tiny(), None, texts, config(held_out=0, adapt_options=None, steps=1, short_list="plain"))
    request = config(held_out=0, adapt_options={"rule": str(fitted.save(tmp_path / "rule.json"))})
    with pytest.raises(InvalidRequestError, match=r"rule\.json.*another one for long texts"):
        fit_method(load_tiny(), None, texts, request)


def test_layers_of_another_original_length_are_fitted_again(tmp_path: Path) -> None:
    texts = [token_ids(1024)[0], token_ids(1024)[0].flip(0)]
    request = config(held_out=0, adapt_options={"steps": 1, "short_steps": 0})
    errors = []
    for length in (256, 128):
        model = load_tiny()
        model.config.max_position_embeddings = length
        result = fit_method(model, None, texts, request, work_dir=tmp_path)
        assert result.adapter is not None
        errors.append(result.adapter.errors)
    assert errors[0] != errors[1]


def test_a_preset_of_another_model_is_no_rule() -> None:
    request = config(held_out=0, adapt_options={"rule": "smollm2-135m-fitted-4x"})
    with pytest.raises(InvalidRequestError, match="trained on 8192 tokens, this one's config says 256"):
        fit_method(load_tiny(), None, [token_ids(1024)[0]], request)


def test_projections_that_are_kept_or_left_out_change_nothing(monkeypatch: Any) -> None:
    texts = [token_ids(512)[0], token_ids(512)[0].flip(0)]
    request = config(context_length=512, held_out=0, adapt_options={"steps": 20, "short_steps": 0})
    kept = fit_method(load_tiny(), None, texts, request).adapter
    forward = LayerChanges._forward

    def computed(changes: Any, name: str, linear: Any, compute: Any, kept: Any, states: torch.Tensor) -> Any:
        if kept is None:
            return forward(changes, name, linear, compute, kept, states)
        with torch.no_grad():
            outputs = compute(states)
        return outputs if name not in changes.by_name else changes.by_name[name].of(states, outputs)

    monkeypatch.setattr(LayerChanges, "_forward", computed)
    anew = fit_method(load_tiny(), None, texts, request).adapter
    assert kept is not None
    assert anew is not None
    assert kept.errors == anew.errors
    assert all(torch.equal(weight, anew.weights[name]) for name, weight in kept.weights.items())


def test_the_unextended_model_is_a_teacher_within_its_length(fit: dict[str, Any]) -> None:
    texts = [token_ids(1024)[0], token_ids(1024)[0].flip(0)]
    result = fit_method(load_tiny(), None, texts, config(teacher="none", max_texts=1, held_out=0))
    assert result.adapter is not None
    assert all(after < before for before, after in result.adapter.errors)


@pytest.mark.parametrize(
    ("changes", "kind", "values"),
    [
        ({"adapt_options": {"rang": 16}}, UnknownNameError, "'rang'.*'rank'"),
        ({"adapt_options": {"rank": 0}}, InvalidRequestError, "rank.*0"),
        ({"adapt_options": {"short_rate": 0}}, InvalidRequestError, "short_rate.*0"),
        ({"adapt_options": {"rule": "nowhere/rule.json"}}, UnknownNameError, "'nowhere/rule.json'"),
        ({"adapt_options": {"rule": "dca"}}, InvalidRequestError, "'dca'"),
        ({"adapt_options": {"rule": 4}}, InvalidTypeError, "rule.*4"),
        ({"teacher": "yarn"}, InvalidRequestError, "'yarn'"),
        ({"steps": 50, "take_best": True}, InvalidRequestError, "leave out steps, take_best"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], kind: type[Exception], values: str) -> None:
    with pytest.raises(kind, match=values):
        config(**changes).check()


def test_the_cost_names_the_steps(monkeypatch: Any) -> None:
    monkeypatch.setattr(fit_config, "_MOST_ROUNDS", 3)
    words = cost_in_words(load_tiny(), config(), 2, "out")
    changes = "for changes of rank 64, and 6 steps on short texts"
    assert f"40 steps in each layer (up to 120 where its error stays large) {changes}" in words
    assert f"40 steps in each layer {changes}" in cost_in_words(load_tiny(), config(budget=60.0), 2, "out")
