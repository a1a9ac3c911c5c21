"""``convert_layout``: against a permutation by hand, Meta's own way of rotating, and the conversion undone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attention_models import sharp_model
from hf_posenc import convert_layout, describe, load_extended, patch_model, save_extended
from hf_posenc.methods.encodings.rope import rotate_complex, rotate_real
from hf_posenc.patching.layouts import to_half_split, to_interleaved
from older_transformers import skip_if_left_out
from tiny_models import assert_same_state, logits, make_model, state, token_ids

IDS = token_ids(40, rows=2)


def test_rows_are_those_of_metas_files() -> None:
    """Transformers' conversion script puts row ``2 i + j`` of a head to row ``j * d / 2 + i``: its inverse, by hand."""
    rows = torch.arange(16)[:, None].expand(16, 3)
    expected = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    assert to_interleaved(rows, 16)[:, 0].tolist() == expected
    assert to_interleaved(rows, 8)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, *range(8, 16)]
    permuted = rows[:, :1].view(1, 8, 2, 1).transpose(1, 2).reshape(16, 1)  # the script's permute, of one head
    assert torch.equal(to_interleaved(permuted, 16), rows[:, :1])
    assert torch.equal(to_half_split(to_interleaved(rows, 12), 12), rows)


@pytest.mark.parametrize("rotate", [rotate_real, rotate_complex])
def test_rotating_moved_rows_is_moving_rotated_rows(rotate: torch.nn.Module) -> None:
    states, angles = torch.randn(5, 16, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    moved = torch.stack([to_interleaved(row, 16) for row in states])
    expected = torch.stack([to_interleaved(row, 16) for row in rotate(states, angles)])
    assert torch.allclose(rotate(moved, angles, interleaved=True), expected, atol=1e-12)


@pytest.mark.parametrize(
    "family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Olmo2", "SmolLM3", "StableLm"]
)
def test_the_model_computes_the_same_and_comes_back_to_the_bit(family: str) -> None:
    if family == "StableLm":
        skip_if_left_out("stablelm")
    model = sharp_model(family)
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name or "proj.bias" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)  # at random's own they are alike in every feature
    before, out = state(model), logits(model, IDS)
    convert_layout(model)
    assert describe(model)["options"] == {"interleaved": True}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(model.state_dict()[name], before[name])
    assert (logits(model, IDS) - out).abs().max() < 1e-5 * out.abs().max()
    convert_layout(model, to="half_split")
    assert_same_state(before, state(model))
    assert torch.equal(logits(model, IDS), out)


def test_moved_weights_without_the_rule_compute_something_else() -> None:
    """The control: what a converter that forgets the code gives."""
    model = sharp_model("Llama")
    out = logits(model, IDS)
    moved = convert_layout(sharp_model("Llama"))
    model.load_state_dict(moved.state_dict())
    assert (logits(model, IDS) - out).abs().max() > 1e-2 * out.abs().max()


def test_saved_interleaved_and_loaded(tmp_path: Path) -> None:
    model = convert_layout(sharp_model("Llama"))
    save_extended(model, tmp_path / "meta")
    again = load_extended(tmp_path / "meta")
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    assert torch.equal(logits(convert_layout(again, to="half_split"), IDS), logits(sharp_model("Llama"), IDS))


@pytest.mark.parametrize(
    ("family", "method", "to", "message"),
    [
        ("Llama", None, "half_split", "in the half_split layout already"),
        ("Llama", None, "halves", "unknown layout 'halves'. Known: interleaved, half_split"),
        ("Llama", "yarn", "interleaved", "extended by yarn, which reads half-split weights"),
        ("Phi3", None, "interleaved", "keeps queries and keys in another way"),
    ],
)
def test_mistakes_change_nothing(family: str, method: str | None, to: str, message: str) -> None:
    model = make_model(family)
    if method:
        patch_model(model, method, 2)
    before = state(model)
    with pytest.raises(ValueError, match=message):
        convert_layout(model, to=to)
    assert_same_state(before, state(model))


def test_a_scaling_of_the_checkpoint_is_not_said_to_be_a_patch() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match=r"extended by linear.*convert the model without it"):
        convert_layout(make_model("Llama", rope_parameters=rope))
    with pytest.raises(ValueError, match=r"extended by yarn.*unpatch_model"):
        convert_layout(patch_model(make_model("Llama"), "yarn", 4))
