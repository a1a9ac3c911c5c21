"""``hf-posenc lm-eval`` up to the call of lm-eval, which need not be installed for this."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

import pytest
import torch

import hf_posenc.cli.lm_eval as harness
from hf_posenc.cli.main import main

HERE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words lm-eval is called with."""
    words: list[str] = []
    monkeypatch.setattr(harness, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(harness, "call_lm_eval", words.extend)
    return words


def test_flags_of_both_are_separated(passed: list[str]) -> None:
    ours = ["--method", "yarn", "--context_length=8k", "--option", "beta_fast=16", "ramp=paper", "--device", "cpu"]
    theirs = ["--tasks", "arc_easy", "piqa", "-f", "5", "--limit", "-1", "--model_args", "max_length=4096", "-s"]
    words = ["my-model", *theirs[:3], *ours[:3], *theirs[3:7], *ours[3:], *theirs[7:], "--dtype", "bfloat16"]
    assert main(["lm-eval", *words]) == 0
    assert passed[:4] == ["run", "--model", "hf_posenc", "--model_args"]
    assert json.loads(passed[4]) == {
        "pretrained": "my-model",
        "method": "yarn",
        "context_length": 8192,
        "options": {"beta_fast": 16, "ramp": "paper"},
        "dtype": "bfloat16",
    }
    assert passed[5:] == ["--device", "cpu", *theirs]


def test_without_a_method_the_model_is_taken_as_it_is(passed: list[str]) -> None:
    assert main(["lm-eval", "my-model", "--device", "auto", "--tasks", "piqa"]) == 0
    assert json.loads(passed[4]) == {"pretrained": "my-model", "dtype": "auto", "parallelize": True}
    assert passed[5:] == ["--device", HERE, "--tasks", "piqa"]


def test_the_device_is_one_of_this_machine(passed: list[str]) -> None:
    """lm-eval takes cuda:0 if it is told none."""
    assert main(["lm-eval", "my-model", "--tasks", "piqa"]) == 0
    assert passed[5:] == ["--device", HERE, "--tasks", "piqa"]


def test_a_dictionary_is_handed_on(passed: list[str]) -> None:
    dictionary = '{"rope_type": "linear", "factor": 2.0}'
    assert main(["lm-eval", "my-model", "--rope-scaling", dictionary, "--tasks", "piqa"]) == 0
    said = {"rope_scaling": dictionary, "dtype": "auto"}
    assert json.loads(passed[4]) == {"pretrained": "my-model", **said}


MISTAKES = [
    (["--tasks", "piqa"], "the following arguments are required: MODEL"),
    (["--tasks", "piqa", "m"], "the following arguments are required: MODEL"),
    (["m", "--factor", "4"], "says how to extend need a --method, such as yarn, or a --preset"),
    (["m", "--method", "yran"], "unknown method 'yran'"),
    (["m", "--method", "yarn", "--factor", "2", "--context-length", "8k"], "give --factor or --context-length, not"),
    (["m", "--method", "linear", "--option", "ramp=paper"], "'linear' takes no option 'ramp'"),
    (["m", "--model", "vllm"], "--model is always hf_posenc here"),
    (["m", "-M=hf"], "--model is always hf_posenc here"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_mistakes(passed: list[str], capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str) -> None:
    assert main(["lm-eval", *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert passed == []


def test_it_says_how_to_install_lm_eval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    assert main(["lm-eval", "my-model", "--tasks", "piqa"]) == 2
    assert capsys.readouterr().err == (
        "hf-posenc: error: lm-eval is not installed. It comes with: pip install 'hf_posenc[lm-eval]'\n"
    )


def test_help_names_both_kinds_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lm-eval", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "hf-posenc lm-eval MODEL [flags]" in printed
    assert "all other flags are passed to lm-eval" in printed
    assert "--option" in printed
