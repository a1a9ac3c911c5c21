"""Exports of rules that only hf_posenc runs: refused, or the nearest static rule as the stacks read it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hf_posenc import patch_model, save_extended
from hf_posenc.cli.main import main
from hf_posenc.exports import STACKS, export_command, gguf_metadata, gguf_tensors
from served_frequencies import Frequencies, extended, flag, keys_of_flags, llama_cpp_reads, sglang_reads, vllm_reads
from tiny_models import make_model

STATIC_IN_PLACE = ("linear", "ntk", "ntk_by_parts", "ntk_rcd", "yarn", "yarn_rcd", "llama3")


def run_in_attention(folder: Path, method: str = "dynamic_yarn") -> Path:
    model = patch_model(make_model("Llama"), method, 4)
    return save_extended(model, folder, base_model="org/base model")


def live_frequencies(method: str) -> Frequencies:
    rotary = patch_model(make_model("Llama"), method, 4).get_decoder().rotary_emb
    return rotary.inv_freq.double(), float(rotary.attention_scaling)


@pytest.mark.parametrize("method", ["dynamic", "dynamic_yarn", "self_extend", "dca", "rerope", "leaky_rerope"])
def test_a_rule_of_the_attention_is_refused_by_every_stack(method: str, tmp_path: Path) -> None:
    path = run_in_attention(tmp_path / "model", method)
    reason = rf"cannot run {method}: the rule depends on the position of each query, so only hf_posenc.*--as yarn"
    for stack in STACKS:
        with pytest.raises(ValueError, match=reason):
            export_command(path, stack)
    for read in (gguf_metadata, gguf_tensors):
        with pytest.raises(ValueError, match=reason):
            read(path)


@pytest.mark.parametrize("method", STATIC_IN_PLACE)
@pytest.mark.parametrize(
    ("stack", "override", "reads"),
    [("vllm", "--hf-overrides", vllm_reads), ("sglang", "--json-model-override-args", sglang_reads)],
)
def test_servers_run_the_static_rule_by_an_override_of_the_folders_config(
    method: str, stack: str, override: str, reads: Callable[..., Frequencies], tmp_path: Path
) -> None:
    path = run_in_attention(tmp_path / "model")
    text = export_command(path, stack, as_method=method)
    (words,) = [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]
    assert str(path) in words
    assert flag(words, "--max-model-len" if stack == "vllm" else "--context-length") == "256"
    said = json.loads(flag(words, override))
    assert said.keys() == {"rope_parameters", "max_position_embeddings"}
    assert said["max_position_embeddings"] == 256
    config = AutoConfig.from_pretrained(path)
    assert config.max_position_embeddings == 64  # the file is the base model's, so the flag has to say it
    config.update({"max_position_embeddings": 256})
    inv_freq, factor = live_frequencies(method)
    read = reads(config, said["rope_parameters"])
    torch.testing.assert_close(read[0], inv_freq, rtol=1e-6, atol=0)
    assert read[1] == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn"])
def test_llama_cpp_runs_the_static_rule_by_its_flags(method: str, tmp_path: Path) -> None:
    path = run_in_attention(tmp_path / "model")
    text = export_command(path, "llama.cpp", as_method=method)
    convert, serve = [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]
    assert convert[2] == str(path)
    assert flag(serve, "-c") == "256"
    keys = keys_of_flags(serve, freq_base=10000.0)  # what the converter writes of the base model's config
    assert keys["context_length"] == 256
    inv_freq, factor = live_frequencies(method)
    read = llama_cpp_reads(keys, {}, head_dim=16)
    torch.testing.assert_close(read[0], inv_freq, rtol=1e-6, atol=0)
    assert read[1] == pytest.approx(factor, rel=1e-6)


def test_what_the_static_rule_loses_is_said(tmp_path: Path) -> None:
    model = patch_model(make_model("Llama"), "self_extend", 4, window=24)
    path = save_extended(model, tmp_path / "model", tokens_trained=12345)
    comments = [line for line in export_command(path, "vllm", as_method="yarn").splitlines() if line.startswith("#")]
    assert comments[0].startswith("# yarn x4, 64 -> 256 tokens; checked against the source of vLLM")
    assert "self_extend leaves up to 24 tokens as they are, yarn changes all lengths" in comments[2]
    assert "fine-tuned on 12,345 tokens with self_extend, not with yarn" in comments[3]
    untrained = export_command(run_in_attention(tmp_path / "other"), "vllm", as_method="yarn")
    assert "dynamic_yarn leaves up to 64 tokens as they are" in untrained
    assert "the model was not fine-tuned" in untrained
    model.save_pretrained(tmp_path / "by-others")  # which does not say
    by_others = export_command(tmp_path / "by-others", "vllm", as_method="yarn")
    assert "the model does not say whether it was fine-tuned" in by_others


def test_a_window_that_was_switched_off_is_in_the_override(tmp_path: Path) -> None:
    model = make_model("Mistral", sliding_window=32)
    path = save_extended(patch_model(model, "dynamic_yarn", 4, sliding_window="off"), tmp_path / "model")
    assert json.loads((path / "config.json").read_text())["sliding_window"] == 32
    (words,) = [w for w in map(shlex.split, export_command(path, "vllm", "yarn").splitlines()) if w[0] == "vllm"]
    assert json.loads(flag(words, "--hf-overrides"))["sliding_window"] is None


def test_a_scaled_base_is_told_from_an_edited_one(tmp_path: Path) -> None:
    """The rule took the place of the base's own scaling, which its config.json keeps."""
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    base = make_model("Llama", rope_parameters=llama3, max_position_embeddings=128)
    path = save_extended(patch_model(base, "dynamic_yarn", 4, on_scaled="replace"), tmp_path / "model")
    assert json.loads((path / "config.json").read_text())["rope_parameters"]["rope_type"] == "llama3"
    words = next(w for w in map(shlex.split, export_command(path, "vllm", "yarn").splitlines()) if w[0] == "vllm")
    read = vllm_reads(AutoConfig.from_pretrained(path), json.loads(flag(words, "--hf-overrides"))["rope_parameters"])
    torch.testing.assert_close(read[0], live_frequencies("yarn")[0], rtol=1e-6, atol=0)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    with pytest.raises(ValueError, match="base model's"):
        export_command(path, "vllm", as_method="yarn")


def test_what_as_cannot_do_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_in_attention(tmp_path / "model")
    static, _ = extended(tmp_path / "static", "yarn")
    cases = [
        (
            (path, "tgi", "yarn"),
            r"TGI reads config\.json only.*patch .*model OUT --method yarn --context-length 256",
        ),
        ((path, "llama.cpp", "llama3"), r"no flags for llama3.*--as yarn, ntk or linear"),
        ((path, "llama.cpp", "ntk_by_parts"), "no flags for ntk_by_parts"),
        ((path, "vllm", "longrope"), "linear, llama3, ntk, ntk_by_parts, ntk_rcd, yarn, yarn_rcd; got 'longrope'"),
        ((path, "vllm", "dynamic"), "takes a static rule"),
        ((path, "vllm", "yarm"), "Did you mean 'yarn'"),
        ((static, "vllm", "linear"), r"says its rule already \(yarn\), and servers run that: leave --as out"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            export_command(*arguments)
    assert main(["export", str(path), "--to", "vllm", "--as", "pi"]) == 0
    assert capsys.readouterr().out == export_command(path, "vllm", "linear") + "\n"
    assert main(["export", str(path), "--to", "vllm"]) == 2
    assert "vLLM cannot run dynamic_yarn" in capsys.readouterr().err
