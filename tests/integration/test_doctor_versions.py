"""What the doctor says each version of Transformers loads, against those versions in their own processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from doctor_configs import AXES, LAYERS, OF_64, SIZES, VISION, YARN, config_of, vl_config
from hf_posenc.doctor.mending import mended
from hf_posenc.doctor.transformers_readers import VERSIONS, Refused, Rope, read_by, text_part
from hf_posenc.methods.base import plain_frequencies
from hf_posenc.methods.registry import make_method
from hf_posenc.spec import RopeSpec
from other_transformers import python_with

LISTS = {"short_factor": [1.5] * 8, "long_factor": [2.0] * 8}
LINEAR = {"rope_type": "linear", "factor": 4.0}
FLAT: dict[str, dict[str, Any]] = {
    "plain": config_of(),
    "5 only": config_of(rope_parameters={**YARN, "rope_theta": 5e5}),
    "4 only": config_of(rope_theta=5e5, rope_scaling={"type": "yarn", **OF_64}),
    "no original": config_of(rope_theta=5e5, rope_scaling={"type": "yarn", "factor": 4.0}),
    "two rules": config_of(rope_theta=5e5, rope_scaling=LINEAR, rope_parameters={**YARN, "rope_theta": 5e5}),
    "two rules, base in one": config_of(rope_scaling=LINEAR, rope_parameters={**YARN, "rope_theta": 5e5}),
    "two bases": config_of(rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "base null": config_of(rope_parameters={**LINEAR, "rope_theta": None}),
    "base missing": config_of(rope_parameters=LINEAR),
    "float length": config_of(rope_scaling=LINEAR) | {"max_position_embeddings": 256.0},
    "two types": config_of(rope_scaling={**LINEAR, "type": "dynamic"}),
    "no type": config_of(rope_scaling={"factor": 4.0}),
    "su": config_of(rope_scaling={"type": "su", **OF_64, **LISTS}),
    "longrope": config_of(rope_scaling={"type": "longrope", **OF_64, **LISTS}),
    "longrope, no factor": config_of(
        rope_scaling={"type": "longrope", **LISTS, "original_max_position_embeddings": 64}
    ),
    "longrope, original at the top": config_of(
        original_max_position_embeddings=64, rope_scaling={"type": "longrope", "factor": 8.0, **LISTS}
    ),
    "yarn, original at the top": config_of(
        original_max_position_embeddings=64, rope_scaling={"type": "yarn", "factor": 4.0}
    ),
    "llama3, no original": config_of(
        rope_scaling={"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ),
    "attn_factor": config_of(rope_scaling={"type": "yarn", **OF_64, "attn_factor": 1.5, "finetuned": True}),
    "half a pair": config_of(rope_scaling={"type": "yarn", **OF_64, "mscale": 0.7}),
    "a word for a factor": config_of(rope_scaling={"rope_type": "linear", "factor": "4"}),
    "unknown": config_of(rope_scaling={"type": "dynamic-yarn", "factor": 4.0}),
    "mistral": config_of("mistral", rope_scaling={"type": "yarn", **OF_64}),
    "mixtral": config_of("mixtral", rope_scaling={"type": "yarn", **OF_64}),
    "cohere": config_of("cohere"),
    "stablelm": config_of("stablelm", rope_theta=5e5, partial_rotary_factor=0.5),
    "stablelm, 5 only": config_of(
        "stablelm", rope_parameters={"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    ),
}


def by_layer_type(full: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


NESTED = {
    f"{model_type}, {name}": config_of(model_type, head_dim=16, layer_types=LAYERS, **settings)
    for model_type in ("gemma3_text", "olmo3")
    for name, settings in {
        "plain": {},
        "flat parameters": {"rope_parameters": {**LINEAR, "rope_theta": 5e5}},
        "flat scaling": {"rope_theta": 5e5, "rope_scaling": LINEAR},
        "type alone": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "half nested": {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 5e5}}},
        "nested": {"rope_parameters": by_layer_type({**LINEAR, "rope_theta": 5e5})},
        "nested plain": {"rope_parameters": by_layer_type({"rope_type": "default", "rope_theta": 5e5})},
        "yarn flat": {"rope_parameters": {**YARN, "rope_theta": 5e5}},
        "yarn of 4": {"rope_theta": 5e5, "rope_scaling": {**YARN, "type": "yarn"}},
        "yarn nested": {"rope_parameters": by_layer_type({**YARN, "rope_theta": 5e5})},
        "yarn, both": {
            "rope_parameters": by_layer_type({**YARN, "rope_theta": 5e5}),
            "rope_theta": 5e5,
            "rope_scaling": {**YARN, "type": "yarn"},
        },
        "linear, both": {
            "rope_parameters": by_layer_type({**LINEAR, "rope_theta": 5e5}),
            "rope_theta": 5e5,
            "rope_scaling": {**LINEAR, "type": "linear"},
        },
    }.items()
}


SEVERAL_AXES = {
    f"{model_type}, {'nested' if nested else 'flat'}, {name}": vl_config(model_type, nested, **settings)
    for model_type, nested in [(m, n) for m in VISION for n in (True, False) if n or m != "qwen3_vl"]
    for name, settings in {
        "nothing": {},
        "mrope": {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", **AXES}},
        "mrope, new word": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "mrope", **AXES}},
        "mrope, both words": {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "rope_type": "mrope", **AXES}},
        "default": {"rope_theta": 5e5, "rope_scaling": {"type": "default", "rope_type": "default", **AXES}},
        "as 5 saves it": {"rope_parameters": {"type": "mrope", "rope_type": "default", "rope_theta": 5e5, **AXES}},
        "default of 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, **AXES}},
        "mrope of 5": {"rope_parameters": {"rope_type": "mrope", "rope_theta": 5e5, **AXES}},
        "no type": {"rope_theta": 5e5, "rope_scaling": AXES},
        "yarn, type": {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **OF_64, **AXES}},
        "yarn, rope_type": {"rope_theta": 5e5, "rope_scaling": {**YARN, **AXES}},
        "yarn, both words": {"rope_theta": 5e5, "rope_scaling": {**YARN, "type": "yarn", **AXES}},
        "yarn of 5": {"rope_parameters": {**YARN, "rope_theta": 5e5, **AXES}},
        "yarn beside mrope": {"rope_theta": 5e5, "rope_scaling": {**YARN, "type": "mrope", **AXES}},
        "yarn, no section": {"rope_theta": 5e5, "rope_scaling": {**YARN, "type": "yarn"}},
    }.items()
}
LOAD = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
for name, config in json.load(open(sys.argv[1])).items():
    try:
        loaded = type(AutoConfig.for_model(config["model_type"])).from_dict(config)
        if "vision_config" in config:
            model = AutoModel.from_config(loaded).language_model
            model(input_ids=torch.tensor([[5, 6, 7]]))
        else:
            model = AutoModelForCausalLM.from_config(loaded).model
    except Exception as error:
        print(json.dumps([name, None, str(error)[:200], None]))
        continue
    rotary = model.rotary_emb if hasattr(model, "rotary_emb") else model.rotary_embs["full_attention"]
    label = "full_attention_" if hasattr(rotary, "full_attention_inv_freq") else ""
    held = getattr(rotary, label + "inv_freq").tolist()
    if label:
        windowed = rotary.sliding_attention_inv_freq
    elif hasattr(model, "rotary_embs"):
        windowed = model.rotary_embs["sliding_attention"].inv_freq
    else:
        windowed = getattr(model, "rotary_emb_local", rotary).inv_freq
    print(json.dumps([name, held, getattr(rotary, label + "attention_scaling"), windowed.tolist()]))
"""
NUMBERS = {"4.57": "4.57.6", "5.0": "5.0.0", "5.23": "5.23.0"}


def loaded_by(version: str, configs: dict[str, dict[str, Any]], folder: Path) -> dict[str, list[Any]]:
    file = folder / "configs.json"
    file.write_text(json.dumps(configs))
    run = [python_with(NUMBERS[version]), "-c", LOAD, file]
    output = subprocess.run(run, check=True, capture_output=True, text=True, cwd=folder).stdout
    return {row[0]: row[1:] for row in map(json.loads, output.splitlines())}


def frequencies(rope: Rope) -> tuple[list[float], float]:
    width = int(SIZES["hidden_size"] / SIZES["num_attention_heads"] * (rope.partial or 1.0))
    spec = RopeSpec(width, rope.rope_theta, rope.original or 64)
    if rope.rope_type == "default":
        return plain_frequencies(spec).tolist(), 1.0
    inv_freq, factor = make_method(rope.rope_type, rope.factor, dict(rope.options)).frequencies(spec)
    return inv_freq.tolist(), factor


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_what_each_version_loads(tmp_path: Path, version: str) -> None:
    configs = {**FLAT, **NESTED, **SEVERAL_AXES}
    real = loaded_by(version, configs, tmp_path)
    for name, config in configs.items():
        held, scale, windowed = real[name]
        try:
            rope = read_by(version, text_part(config)[1])
        except Refused:
            assert held is None, f"{name} is loaded"
            continue
        if rope is None:
            continue
        assert held is not None, f"{name}: {scale}"
        expected, factor = frequencies(rope)
        assert held == pytest.approx(expected, rel=2e-6), name
        assert scale == pytest.approx(factor, rel=1e-6), name
        if name in NESTED and rope.rope_type != "default":
            assert rope.every_layer == (windowed == held), name


@pytest.mark.slow
def test_every_version_loads_the_same_from_a_mended_config(tmp_path: Path) -> None:
    fixed = {}
    for name, config in {**FLAT, **SEVERAL_AXES}.items():
        try:
            fixed[name] = mended(config)
        except ValueError:  # what is meant is not known
            continue
        if name in SEVERAL_AXES:
            section = text_part(config)[1].get("rope_scaling") or text_part(config)[1].get("rope_parameters") or {}
            text = text_part(fixed[name])[1]
            for name in ("rope_scaling", "rope_parameters"):
                assert text[name].get("mrope_section") == section.get("mrope_section"), name
    assert sum(name in FLAT for name in fixed) > 15
    assert sum(name in SEVERAL_AXES for name in fixed) > 60
    one, *others = (loaded_by(version, fixed, tmp_path) for version in VERSIONS)
    assert [name for name, row in one.items() if row[0] is None] == []
    for name, (held, scale, _) in one.items():
        for other in others:
            assert other[name][0] == pytest.approx(held, rel=2e-6), name
            assert other[name][1] == pytest.approx(scale, rel=1e-6), name
