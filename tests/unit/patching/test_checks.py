"""Presets and windows wherever a command takes a method: measured as requested, refused before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_posenc.checkpoint.loading import load_model
from hf_posenc.cli.main import main
from hf_posenc.evaluation import perplexity, read_records
from hf_posenc.patching.api import patched
from hf_posenc.patching.presets import presets
from tiny_llama import make_tiny_tokenizer
from tiny_models import make_model

PRESET = "smollm2-yarn-2x"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("It is a truth universally acknowledged. " * 20)
    return path


@pytest.fixture
def declared_8k(tiny_checkpoint: Path) -> Path:
    """The tiny checkpoint, whose config says that it was trained on 8192 tokens."""
    file = tiny_checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 8192}))
    return tiny_checkpoint


def measure(model: Path, text_file: Path, *flags: str) -> list[str]:
    return ["eval", str(model), "--documents", str(text_file), "--context-lengths", "128", "--hide-progress", *flags]


def test_a_preset_is_measured_beside_the_model_as_it_is(declared_8k: Path, text_file: Path, tmp_path: Path) -> None:
    assert main(measure(declared_8k, text_file, "--preset", PRESET, "--output", str(tmp_path / "one.jsonl"))) == 0
    both = ("--method", "none", "--preset", PRESET, "--output", str(tmp_path / "two.jsonl"))
    assert main(measure(declared_8k, text_file, *both)) == 0
    (alone,), (plain, beside) = read_records(tmp_path / "one.jsonl"), read_records(tmp_path / "two.jsonl")
    model, tokenizer = load_model(declared_8k)
    with patched(model, "yarn", presets()[PRESET].factor):
        (expected,) = perplexity(model, [text_file.read_text()], [128], tokenizer=tokenizer, progress=False)
    assert (plain.method, alone.method, alone.factor) == ("none", "yarn", 2.0)
    assert alone.perplexity == beside.perplexity == pytest.approx(expected.perplexity, rel=1e-6)
    assert plain.perplexity != alone.perplexity


def test_a_window_is_measured_as_asked(text_file: Path, tmp_path: Path) -> None:
    make_model("Mistral", sliding_window=32).save_pretrained(tmp_path / "base")
    make_tiny_tokenizer().save_pretrained(tmp_path / "base")
    flags = ("--method", "yarn", "--factor", "4", "--sliding-window", "off", "--output", str(tmp_path / "r.jsonl"))
    assert main(measure(tmp_path / "base", text_file, *flags)) == 0
    (record,) = read_records(tmp_path / "r.jsonl")
    model, tokenizer = load_model(tmp_path / "base")
    with patched(model, "yarn", 4, sliding_window="off"):
        (expected,) = perplexity(model, [text_file.read_text()], [128], tokenizer=tokenizer, progress=False)
    assert record.perplexity == pytest.approx(expected.perplexity, rel=1e-6)


def test_finetune_takes_a_preset(declared_8k: Path, text_file: Path, tmp_path: Path) -> None:
    argv = ["finetune", str(declared_8k), "--documents", str(text_file), "--output-dir", str(tmp_path / "trained")]
    argv += ["--preset", PRESET, "--token-budget", "128", "--seq-len", "64", "--eval-documents", "0"]
    assert main(argv) == 0
    manifest = json.loads((tmp_path / "trained/context_extension.json").read_text())
    assert (manifest["method"], manifest["context_length"]) == ("yarn", 16384)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--preset", "smollm2-yarn-2"), f"Did you mean '{PRESET}'"),
        (("--preset", PRESET, "--method", "yarn"), "decides method"),
        (("--preset", PRESET, "--factor", "2"), "decides factor"),
        (("--preset", PRESET, "--context-length", "16k"), "decides context_length"),
        (("--preset", PRESET, "--option", "beta_fast=16"), "decides options"),
        (
            ("--method", "yarn", "--sliding-window", "of"),
            "--sliding-window must be 'keep', 'off' or a number of tokens",
        ),
    ],
)
def test_what_contradicts_a_preset_is_refused_before_loading(
    flags: tuple[str, ...],
    said: str,
    declared_8k: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hf_posenc.checkpoint.loading.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    out = str(tmp_path / "out")
    train = ["finetune", str(declared_8k), "--documents", str(text_file), "--output-dir", out]
    for command in (["patch", str(declared_8k), out], measure(declared_8k, text_file), train):
        assert main([*command, *flags]) == 2
        assert said in capsys.readouterr().err
    assert not Path(out).exists()


@pytest.mark.parametrize("flags", [("--sliding-window", "off"), ("--on-scaled", "replace"), ("--method", "none")])
def test_eval_does_not_ignore_what_needs_a_method(
    flags: tuple[str, ...], declared_8k: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(measure(declared_8k, text_file, *flags, "--original-max-position-embeddings", "64")) == 2
    assert "--method," in capsys.readouterr().err
