"""What `hf-posenc finetune` refuses by a model's config alone, before it opens the weights."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PhiConfig

from hf_posenc import patch_model, save_extended
from hf_posenc.assets import tiny_model_path
from hf_posenc.checkpoint.pretrained import load_tokenizer
from hf_posenc.cli.main import main
from hf_posenc.training import FinetuneConfig
from hf_posenc.training.conflicts import Combination, refuse_conflicts
from hf_posenc.training.dry_run import dry_run
from hf_posenc.training.launch import Launch
from older_transformers import IS_5_0


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The tiny model, which reads 256 tokens, with its weights cut off."""
    shutil.copytree(tiny_model_path(), tmp_path / "broken")
    weights = tmp_path / "broken/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return tmp_path / "broken"


def said(capsys: pytest.CaptureFixture[str], base: Path, *flags: str) -> str:
    words = ["finetune", str(base), "--output-dir", str(base.with_name("run")), "--documents", "novel:emma"]
    assert main([*words, "--device", "cpu", *flags]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert not base.with_name("run").exists()
    return captured.err.splitlines()[-1].removeprefix("hf-posenc: error: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--factor 2 --seq-len 64k", "--seq-len 65536 is longer than the target length, 512 tokens"),
        ("--factor 2 --token-budget 511", "--token-budget 511 is less than one step, 512 tokens. Give it"),
        ("--factor 1 --position-schedule pose", "the target is 256 tokens and the model was trained on 256"),
        ("--factor 2 --position-schedule pose --seq-len 512", "'pose' has nothing to skip in blocks of seq_len 512"),
        ("--stages 128:100k 512:100k", "stages: the model was trained on 256 tokens, and 128 are not beyond them"),
        (
            "--stages 512:10 1024:10",
            "stages: the stage of 512 tokens cannot be trained: --token-budget 10 is less than one step, 512",
        ),
        ("--stages 512:9k 1024:9k --seq-len 600", "--seq-len 600 is longer than the target length, 512 tokens"),
        ("--recipe longlora --factor 4 --group-share 0.001", "--group-share 0.001 of a block of 1024 tokens gives"),
        ("--recipe abf --context-length 2M", "no base was published for 2097152 tokens"),
    ],
)
def test_what_the_config_rules_out_is_said_before_weights_are_opened(
    broken: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
):
    assert message in said(capsys, broken, *flags.split())


@pytest.mark.parametrize(
    "flags",
    [
        "--factor 2",
        "--factor 2 --method dca",
        "--factor 4 --recipe longlora",
        "--factor 4 --recipe progressive",
        "--method alibi --seq-len 256",
        "--stages 512:100k 1024:100k --method dynamic_yarn",
    ],
)
def test_what_it_does_not_rule_out_comes_to_the_weights(broken: Path, capsys: pytest.CaptureFixture[str], flags: str):
    line = said(capsys, broken, *flags.split())
    assert line.startswith("the weights of ")
    assert line.endswith("a file is damaged or was cut off. Get it again.")


def test_an_extended_model_is_gone_through_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    patch_model(model, "dynamic_yarn", 2)
    save_extended(model, tmp_path / "staged", load_tokenizer(tiny_model_path(), model))
    caplog.set_level(logging.INFO)
    caplog.clear()  # what saving said
    dry_run(str(tmp_path / "staged"), FinetuneConfig(str(tmp_path / "run"), seq_len=512), Launch())
    with pytest.raises(ValueError, match=r"seq_len 513.*512"):
        dry_run(str(tmp_path / "staged"), FinetuneConfig(str(tmp_path / "run"), seq_len=513), Launch())
    with pytest.raises(ValueError, match=r"dynamic_yarn,.*2, 512"):
        dry_run(str(tmp_path / "staged"), FinetuneConfig(str(tmp_path / "run"), method="linear", factor=2), Launch())
    assert not [record for record in caplog.records if record.name.startswith("hf_posenc")]


def test_a_rule_that_a_model_brings_is_refused_for_what_it_is():
    shared = Launch(processes=2, fsdp=2, cp_size=2)
    run = Combination(FinetuneConfig("run"), shared, "sdpa", seq_len=512, method="dca")
    with pytest.raises(ValueError, match="attention itself"):
        refuse_conflicts(replace(run, changes_attention=True))
    refuse_conflicts(run)


def test_what_no_config_can_say_of_an_extended_model_is_known(tmp_path: Path):
    config = PhiConfig(
        **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
        **{
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "eos_token_id": 0,
            "bos_token_id": 0,
        },
    )
    model = patch_model(AutoModelForCausalLM.from_config(config), "yarn", 2, temperature="logits")
    save_extended(model, tmp_path / "phi")
    wanted = FinetuneConfig(str(tmp_path / "run"), method="yarn", factor=2.0, options={"temperature": "logits"})
    dry_run(str(tmp_path / "phi"), wanted, Launch())
    with pytest.raises(ValueError, match="2, 128"):
        dry_run(str(tmp_path / "phi"), FinetuneConfig(str(tmp_path / "run"), method="yarn", factor=2.0), Launch())


def test_an_attention_that_is_not_installed_is_left_to_the_loading(tmp_path: Path):
    shutil.copytree(tiny_model_path(), tmp_path / "flash")
    file = tmp_path / "flash/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attn_implementation": "flash_attention_2"}))
    wrong = FinetuneConfig(str(tmp_path / "run"), factor=2.0, seq_len=513)
    if not IS_5_0:  # which takes another implementation then
        dry_run(str(tmp_path / "flash"), wrong, Launch())
    with pytest.raises(ValueError, match=r"seq_len 513.*512"):
        dry_run(str(tmp_path / "flash"), wrong, Launch(), attention="eager")
