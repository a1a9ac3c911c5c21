"""rope_scaling dictionaries, as other programs take them, against Transformers' own reading of the same dictionary."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posenc import FinetuneConfig, describe, extend_config, patch_model, patched
from hf_posenc.cli.main import main
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation import read_records
from model_types import config_class_of, tiny_config
from tiny_llama import TINY_SIZES, make_tiny_llama
from tiny_models import logits, token_ids
from training_plans import extended_by

IDS = token_ids(200)
LENGTH = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, LENGTH: 64}
DICTIONARIES: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn-type": {"type": "yarn", "factor": 4.0, LENGTH: 64},
    "yarn-options": {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False},
    "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 64},
    "longrope": {"type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, LENGTH: 64},
}


@pytest.mark.filterwarnings("ignore:dynamic with scope='sequence'")
@pytest.mark.parametrize("name", DICTIONARIES)
def test_it_is_what_transformers_makes_of_it(name: str) -> None:
    given = DICTIONARIES[name]
    rule = {key: value for key, value in given.items() if key != "type"}
    parameters = {"rope_theta": 10000.0, "rope_type": given.get("type"), **rule}
    parameters.setdefault(LENGTH, 64) if given.get("type") == "longrope" else None
    length = 64 if name == "dynamic" else round(64 * given["factor"])
    config = LlamaConfig(**{**TINY_SIZES, "max_position_embeddings": length}, rope_parameters=parameters)
    theirs = LlamaForCausalLM(config).eval()
    theirs.load_state_dict(make_tiny_llama().state_dict())
    for said in (given, json.dumps(given)):
        ours = patch_model(make_tiny_llama(), rope_scaling=said)
        torch.testing.assert_close(logits(ours, IDS), logits(theirs, IDS), rtol=1e-5, atol=1e-6)
    extended = extend_config(make_tiny_llama().config, rope_scaling=given)
    assert describe(extended) == describe(ours)


def test_what_it_repeats_of_the_model_is_no_error() -> None:
    """vLLM's and Transformers 5's rope_parameters have the base beside the rule."""
    repeating = {**YARN, "rope_theta": 10000}
    model = patch_model(make_tiny_llama(), rope_scaling=repeating)
    assert describe(model) == extended_by(
        FinetuneConfig(output_dir="x", rope_scaling=json.dumps(repeating)), make_tiny_llama()
    )


def test_qwen3_vls_own_dictionary_is_taken() -> None:
    """As its model card has it: the axes of a position are repeated beside the rule."""
    config = tiny_config(config_class_of("qwen3_vl_text"))
    axes = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, **axes}
    extended = extend_config(config, rope_scaling={**YARN, "factor": 3.0, **axes})
    assert extended.rope_parameters == {"rope_theta": 1e4, **YARN, "factor": 3.0, **axes}
    for other, found in (({"mrope_interleaved": False}, "has True"), ({"mrope_layout": "thw"}, "has none")):
        [key] = other
        with pytest.raises(InvalidRequestError, match=f"rope_scaling.*{key}.*,.*{found}:"):
            extend_config(config, rope_scaling={**YARN, **axes, **other})


def test_any_key_of_the_models_own_may_be_repeated() -> None:
    own = {"a_word_of_its_own": [1, {"x": None}], "llama_4_scaling_beta": 0.1}
    config = make_tiny_llama().config
    config.rope_parameters = {**config.rope_parameters, **own}
    assert extend_config(config, rope_scaling={**YARN, **own}).rope_parameters.items() >= own.items()
    run = FinetuneConfig(output_dir="x", rope_scaling=json.dumps({**YARN, **own}))
    with pytest.raises(InvalidRequestError, match=r"a_word_of_its_own.*,"):
        extended_by(run, make_tiny_llama())


@pytest.mark.parametrize("key", ["rope_theta", "attn_factor"])
def test_what_it_has_of_the_model_otherwise_is_refused_with_both_values(key: str) -> None:
    theirs = {"rope_theta": "10000.0", "attn_factor": "none"}[key]
    other = {**YARN, key: 5e5}
    with pytest.raises(ValueError, match=f"rope_scaling.*{key} 500000.0,.*{theirs}:"):
        patch_model(make_tiny_llama(), rope_scaling=other)
    run = FinetuneConfig(output_dir="x", rope_scaling=json.dumps(other))
    for same in (run, dataclasses.replace(run, seed=3)):
        with pytest.raises(ValueError, match=f"rope_scaling.*{key} 500000.0,.*{theirs}:"):
            extended_by(same, make_tiny_llama())


def test_it_counts_from_its_own_original_length() -> None:
    """As Qwen's model cards have it: the config says 40960 tokens, the dictionary 32768."""
    model = make_tiny_llama(max_position_embeddings=80)
    patch_model(model, rope_scaling=YARN)
    assert describe(model)["context_length"] == 256
    assert describe(model)[LENGTH] == 64


def test_a_dictionary_of_another_model_is_warned_about() -> None:
    """Qwen2.5's, on a model of 64 tokens, was put in without a word."""
    with pytest.warns(UserWarning, match=r"32768.*64:"):
        patch_model(make_tiny_llama(), rope_scaling={**YARN, LENGTH: 32768})


def test_a_length_can_say_how_far() -> None:
    model = patch_model(make_tiny_llama(), rope_scaling={"rope_type": "yarn"}, context_length=512)
    assert describe(model)["factor"] == 8
    assert describe(patch_model(make_tiny_llama(), rope_scaling="linear", context_length=128))["method"] == "linear"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, r"has no rope_type \(or type\). One of linear, dynamic, yarn, llama3, longrope, su is needed"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2}, ValueError, "has linear and yarn as its type"),
        ({"rope_type": "yarm", "factor": 2}, ValueError, "can be linear, dynamic, .* Did you mean 'yarn'"),
        ({"rope_type": "dca", "factor": 2}, ValueError, "Other methods are named by method, not here"),
        ({"rope_type": "yarn", "factr": 2}, ValueError, "has no 'factr'. Did you mean 'factor'"),
        ({"rope_type": "linear", "beta_fast": 2}, ValueError, "of type 'linear' has no 'beta_fast'"),
        ({**YARN, "alpha": 1000.0}, ValueError, "has alpha 1000.0, and the model has none: it is HunYuan's name"),
        ({**YARN, "window": 8}, ValueError, "has window 8, and the model has none: no rule has such a key. Leave"),
        ({**YARN, "rope_theta": 1e6}, ValueError, "has rope_theta 1000000.0, and the model has 10000.0: .*abf"),
        (
            {**YARN, "attn_factor": 1.0},
            ValueError,
            "has attn_factor 1.0, and the model has none: .* give attention_fac",
        ),
        ({"type": "yarn"}, ValueError, "of type 'yarn' has no factor, .* Add \"factor\", as in .* or give context_le"),
        ("linear", ValueError, 'has no factor, so it does not say how far. Add "factor"'),
        ({**YARN, "factor": 0.25}, ValueError, "factor must be >= 1"),
        ({**YARN, "factor": "four"}, TypeError, "factor must be a number"),
        ({**YARN, LENGTH: 63.5}, ValueError, "must be a whole number of tokens"),
        ({**YARN, "beta_fast": math.nan}, ValueError, "beta_fast must be a finite number"),
        ("{rope_type: yarn}", ValueError, "is not JSON"),
        ('["yarn"]', TypeError, "must be a dictionary such as"),
        (4, TypeError, "must be a dictionary such as"),
    ],
)
def test_what_cannot_be_is_refused(given: Any, error: type[Exception], message: str) -> None:
    model = make_tiny_llama()
    with pytest.raises(error, match=message):
        patch_model(model, rope_scaling=given)
    assert describe(model)["method"] == "none"
    with pytest.raises(error, match=message):
        extend_config(model.config, rope_scaling=given)


@pytest.mark.parametrize(
    ("besides", "found"),
    [
        ({"factor": 2}, r"factor 2 \(it says 4.0\) was"),
        ({"method": "linear"}, r"method 'linear' \(it says 'yarn'\) was"),
        ({"preset": "x"}, "preset 'x' was"),
        ({"beta_fast": 8}, "beta_fast 8 was"),
        (
            {LENGTH: 128, "method": "ntk"},
            r"method 'ntk' .* and original_max_position_embeddings 128 \(it says 64\) were",
        ),
    ],
)
def test_what_is_given_beside_it_must_agree(besides: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=f"rope_scaling.*{found}"):
        patch_model(make_tiny_llama(), rope_scaling=YARN, **besides)
    with pytest.raises(ValueError, match="'yarn'"):  # though it is what no method stands for
        patch_model(make_tiny_llama(), "yarn", rope_scaling={"type": "linear", "factor": 2})
    agreeing: dict[str, Any] = {"method": "yarn", "factor": 4, LENGTH: 64, "beta_fast": 16}
    model = patch_model(make_tiny_llama(), rope_scaling={**YARN, "beta_fast": 16.0}, **agreeing)
    assert describe(model) == describe(patch_model(make_tiny_llama(), **agreeing))


def test_a_preset_decides_the_method_too() -> None:
    with pytest.raises(ValueError, match="'llama-2-together-8x'"):
        patch_model(make_tiny_llama(max_position_embeddings=4096), "yarn", preset="llama-2-together-8x")


def test_in_a_with_block() -> None:
    model = make_tiny_llama()
    with patched(model, rope_scaling=YARN):
        assert describe(model)["method"] == "yarn"
    assert describe(model)["method"] == "none"


def test_a_run_takes_it() -> None:
    run = FinetuneConfig(output_dir="x", rope_scaling={**YARN, "beta_fast": 16})  # type: ignore[arg-type]  # or JSON
    request = run.request()
    assert (request.method, request.factor, request.original_max_position_embeddings) == ("yarn", 4.0, 64)
    assert request.options == {"beta_fast": 16}
    assert dataclasses.replace(run).request() == request
    with pytest.raises(ValueError, match=r"rope_scaling.*'linear'"):
        FinetuneConfig(output_dir="x", rope_scaling=json.dumps(YARN), method="linear")
    both = FinetuneConfig(output_dir="x", rope_scaling=json.dumps(YARN), method="yarn").request()
    assert (both.method, both.factor, both.original_max_position_embeddings) == ("yarn", 4.0, 64)
    with pytest.raises(ValueError, match="say how"):
        FinetuneConfig(output_dir="x", rope_scaling="linear")
    assert FinetuneConfig(output_dir="x", rope_scaling="linear", stages=["128:1k", "256:1k"]).factor is None


def test_the_commands_take_it(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rope-scaling", json.dumps(YARN)]
    assert main(["patch", str(tiny_checkpoint), str(tmp_path / "out"), *words]) == 0
    assert describe(tmp_path / "out")["method"] == "yarn"
    assert "yarn x4: 64 -> 256 tokens" in capsys.readouterr().out
    (tmp_path / "text.txt").write_text("some words " * 100)
    results = tmp_path / "results.jsonl"
    arguments = ["--documents", str(tmp_path / "text.txt"), "--context-lengths", "64", "128", "--output", str(results)]
    assert main(["eval", str(tiny_checkpoint), *arguments, "--method", "none", *words]) == 0
    assert {record.method for record in read_records(results)} == {"none", "yarn"}
    capsys.readouterr()
    for wrong, message in (
        (["--rope-scaling", '{"rope_type": "yarm"}'], "Did you mean 'yarn'"),
        ([*words, "--method", "linear"], "method 'linear' (it says 'yarn') was given too"),
        ([*words, "--factor", "2"], "factor 2.0 (it says 4.0) was given too"),
        (["--rope-scaling", "yarn"], 'Add "factor"'),
    ):
        assert main(["patch", "nowhere", str(tmp_path / "out2"), *wrong]) == 2
        assert message in capsys.readouterr().err
        assert main(["eval", "nowhere", *arguments, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert main(["list", "methods", "yarn", *words]) == 2
    assert "--rope-scaling:" in capsys.readouterr().err
