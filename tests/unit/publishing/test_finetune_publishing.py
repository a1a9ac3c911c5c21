"""``finetune --push-to-hub`` and its companions of TrainingArguments, against the stand-in of the Hub."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from hf_posenc import FinetuneConfig, describe, load_extended
from hf_posenc.cli.main import main
from hf_posenc.errors import InvalidRequestError
from hub_server import UPLOADS, Hub

pytestmark = UPLOADS


def words(checkpoint: Path, folder: Path, *flags: str) -> list[str]:
    text = folder.with_name("text.txt")
    text.write_text("It is a truth universally acknowledged. " * 60)
    argv = ["finetune", str(checkpoint), "--documents", str(text), "--method", "yarn", "--factor", "2"]
    argv += ["--token-budget", "512", "--save-steps", "2", "--output-dir", str(folder)]
    return [*argv, *flags]


def test_the_trained_model_is_pushed_when_it_is_finished(tiny_checkpoint: Path, tmp_path: Path, server: Hub) -> None:
    run = tmp_path / "run"
    flags = ["--push-to-hub", "team/longer", "--hub-token", "hf_me", "--hub-revision", "new", "--eval-documents", "2"]
    assert main(words(tiny_checkpoint, run, *flags, "--hub-private-repo", "true")) == 0
    assert server.repos["team/longer"].private
    assert server.files("team/longer").keys() == {".gitattributes"}  # the main branch is as it was made
    pushed = server.files("team/longer", "new")
    expected = {"config.json", "model.safetensors", "context_extension.json", "README.md", "run.toml", "results.jsonl"}
    assert expected <= pushed.keys()
    assert (run / "checkpoint-4").is_dir()
    assert not [name for name in pushed if name.startswith("checkpoint")]
    assert all(content == (run / name).read_bytes() for name, content in pushed.items() if name != ".gitattributes")
    held = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not [one for one in held if b"hf_me" in one]  # nor the training_args.bin of the checkpoints
    assert str(tmp_path / "text.txt") in pushed["run.toml"].decode()  # as the page says
    card = ModelCard(pushed["README.md"].decode())
    assert '.from_pretrained("team/longer", revision="new"' in card.text
    picture = card.text.partition("](")[2].partition(")")[0]
    assert pushed[picture].startswith(b"\x89PNG")
    assert describe(load_extended("team/longer", revision="new"))["context_length"] == 128


@pytest.mark.parametrize(
    ("push_to_hub", "hub_model_id", "repository"),
    [
        (None, None, None),
        (False, "me/x", None),
        ("false", None, None),
        ("me/longer", None, "me/longer"),
        ("me/longer", "me/longer", "me/longer"),
        (True, "me/x", "me/x"),
        ("true", None, "run"),
    ],
)
def test_a_config_names_its_repository_and_keeps_what_it_was_given(
    push_to_hub: Any, hub_model_id: str | None, repository: str | None, tmp_path: Path
) -> None:
    run = FinetuneConfig(str(tmp_path / "run"), push_to_hub=push_to_hub, hub_model_id=hub_model_id)
    assert (run.hub and run.hub["name"], run.hub_model_id) == (repository, hub_model_id)
    assert dataclasses.replace(run) == run  # so it can be made of its own values again


def test_two_names_of_a_repository_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="push_to_hub says 'me/longer' and hub_model_id 'me/x'"):
        FinetuneConfig(str(tmp_path), push_to_hub="me/longer", hub_model_id="me/x")


def test_a_hub_that_refuses_says_so_before_anything_is_trained(
    tiny_checkpoint: Path, tmp_path: Path, server: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tiny_checkpoint, tmp_path / "run", "--push-to-hub", "--hub-model-id", "other/longer")) == 2
    assert "'other/longer'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_nothing_is_asked_of_the_hub_otherwise(tiny_checkpoint: Path, tmp_path: Path, server: Hub) -> None:
    assert main(words(tiny_checkpoint, tmp_path / "run", "--eval-documents", "0")) == 0
    assert [path for _, path in server.requests if path.startswith("/api/models") or "repos" in path] == []
