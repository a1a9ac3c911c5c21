"""The method ``fitted``: where a rule comes from, what it refuses, and that plain Transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from attention_models import sharp_model
from hf_posenc import describe, patch_model, save_extended
from hf_posenc.fitting.fitting import FitResult
from hf_posenc.methods.fitted import read_fitted_rule
from hf_posenc.methods.registry import named_options
from model_types import IDS
from patched_and_undone import assert_patched_saved_and_undone
from tiny_models import logits, make_model

DIVISORS = [1.0, 1.0, 1.25, 1.5, 2.0, 3.5, 3.25, 4.5]
RULE: dict[str, Any] = {
    "long_factor": DIVISORS,
    "short_factor": DIVISORS,
    "attention_factor": 1.0625,
    "fitted_rope_theta": 10000.0,
    "fitted_original_length": 64,
    "fitted_length": 256,
}


def write(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({"method": "fitted", "options": {**RULE, **changes}}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a rule, as ``save_extended`` leaves it."""
    save_extended(patch_model(sharp_model("Llama"), "fitted", **RULE), tmp_path / "longer")
    return tmp_path / "longer"


@pytest.mark.parametrize("source", ["folder", "manifest", "save"])
def test_where_a_rule_comes_from(folder: Path, tmp_path: Path, source: str) -> None:
    """The target is the fitted one; frequencies and the attention factor are the rule's, divided here."""
    path = {"folder": folder, "manifest": folder / "context_extension.json"}.get(source)
    if path is None:
        result = FitResult("fitted", RULE, None, {}, {}, [], {"teacher": "dca"}, 1.0)
        path = result.save(tmp_path / "rule.json")
        assert json.loads(path.read_text())["fitted_on"] == {"teacher": "dca"}
    model = patch_model(sharp_model("Llama"), "fitted", source=path)
    assert (describe(model)["method"], describe(model)["factor"]) == ("fitted", 4)
    assert model.config.max_position_embeddings == 256
    rotary = model.get_decoder().rotary_emb
    wanted = [1e4 ** (-i / 8) / divisor for i, divisor in enumerate(DIVISORS)]
    assert rotary.inv_freq.tolist() == pytest.approx(wanted, rel=1e-6)
    assert rotary.attention_scaling == pytest.approx(1.0625)
    assert "source" not in json.dumps(describe(model)["options"])  # the rule is kept, not where it was
    reloaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(model, IDS), logits(reloaded, IDS))


def test_patched_saved_and_undone(tmp_path: Path) -> None:
    assert_patched_saved_and_undone(sharp_model("Llama"), tmp_path / "longer", "fitted", **RULE)


def test_a_plain_short_list(tmp_path: Path) -> None:
    """Up to the original length the frequencies are the model's own, past it the rule's; the factor is the same."""
    model = patch_model(sharp_model("Llama"), "fitted", **{**RULE, "short_factor": [1.0] * 8})
    save_extended(model, tmp_path / "longer")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "longer").eval()
    equal = patch_model(sharp_model("Llama"), "fitted", **RULE)
    for length in (40, 64, 65, 200):
        ids = IDS[:, :length] if length <= IDS.shape[1] else torch.arange(length)[None] % 128
        found = logits(model, ids)
        assert torch.equal(found, logits(reloaded, ids))
        assert torch.equal(found, logits(equal, ids)) == (length > 64)


@pytest.mark.parametrize("request_", [{"factor": 2}, {"context_length": 100}, {"context_length": 256}])
def test_a_shorter_target_is_allowed(tmp_path: Path, request_: dict[str, int]) -> None:
    model = patch_model(sharp_model("Llama"), "fitted", source=write(tmp_path / "rule.json"), **request_)
    length = request_.get("context_length", 128)
    assert model.config.max_position_embeddings == length
    wanted = [1e4 ** (-i / 8) / divisor for i, divisor in enumerate(DIVISORS)]
    assert model.get_decoder().rotary_emb.inv_freq.tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("request_", [{"factor": 8}, {"context_length": 257}])
def test_a_longer_target_is_refused(tmp_path: Path, request_: dict[str, int]) -> None:
    model = sharp_model("Llama")
    before = logits(model, IDS)
    length = request_.get("context_length", 512)
    with pytest.raises(ValueError, match=f"256.*{length}"):
        patch_model(model, "fitted", source=write(tmp_path / "rule.json"), **request_)
    assert torch.equal(logits(model, IDS), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "fitted to a model with rope_theta 10000, and this one has 500000",
        ),
        (
            {"max_position_embeddings": 128},
            r"with original length 64, and this one has 128.*or pass original_max_position_embeddings=64 if",
        ),
    ],
)
def test_another_models_rule_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    model = make_model("Llama", **settings)
    with pytest.raises(ValueError, match=message):
        patch_model(model, "fitted", 2, source=write(tmp_path / "rule.json"))


def test_a_rule_of_other_heads_is_refused(tmp_path: Path) -> None:
    model = make_model("Llama", head_dim=32)
    with pytest.raises(ValueError, match="must hold 16 numbers"):
        patch_model(model, "fitted", source=write(tmp_path / "rule.json"))


def test_no_such_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(OSError, match="hf-posenc"):
            patch_model(sharp_model("Llama"), "fitted", source=path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"method": "fitted", "opt', "is not JSON"),
        ("[1, 2]", "holds no JSON object"),
        ('{"method": "yarn", "options": {}}', "is no fitted rule: it holds method 'yarn'"),
        ("{}", "is no fitted rule: it holds method None"),
        ('{"method": "fitted", "options": [1]}', "is no fitted rule"),
        (
            '{"method": "fitted", "options": {"long_factor": [1], "attention_factor": 1}}',
            "is no fitted rule: it has no short_factor, fitted_rope_theta, fitted_original_length, fitted_length",
        ),
    ],
)
def test_files_that_hold_no_rule(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "rule.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_fitted_rule(tmp_path / "rule.json")


def test_another_methods_folder(tmp_path: Path) -> None:
    save_extended(patch_model(make_model("Llama"), "yarn", 4), tmp_path / "yarn")
    with pytest.raises(ValueError, match="'yarn'"):
        patch_model(make_model("Llama"), "fitted", source=tmp_path / "yarn")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"long_factor": [1.0, -2.0, *DIVISORS[2:]]}, r"long_factor\[1\] must be greater than 0, got -2"),
        ({"long_factor": "abc"}, "long_factor must be a list"),
        ({"attention_factor": float("nan")}, "attention_factor must be a finite number"),
        ({"fitted_length": 0}, "fitted_length must be"),
    ],
)
def test_rules_of_damaged_numbers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        patch_model(make_model("Llama"), "fitted", source=write(tmp_path / "rule.json", **changes))


def test_source_and_numbers_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "rule.json")
    with pytest.raises(ValueError, match="attention_factor,"):
        patch_model(make_model("Llama"), "fitted", source=path, attention_factor=1.0)


def test_neither_source_nor_numbers() -> None:
    with pytest.raises(ValueError, match="'fitted'"):
        patch_model(make_model("Llama"), "fitted", 4)


def test_a_source_that_is_no_path() -> None:
    with pytest.raises(TypeError, match="source must"):
        patch_model(make_model("Llama"), "fitted", 4, source=3)


def test_names_of_rows_leave_the_lists_out() -> None:
    """Lists would fill a table; options of other methods, and of methods that are not known here, are said."""
    lists = {"long_factor": [1.0, 2.0], "short_factor": [1.0, 2.0], "attention_factor": 1.05, "fitted_length": 512}
    assert named_options("fitted", lists) == {}
    assert named_options("yarn", {"beta_fast": 16.0}) == {"beta_fast": 16.0}
    assert named_options("of another package", {"power": 2}) == {"power": 2}
