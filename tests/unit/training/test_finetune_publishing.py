"""``push_to_hub`` and its companions of TrainingArguments, up to the requests to the Hub: there is none here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from hf_posenc.cli.main import main
from hf_posenc.training import run_folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The requests, in order; an upload with the files it would send, as they were then."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(name: str, **given: Any) -> Any:
        calls.append(("create", {"name": name, **given}))
        return SimpleNamespace(repo_id=f"somebody/{name.rpartition('/')[2]}")

    def upload_folder(*, folder_path: str, ignore_patterns: list[str], **given: Any) -> None:
        files = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        calls.append(("upload", {"files": set(filter_repo_objects(files, ignore_patterns=ignore_patterns)), **given}))

    monkeypatch.setattr(run_folder, "create_repo", create_repo)
    monkeypatch.setattr(run_folder, "upload_folder", upload_folder)
    return calls


def words(checkpoint: Path, folder: Path, *flags: str) -> list[str]:
    text = folder.with_name("text.txt")
    text.write_text("It is a truth universally acknowledged. " * 60)
    argv = ["finetune", str(checkpoint), "--documents", str(text), "--method", "yarn", "--factor", "2"]
    argv += ["--token-budget", "512", "--eval-documents", "0", "--save-steps", "2", "--output-dir", str(folder)]
    return [*argv, *flags]


def test_the_trained_model_is_pushed_when_it_is_finished(
    tiny_checkpoint: Path, tmp_path: Path, hub: list[tuple[str, dict[str, Any]]]
) -> None:
    flags = ["--push-to-hub", "--hub-model-id", "somebody/longer", "--hub-token", "hf_secret", "--hub-revision", "new"]
    assert main(words(tiny_checkpoint, tmp_path / "run", *flags, "--hub-private-repo", "true")) == 0
    (create, made), (upload, sent) = hub
    assert (create, upload) == ("create", "upload")
    assert made == {"name": "somebody/longer", "token": "hf_secret", "private": True, "exist_ok": True}
    assert (sent["repo_id"], sent["revision"], sent["token"]) == ("somebody/longer", "new", "hf_secret")
    assert {"config.json", "model.safetensors", "context_extension.json", "README.md", "run.toml"} <= sent["files"]
    assert (tmp_path / "run" / "checkpoint-4").is_dir()
    assert not [name for name in sent["files"] if name.startswith("checkpoint")]
    held = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [one for one in held if b"hf_secret" in one]  # nor the training_args.bin of the checkpoints


def test_a_hub_that_refuses_says_so_before_anything_is_trained(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, **given: Any) -> Any:
        raise ValueError(f"403 for {name}")

    monkeypatch.setattr(run_folder, "create_repo", refuse)
    assert main(words(tiny_checkpoint, tmp_path / "run", "--push-to-hub")) == 2
    assert not (tmp_path / "run" / "train_log.jsonl").exists()


def test_nothing_is_asked_of_the_hub_otherwise(
    tiny_checkpoint: Path, tmp_path: Path, hub: list[tuple[str, dict[str, Any]]]
) -> None:
    assert main(words(tiny_checkpoint, tmp_path / "run")) == 0
    assert hub == []
