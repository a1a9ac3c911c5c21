"""The doctor on live models and .gguf files, and its command: what it says, writes and leaves alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from doctor_configs import SIZES, TEMPERATURE, YARN, config_of, rotary_of, yarn
from hf_posenc import patch_model
from hf_posenc.cli.main import main
from hf_posenc.doctor import diagnose, write_mended
from tiny_models import STATIC_METHODS, make_model, method_options

# Live models.


def test_row_1_a_config_set_after_loading() -> None:
    model = make_model("Llama")
    assert diagnose(model).sound
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "linear", "factor": 4.0}
    diagnosis = diagnose(model)
    assert [f.code for f in diagnosis.findings] == ["not-what-it-says"]
    assert dict(diagnosis.lines)["holds"] == "something else"


def test_row_10_rounded_frequencies() -> None:
    assert "rounded" in {f.code for f in diagnose(make_model("Llama").to(torch.bfloat16)).findings}
    assert diagnose(patch_model(make_model("Llama"), "yarn", 4).to(torch.bfloat16)).sound


def test_a_module_put_into_each_layer_is_never_called() -> None:  # disagreement D18
    model = make_model("Llama")
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    (finding,) = diagnose(model).findings
    assert "(2 in all) is never called" in finding.what


def test_rows_18_and_19_in_a_live_model() -> None:
    model = make_model("Llama")
    model.config.rope_theta = 1e6
    assert [f.code for f in diagnose(model).findings] == ["not-compared"]
    model = make_model("Llama")
    model.config.rope_parameters = {"rope_type": "linear", "factor": 4.0}
    assert "has no rope_theta" in diagnose(model).findings[0].what


def test_patched_models_are_sound() -> None:
    for key in STATIC_METHODS:
        model = make_model("Llama")
        name, options = method_options(key, model)
        assert diagnose(patch_model(model, name, 4, **options)).findings == ()


# GGUF.


def test_row_27_the_scaling_of_a_gguf_is_mended_into_a_config(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install 'hf_posenc[smollm2]'")
    from gguf_files import write_gguf

    settings = {**SIZES, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64.0}
    diagnosis = diagnose(write_gguf(tmp_path / "scaled.gguf", model, **scaling))
    assert [f.code for f in diagnosis.findings if f.severity != "note"] == ["gguf-dropped"]
    write_mended(diagnosis, tmp_path / "fixed")
    held, scale = rotary_of(json.loads((tmp_path / "fixed" / "config.json").read_text()))
    assert held == pytest.approx(yarn(5e5), rel=2e-6)
    assert scale == pytest.approx(TEMPERATURE)
    assert diagnose(write_gguf(tmp_path / "plain.gguf", model)).sound


# The command.


def test_the_command_says_it_and_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of(rope_parameters={**YARN, "rope_theta": 5e5})))
    assert main(["doctor", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "4.57 loads no scaling, rope_theta 10000" in shown
    assert shown.endswith("1 thing is wrong.\n")
    assert main(["doctor", str(file), "--fix", str(tmp_path / "new")]) == 0
    assert main(["doctor", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.endswith("sound: nothing is wrong.\n")


def test_the_input_is_replaced_only_with_a_backup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of(rope_parameters={**YARN, "rope_theta": 5e5})))
    before = file.read_bytes()
    assert main(["doctor", str(tmp_path), "--fix", str(tmp_path)]) == 0
    assert (tmp_path / "config.json.bak").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "config.json.bak"]
    after = file.read_bytes()
    assert main(["doctor", str(tmp_path), "--fix", str(file)]) == 2
    assert "config.json.bak'" in capsys.readouterr().err
    assert file.read_bytes() == after
    (tmp_path / "other.json").write_text("{}")
    assert main(["doctor", str(tmp_path), "--fix", str(tmp_path / "other.json")]) == 2
    assert (tmp_path / "other.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "holds no JSON object"),
        ("{", "is not JSON"),
        ("{}", "has no model_type"),
        ('{"model_type": "llama", "rope_scaling": "yarn"}', "must be a dictionary"),
    ],
)
def test_what_is_no_config(tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["doctor", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "gone")]) == 2
