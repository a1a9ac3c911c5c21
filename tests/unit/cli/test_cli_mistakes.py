"""What the commands say when something is wrong: one line, exit code 2, and before any work is done."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from hf_posenc import save_extended
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.cli.main import COMMANDS, main
from hf_posenc.cli.shared_arguments import parse_options
from hf_posenc.patching.api import patch_model
from refused_commands import refused


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("It is a truth universally acknowledged. " * 20)
    return path


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loading a model fail the test."""
    monkeypatch.setattr("hf_posenc.checkpoint.loading.load_model", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make measuring fail the test."""
    measured = "hf_posenc.evaluation.measuring_perplexity.window_losses"
    monkeypatch.setattr(measured, lambda *_, **__: pytest.fail("it was measured"))


def test_words_that_a_command_does_not_take_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hf-posenc" in refused(capsys, "list", "recipes", "pose")
    assert "'recipes'?" in refused(capsys, "list", "recipe")
    assert "single method" in refused(capsys, "list", "methods", "--factor", 2)
    export = ("export", "longer-model", "--to")
    assert "'other': hf-posenc" in refused(capsys, *export, "vllm", "other")
    assert "'vllm'?" in refused(capsys, *export, "vlm")


@pytest.mark.usefixtures("nothing_loaded")
def test_requests_are_checked_before_loading(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    patch = ("patch", tiny_checkpoint, out)
    measure = ("eval", tiny_checkpoint, "--documents", text_file, "--context-lengths", "64")
    train = ("finetune", tiny_checkpoint, "--documents", text_file, "--output-dir", out)
    both = (*measure, "--method", "none", "linear")
    for command in (patch, both, train):
        assert ">= 1," in refused(capsys, *command, "--factor", 0.25)
        assert "finite number," in refused(capsys, *command, "--factor", "inf")
        assert "not both" in refused(capsys, *command, "--factor", 4, "--context-length", 256)
    for command in (patch, measure, train):
        assert "'yarn'" in refused(capsys, *command, "--method", "yran", "--factor", 4)
        linear = (*command, "--method", "linear", "--option", "beta_fast=3")
        assert "'beta_fast'" in refused(capsys, *linear)
    assert "'four'" in refused(capsys, *patch, "--factor", "four")
    said = refused(capsys, *patch, "--context-length", "far")
    assert "--context-length:" in said
    assert "name=value" in refused(capsys, *patch, "--factor", 4, "--option", "beta_fast")
    assert "--original-max-position-embeddings must be >= 1" in refused(
        capsys, *patch, "--original-max-position-embeddings", 0
    )
    assert "need a --method" in refused(capsys, *measure, "--factor", 4)
    assert "'trunc'" in refused(capsys, *measure, "--protocol", "trunc")
    assert "the shortest" in refused(capsys, *measure, "--protocol", "last_k", "--last-k", 64)
    assert "nothing.txt" in refused(capsys, *measure[:3], tmp_path / "nothing.txt", *measure[4:])
    skipping = (*train, "--factor", 4, "--position-schedule", "pose")
    assert "'pose'" in refused(capsys, *skipping, "--method", "dca")
    for missing in ("nothing.jsonl", "nothing/"):
        streamed = ("finetune", tiny_checkpoint, "--documents", tmp_path / missing, "--streaming", "--output-dir", out)
        assert "nothing" in refused(capsys, *streamed)
    assert "MODEL, OUTPUT" in refused(capsys, "patch")
    assert not out.exists()


@pytest.mark.usefixtures("nothing_loaded")
def test_folders_to_write_to_are_checked_before_loading(
    tiny_checkpoint: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch = ("patch", tiny_checkpoint)
    measure = ("eval", tiny_checkpoint, "--documents", text_file, "--context-lengths", "64")
    train = ("finetune", tiny_checkpoint, "--documents", text_file)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "link").symlink_to(tiny_checkpoint)
    monkeypatch.chdir(tiny_checkpoint)
    for own in (tiny_checkpoint, tmp_path / "link", "."):
        assert "model's own" in refused(capsys, *patch, own)
        assert "model's own" in refused(capsys, *train, "--output-dir", own)
    monkeypatch.chdir(tmp_path / "full")
    for full in (tmp_path / "full", "."):
        assert "hf-posenc;" in refused(capsys, *patch, full)
    assert "is a file" in refused(capsys, *patch, text_file)
    assert "is a file" in refused(capsys, *train, "--output-dir", text_file)
    assert "is a folder" in refused(capsys, *measure, "--output", tmp_path)
    assert "a folder" in refused(capsys, *measure, "--output", text_file / "r.jsonl")


def test_models_devices_and_files_that_are_not_there(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = ("patch", tiny_checkpoint, tmp_path / "out")
    assert "or folder" in refused(capsys, "patch", tmp_path / "nowhere", tmp_path / "out")
    assert "'gpu'" in refused(capsys, *patch, "--device", "gpu")
    assert "'cuda:99'" in refused(capsys, *patch, "--device", "cuda:99")
    assert "unknown dtype 'bf17'" in refused(capsys, *patch, "--dtype", "bf17")
    assert "no file" in refused(capsys, "report", tmp_path / "none.jsonl")
    results = tmp_path / "r.jsonl"
    argv = ["eval", tiny_checkpoint, "--documents", text_file, "--context-lengths", "64", "--output", results]
    assert main([str(word) for word in argv]) == 0
    assert "is a file" in refused(capsys, "report", results, "--output-dir", text_file)
    assert not (tmp_path / "out").exists()


def test_a_package_that_transformers_misses_is_named(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(*_: object, **__: object) -> None:
        raise ImportError("the package for FlashAttention2 doesn't seem to be installed.")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", not_installed)
    message = refused(capsys, "patch", tiny_checkpoint, tmp_path / "out", "--attn-implementation", "flash_attention_2")
    assert "FlashAttention2" in message


def test_errors_of_the_operating_system_are_one_line(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(argv: Sequence[str]) -> None:
        """Write where nobody may."""
        raise PermissionError(13, "Permission denied", "/r.jsonl")

    monkeypatch.setitem(COMMANDS, "list", read_only)
    assert "'/r.jsonl'" in refused(capsys, "list")


@pytest.mark.usefixtures("nothing_measured")
def test_what_the_model_refuses_is_said_before_anything_is_measured(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_model(tiny_checkpoint)
    save_extended(patch_model(model, "yarn", 2), tmp_path / "scaled", tokenizer)
    rest = ("--documents", text_file, "--context-lengths", "64", "--output", tmp_path / "r.jsonl", "--method", "none")
    message = refused(capsys, "eval", tmp_path / "scaled", *rest, "linear", "--factor", 4)
    assert "already scaled: yarn, factor 2" in message
    assert "--on-scaled replace" in message
    with pytest.raises(pytest.fail.Exception, match="was measured"):  # what is not refused is measured
        main(["eval", str(tiny_checkpoint), *map(str, rest)])
    assert "original length" in refused(capsys, "eval", tiny_checkpoint, *rest, "yarn", "--context-length", 32)
    assert not (tmp_path / "r.jsonl").exists()


def test_warnings_of_a_method_come_once(tiny_checkpoint: Path, text_file: Path) -> None:
    argv = ["eval", tiny_checkpoint, "--documents", text_file, "--context-lengths", "64", "--hide-progress"]
    argv += ["--method", "dynamic", "--option", "scope=sequence"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert main([str(word) for word in argv]) == 0
    assert len([one for one in seen if "per forward" in str(one.message)]) == 1


def test_a_bug_is_not_hidden_and_traceback_can_be_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        main(["--traceback", "report", str(tmp_path / "none.jsonl")])

    def broken(argv: Sequence[str]) -> None:
        """Call something wrongly."""
        parse_options(wrong_name=1)  # type: ignore[call-arg]  # the mistake

    def missing(argv: Sequence[str]) -> None:
        """Import what does not exist."""
        import hf_posenc.nothing  # type: ignore[import-not-found]  # noqa: F401  # it does not exist, on purpose

    monkeypatch.setitem(COMMANDS, "list", broken)
    with pytest.raises(TypeError, match="unexpected keyword"):
        main(["list", "methods"])
    monkeypatch.setitem(COMMANDS, "list", missing)
    with pytest.raises(ModuleNotFoundError):
        main(["list", "methods"])
