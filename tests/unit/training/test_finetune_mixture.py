"""Fine-tuning on a mixture: the record of what was trained, resumed runs, and mistakes said before weights load."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.cli.main import main
from hf_posenc.data.packing import PackedDocuments
from hf_posenc.training import FinetuneConfig, finetune
from hf_posenc.training.run_folder import read_log
from hf_posenc.training.trainer import LongTrainer
from tiny_llama import make_tiny_llama
from tiny_runs import assert_same_run, killed_at

MIX = ["kv=0.3", "needles=0.2", "knots=0.2", "text=0.2", "short_text=0.1"]


def run(base: Path, folder: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {"task_mix": MIX, "token_budget": 10 * 512, "save_steps": 4, "learning_rate": 1e-3}
    given |= {"context_length": 512, "eval_lengths": [128], "eval_documents": 1, "warmup_steps": 1}
    config = FinetuneConfig(str(folder), **{**given, **changes})
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(tiny_model_path())
    return finetune(model, tokenizer, [load_novel("emma")[:60_000]], config)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_tiny_llama(vocab_size=2048, max_position_embeddings=256).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_a_resumed_run_is_the_same_and_says_what_it_read(base: Path, tmp_path: Path) -> None:
    run(base, tmp_path / "straight")
    with killed_at(6):
        run(base, tmp_path / "killed")
    with pytest.raises(ValueError, match=r"task_mix.*\['kv=0\.3',.*,.*\['kv=0\.5', 'text=0\.5'\]"):
        run(base, tmp_path / "killed", resume_from_checkpoint=True, task_mix="kv=0.5,text=0.5")
    run(base, tmp_path / "killed", resume_from_checkpoint=True)
    assert_same_run(tmp_path / "straight", tmp_path / "killed", 10)
    logs = [
        [(line["kind"], line["tokens_in_loss"]) for line in read_log(tmp_path / name / "train_log.jsonl")]
        for name in ("straight", "killed")
    ]
    assert logs[0] == logs[1]
    counted = dict.fromkeys((word.split("=")[0] for word in MIX), 0)
    for kind, tokens in logs[0]:
        counted[kind] += tokens
        assert (tokens < 100) if kind in ("kv", "needles") else (tokens > 250)
    card = (tmp_path / "killed/README.md").read_text(encoding="utf-8")
    for word in MIX:
        kind, _, share = word.partition("=")
        steps = round(10 * float(share))
        assert (
            f"- task_mix, {kind}: {share} of the tokens: {steps} steps, {512 * steps:,} tokens, {counted[kind]:,} of "
            "them counted in the loss" in card
        )
    assert f"task_mix = {json.dumps(MIX)}" in (tmp_path / "killed/run.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("positions", ["pose", "cream"])
def test_a_mixture_with_skipped_positions_trains(
    base: Path, tmp_path: Path, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, counted = LongTrainer.training_step, []

    def counting(self: LongTrainer, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        counted.append(int((inputs["labels"] >= 0).sum()))
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(LongTrainer, "training_step", counting)
    result = run(base, tmp_path / "run", position_schedule=positions, token_budget=20 * 256, eval_documents=0)
    lines = read_log(tmp_path / "run/train_log.jsonl")
    assert len(lines) == result.steps == 20
    assert [line["tokens_in_loss"] for line in lines] == counted
    for kind in {line["kind"] for line in lines}:
        own = [line["loss"] for line in lines if line["kind"] == kind]
        assert min(own[1:]) < own[0], kind


def test_a_run_without_a_mixture_logs_as_before(base: Path, tmp_path: Path) -> None:
    run(base, tmp_path / "run", task_mix=None, token_budget=1024)
    assert not {"kind", "tokens_in_loss"} & read_log(tmp_path / "run/train_log.jsonl")[0].keys()
    assert "task_mix" not in (tmp_path / "run/README.md").read_text(encoding="utf-8")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The tiny model, which reads 256 tokens, with its weights cut off."""
    shutil.copytree(tiny_model_path(), tmp_path / "broken")
    weights = tmp_path / "broken/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return tmp_path / "broken"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--task-mix kv=0.5 txt=0.5", "unknown kind of training data 'txt'. Did you mean 'text'? Known: "),
        ("--task-mix kv=0.5,text=0.2", "the shares of --task-mix must sum to 1, these sum to 0.7."),
        ("--task-mix kv=1.5 text=-0.5", "the share of 'text' must be a number above 0, got '-0.5'"),
        ("--task-mix kv=0.5 text=0.5 --short-share 0.1", "--short-share excludes --task-mix"),
        ("--task-mix kv=1 --seq-len 64", "--task-mix: the shortest example of 'kv' has about"),
        ("--task-mix knots=1 --seq-len 64", "--task-mix: 'knots' ties 4 documents of at least"),
        (
            "--task-mix kv=0.9 knots=0.1 --token-budget 1k",
            "no step of 1 is left for knots=0.1: give a --token-budget of 3072 tokens or more",
        ),
        (
            "--task-mix kv=0.9 text=0.1 --stages 512:10k 1024:2100",
            "no step of 2 is left for text=0.1: give a --token-budget of 6144 tokens or more",
        ),
        (
            "--task-mix kv=0.9 text=0.1 --token-budget 1k --streaming",
            "no step of 1 is left for text=0.1: give a --token-",
        ),
        ("--task-mix kv=1 --seq-len 64 --streaming", "--task-mix: the shortest example of 'kv' has about"),
        (
            "--recipe reach --token-budget 512",
            "no step of 2 is left for long_retention=0.15: give a --token-budget of 1024",
        ),
    ],
)
def test_mistakes_are_said_before_weights_are_opened(
    broken: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    words = ["finetune", str(broken), "--output-dir", str(broken.with_name("run")), "--documents", "novel:emma"]
    words += [] if "--stages" in flags else ["--factor", "2"]
    assert main([*words, "--device", "cpu", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not broken.with_name("run").exists()


@pytest.mark.parametrize(
    "flags",
    ["--task-mix kv=0.5 text=0.5", "--task-mix kv=0.5,text=0.5", "--recipe reach", "--recipe reach --streaming"],
)
def test_right_ones_come_to_the_weights(broken: Path, capsys: pytest.CaptureFixture[str], flags: str) -> None:
    words = ["finetune", str(broken), "--output-dir", str(broken.with_name("run")), "--documents", "novel:emma"]
    assert main([*words, "--device", "cpu", "--factor", "2", *flags.split()]) == 2
    assert re.search("error: the weights of .* a file is damaged or was cut off", capsys.readouterr().err)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tokens of all documents of each run, as they are packed."""
    seen: list[torch.Tensor] = []
    make = PackedDocuments.__init__

    def remember(self: PackedDocuments, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        seen.append(self.stream)

    monkeypatch.setattr(PackedDocuments, "__init__", remember)
    return seen


@pytest.mark.parametrize("mix", [None, "knots=1"])
def test_texts_begin_with_what_the_tokenizer_puts_before_them(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: list[torch.Tensor], mix: str | None
) -> None:
    for module in ("training.data", "mixtures.knots"):
        monkeypatch.setattr(f"hf_posenc.{module}.added_bos", lambda tokenizer: 7)
    run(base, tmp_path / "run", task_mix=mix, token_budget=512)
    assert int(streams[0][0]) == 7


def test_the_documents_of_a_mixture_are_those_that_are_not_held_out(
    base: Path, tmp_path: Path, streams: list[torch.Tensor]
) -> None:
    """Excerpts for knots and needles come from the packed texts, which are without the held-out end."""
    run(base, tmp_path / "run", task_mix="knots=1", token_budget=512)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    (stream,) = streams
    text = load_novel("emma")[:60_000]
    assert tokenizer.decode(stream).removesuffix("<|endoftext|>") in text
    assert len(stream) < 0.96 * len(tokenizer(text, verbose=False).input_ids)
