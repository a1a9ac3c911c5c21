"""Attention under a rule: with a published rule's numbers it is what Transformers computes; gradients are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from attention_models import sharp_model
from model_types import sharp_model as sharp_type
from rule_fits import TARGET, TEXT, fitting, recorded, rule_equal_to
from tiny_models import logits, native

BLOCK = slice(200, 230)
# Sinks beside sdpa, partial rotation, layers without positions, windows, a softcap, neighbouring features in a pair.
FAMILIES = [
    *(("Llama", "sdpa"), ("Llama", "eager"), ("GPTNeoX", "sdpa"), ("SmolLM3", "sdpa"), ("Gemma2", "eager")),
    *(("gpt_oss", "eager"), ("gemma3_text", "sdpa"), ("gemma3_text", "eager"), ("cohere", "sdpa")),
]


def make(family: str, implementation: str) -> PreTrainedModel:
    if family[0].isupper():
        model = sharp_model(family)
    else:
        model = sharp_type(family)
        if not hasattr(model.get_decoder(), "rotary_emb"):
            pytest.skip("not in this release of Transformers")
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("method", ["ntk", "yarn"])
@pytest.mark.parametrize(("family", "implementation"), FAMILIES)
def test_it_computes_what_transformers_does(tmp_path: Path, family: str, implementation: str, method: str) -> None:
    model = make(family, implementation)
    wanted = logits(native(model, method, 4), TEXT)
    assert float((logits(model, TEXT) - wanted).abs().max()) > 0.01  # the rule matters
    recording = recorded(model, tmp_path / "teacher", method)
    rule = rule_equal_to(model, method)
    with torch.no_grad(), fitting(model, rule, recording) as problem:
        torch.testing.assert_close(problem.block_logits(None, TEXT, 0), wanted, rtol=0, atol=1e-4)
        block = problem.block_logits(recording, TEXT[:, BLOCK], BLOCK.start)
        torch.testing.assert_close(block, wanted[:, BLOCK], rtol=0, atol=1e-4)
        two = problem.block_logits(recording, TEXT[:, BLOCK].repeat(2, 1), BLOCK.start)
        torch.testing.assert_close(two, wanted[:, BLOCK].repeat(2, 1, 1), rtol=0, atol=1e-4)
        assert problem.layers
        for layer in problem.layers:
            problem.attention.begin(recording, 0, 0)
            for rows in (torch.tensor([0, 1, 1, 4, 20]), torch.arange(30, 80, 7), torch.tensor([85])):
                found, outputs = problem.attention.replay(layer, recording, rows)
                assert torch.equal(outputs, recording.layer(layer.layer_idx, "outputs")[0][rows])
                torch.testing.assert_close(found, outputs, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == implementation
    torch.testing.assert_close(logits(native(model, method, 4), TEXT), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt_oss", "Gemma2"])
def test_sinks_and_caps_of_the_logits_under_flash_attention(family: str) -> None:
    """Which knows them as eager attention does; sdpa knows neither."""
    model = make(family, "eager") if family == "gpt_oss" else sharp_model(family, attn_logit_softcapping=0.5)
    wanted = logits(native(model, "yarn", 4), TEXT)
    with torch.no_grad(), fitting(model, rule_equal_to(model, "yarn")) as problem:
        problem.attention.inner = "flash_attention_2"
        torch.testing.assert_close(problem.block_logits(None, TEXT, 0), wanted, rtol=0, atol=1e-4)


def test_queries_drawn_twice(tmp_path: Path) -> None:
    """Positions 10, 10, 12, 13 are as many, and as far apart, as 10 to 13."""
    model = sharp_model("Llama")
    recording = recorded(model, tmp_path / "teacher", None, every=1)
    ruled = recorded(native(model, "ntk", 4), tmp_path / "ruled", None, every=1)
    with torch.no_grad(), fitting(model, rule_equal_to(model, "ntk"), recording) as problem:
        problem.attention.begin(recording, 0, 0)
        for rows in ([10, 10, 12, 13], [10, 11, 12, 13], [10, 10, 12, 13]):
            found, _ = problem.attention.replay(problem.layers[0], recording, torch.tensor(rows))
            torch.testing.assert_close(found, ruled.layer(0, "outputs")[0][rows], rtol=1e-4, atol=1e-4)


def test_which_layers_are_fitted() -> None:
    indices = {}
    for family in ("SmolLM3", "Gemma2", "gemma3_text"):
        model = sharp_model(family, no_rope_layers=[1, 0]) if family == "SmolLM3" else make(family, "eager")
        with fitting(model, rule_equal_to(model, "ntk")) as problem:
            indices[family] = [layer.layer_idx for layer in problem.layers]
    # Gemma 2's layers share their RoPE, so that a rule changes those with a window too; Gemma 3's do not.
    assert indices == {"SmolLM3": [0], "Gemma2": [0, 1], "gemma3_text": [1]}


@pytest.mark.parametrize("teacher", [None, "dca"])
def test_states_recorded_under_other_frequencies(tmp_path: Path, teacher: str | None) -> None:
    """Keys of the plain model rotated to a rule: of the first layer they are the patched model's own."""
    model = sharp_model("Llama")
    recording = recorded(model, tmp_path / "teacher", teacher)
    patched_one = recorded(native(model, "yarn", 4), tmp_path / "patched", None)
    rows = torch.arange(0, 80, 9)
    with torch.no_grad(), fitting(model, rule_equal_to(model, "yarn"), recording) as problem:
        found, _ = problem.attention.replay(problem.layers[0], recording, rows)
    torch.testing.assert_close(found, patched_one.layer(0, "outputs")[0][rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["full", "block", "replay"])
@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])
def test_gradients_are_central_differences(tmp_path: Path, family: str, way: str) -> None:
    """In float64 but for the norms and the head, over a step of 2e-5: at 255 tokens an angle moves by 0.005 radians."""
    model = sharp_model(family, torch.float64)
    recording = recorded(model, tmp_path / "teacher", "dca")
    rule = rule_equal_to(model, "yarn").double()
    weights = torch.randn(TARGET, 128, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / TARGET
    with fitting(model, rule, recording) as problem:

        def loss() -> torch.Tensor:
            if way == "full":
                return (problem.block_logits(None, TEXT, 0)[0] * weights).sum()
            if way == "block":
                return (problem.block_logits(recording, TEXT[:, BLOCK], BLOCK.start)[0] * weights[BLOCK]).sum() * 8
            problem.attention.begin(recording, 0, 0)
            found, wanted = problem.attention.replay(problem.layers[1], recording, torch.arange(10, 80, 3))
            return (found - wanted).square().mean()

        loss().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        assert all(parameter.grad is None for parameter in model.parameters())
        for parameter in (rule.log_divisors, rule.log_factor):
            gradient = parameter.grad
            assert gradient is not None
            values, found = parameter.data.view(-1), []
            for index in range(len(values)):
                sides = []
                for step in (2e-5, -2e-5):
                    before = float(values[index])
                    values[index] += step
                    with torch.no_grad():
                        sides.append(float(loss()))
                    values[index] = before
                found.append((sides[0] - sides[1]) / 4e-5)
            gradients = gradient.view(-1).tolist()
            assert max(map(abs, gradients)) > 1e-4
            assert gradients == pytest.approx(found, abs=5e-3 * max(map(abs, gradients)))


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    model = sharp_model("Llama")
    before = logits(model, TEXT)
    with pytest.raises(KeyError), fitting(model, rule_equal_to(model, "ntk")):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model, TEXT), before)
