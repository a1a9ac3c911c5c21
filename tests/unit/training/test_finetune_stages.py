"""Progressive training: every stage extends the model anew, counts on, and is trained once, killed or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from folders import ROOT
from hf_posenc import extend_config, load_extended, patch_model
from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.evaluation import read_records
from hf_posenc.patching.api import describe
from hf_posenc.training import finetune
from hf_posenc.training.run_folder import read_log
from hf_posenc.training.train_log import LossLog
from tiny_runs import Build, Killed, config, logits_of

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
STAGES = {"stages": ["96:1152", "160:1920"], "factor": None, "save_steps": 3, "eval_documents": 2}
FOLDERS = ("stage-1-96", "stage-2-160")


def base(folder: Path, tiny_llama: Build) -> Any:
    if not folder.is_dir():
        tiny_llama(tie_word_embeddings=True).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_stages_are_runs_of_their_own_that_count_on(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]
):
    run = tmp_path / "run"
    result = finetune(
        base(tmp_path / "base", tiny_llama), tokenizer, documents, config(run, **STAGES), tokens_trained=50
    )
    logs = [read_log(run / name / "train_log.jsonl") for name in FOLDERS]
    assert [line["tokens_trained"] for line in logs[0]] == [50 + 192 * step for step in range(1, 7)]
    assert [line["tokens_trained"] for line in logs[1]] == [1202 + 320 * step for step in range(1, 7)]
    assert (result.steps, result.tokens_trained) == (12, 3122)
    assert result.train_loss == pytest.approx(sum(line["loss"] for log in logs for line in log) / 12)
    assert logs[1][-1]["loss"] < logs[0][0]["loss"] - 0.3

    # Factors count from the original length: each model is what Transformers builds from the config so extended.
    for folder, length in ((run / FOLDERS[0], 96), (run, 160)):
        manifest = read_manifest(folder) or {}
        assert (manifest["original_max_position_embeddings"], manifest["context_length"]) == (64, length)
        assert manifest["factor"] == length / 64
        native = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").config
        built = type(result.model)(extend_config(plain, "yarn", context_length=length)).model.rotary_emb.inv_freq
        assert torch.equal(native, built)
    torch.testing.assert_close(logits_of(load_extended(run)), logits_of(result.model), rtol=0, atol=0)
    assert not (run / FOLDERS[1] / "model.safetensors").exists()  # the last stage's model is the run's

    records = read_records(run / "results.jsonl")
    assert [(r.context_length, r.tokens_trained) for r in records] == [
        (length, trained) for trained in (50, 1202, 3122) for length in (32, 64, 96, 160)
    ]
    assert [r.perplexity for r in records] == [r.perplexity for r in result.records]
    assert records[-1].perplexity < records[3].perplexity
    card = (run / "README.md").read_text()
    assert f"{records[3].perplexity:.2f}" in card
    assert "fine-tuned on 3,122 tokens (50 of them in earlier runs) in 2 stages, the last in blocks of 160" in card
    assert "| 1 | 96 | 6 | 1,152 |\n| 2 | 160 | 6 | 1,920 |" in card
    first = (run / FOLDERS[0] / "README.md").read_text()
    assert "fine-tuned on 1,202 tokens (50 of them in earlier runs) in blocks of 96" in first
    assert "stages" not in first
    seeds = [json.loads((run / name / "finetune.json").read_text())["seed"] for name in FOLDERS]
    assert seeds == [0, 1]  # the documents of the second come in another order


def test_a_stream_is_read_once_and_the_same_is_held_out_in_every_stage(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]
):
    stages = {**STAGES, "stages": ["96:1152", "160:640"]}  # the second alone would read fewer documents
    run = config(tmp_path / "run", **stages)
    read = iter(documents)
    result = finetune(base(tmp_path / "base", tiny_llama), tokenizer, read, run)
    assert len({record.text_hash for record in result.records if record.context_length == 160}) == 1
    taken = documents[: len(documents) - len(list(read))]
    listed = finetune(base(tmp_path / "base", tiny_llama), tokenizer, taken, config(tmp_path / "listed", **stages))
    assert len(taken) < len(documents)
    assert [record.nll_sum for record in result.records] == [record.nll_sum for record in listed.records]


def kill_in(monkeypatch: pytest.MonkeyPatch, stage: str, step: int) -> None:
    """Let the process die in one stage, just after the loss of ``step`` is written down."""
    write = LossLog.on_log

    def dying(self: LossLog, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        write(self, args, state, control, logs, **kwargs)
        if self.path.parent.name == stage and state.global_step == step:
            raise Killed

    monkeypatch.setattr(LossLog, "on_log", dying)


@pytest.mark.parametrize(
    ("killed_in", "step", "lora"),
    [
        pytest.param(0, 5, False, marks=pytest.mark.slow),
        (1, 2, False),  # there is no checkpoint of the second stage yet
        pytest.param(1, 4, False, marks=pytest.mark.slow),
        pytest.param(1, 4, True, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_in_its_stage_and_ends_the_same(
    killed_in: int,
    step: int,
    lora: bool,
    tmp_path: Path,
    tiny_llama: Build,
    tokenizer: Any,
    documents: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
):
    given = {**STAGES, "lora": lora}

    def run(name: str, **changes: Any) -> Any:
        return finetune(
            base(tmp_path / "base", tiny_llama), tokenizer, documents, config(tmp_path / name, **given, **changes)
        )

    straight = run("straight")
    with monkeypatch.context() as patch:
        kill_in(patch, FOLDERS[killed_in], step)
        with pytest.raises(Killed):
            run("killed")
    first = (tmp_path / "killed" / FOLDERS[0] / "train_log.jsonl").read_bytes()
    with pytest.raises(ValueError, match="resume_from_checkpoint=True"):
        run("killed")
    resumed = run("killed", resume_from_checkpoint=True)
    again = (tmp_path / "killed" / FOLDERS[0] / "train_log.jsonl").read_bytes()
    assert (again == first) == (killed_in == 1)  # a finished stage is not trained again
    for one, other in zip(straight.records, resumed.records, strict=True):
        assert one.perplexity == other.perplexity
    assert len(read_records(tmp_path / "killed/results.jsonl")) == 16  # unextended, before, and after each stage
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    done = run("killed", resume_from_checkpoint=True)  # all of it is finished
    assert (done.steps, done.tokens_trained) == (12, straight.tokens_trained)
    assert torch.equal(logits_of(done.model), logits_of(straight.model))
    with pytest.raises(ValueError, match=r"learning_rate.*0\.003,.*0\.001"):
        run("killed", resume_from_checkpoint=True, learning_rate=1e-3)


@pytest.mark.parametrize(
    ("stages", "error", "message"),
    [
        ([], TypeError, "must be a list of LENGTH:BUDGET"),
        ("16k:1M", TypeError, "must be a list of LENGTH:BUDGET"),
        (["16k", "8k"], ValueError, "the lengths must rise, got 16384, 8192 tokens"),
        (["16k", "16k"], ValueError, "the lengths must rise"),
        (["16k:1M", "32k"], ValueError, "give every stage a budget or none"),
        (["16k:lots"], ValueError, r"'16k:lots' is not LENGTH:BUDGET, such as 16k:500k \(expected a number of tokens"),
        (["sixteen"], ValueError, "'sixteen' is not LENGTH:BUDGET"),
        (["16k:"], ValueError, "'16k:' is not LENGTH:BUDGET"),
    ],
)
def test_stages_that_cannot_be_read(stages: Any, error: type[Exception], message: str, tmp_path: Path):
    with pytest.raises(error, match=message):
        config(tmp_path, factor=None, stages=stages)


def test_stages_as_they_are_written(tmp_path: Path):
    read = config(tmp_path, factor=None, stages=["16k:500k", "32000:1M"], token_budget=7)
    assert [(stage.name, stage.length, stage.token_budget) for stage in read.target_stages()] == [
        ("stage-1-16k", 16384, 500_000),
        ("stage-2-32000", 32000, 1_000_000),
    ]
    shared = config(tmp_path, factor=None, stages=["16k", "32k", "64k"], token_budget=3000)
    assert [stage.token_budget for stage in shared.target_stages()] == [1000] * 3
    with pytest.raises(ValueError, match="target lengths:"):
        config(tmp_path, stages=["16k"])


CONTEXT_PARALLEL = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2", "WORLD_SIZE": "2"}
CONTEXT_PARALLEL |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("changes", "environment", "window", "message"),
    [
        (
            {"stages": ["96:1152", "8192:16384"]},
            {},
            None,
            r"8192 tokens cannot be trained: .* hold 4,600 tokens in all",
        ),
        pytest.param(
            {"position_schedule": "pose"},
            {},
            128,
            "160 tokens cannot be trained: .*a sliding window of 128 tokens",
            marks=pytest.mark.filterwarnings("ignore:config.sliding_window is 128"),
        ),
        ({"stages": ["96", "162"]}, CONTEXT_PARALLEL, None, "162 tokens cannot be trained: .*seq_len 162 is not divis"),
    ],
)
def test_a_mistake_in_a_later_stage_is_told_before_the_first_is_trained(
    changes: dict[str, Any],
    environment: dict[str, str],
    window: int | None,
    message: str,
    tmp_path: Path,
    tiny_llama: Build,
    tokenizer: Any,
    documents: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model: Any = tiny_llama()
    if window is not None:
        model = MistralForCausalLM(MistralConfig(**{**model.config.to_dict(), "sliding_window": window}))
    with pytest.raises(ValueError, match=message):
        finetune(model, tokenizer, documents, config(tmp_path / "run", **{**STAGES, **changes}))
    assert not (tmp_path / "run").exists()
    assert describe(model)["method"] == "none"


def test_stages_that_do_not_suit_the_model(
    tmp_path: Path, tiny_llama: Build, tokenizer: Any, documents: list[torch.Tensor]
):
    def refused(message: str, model: Any = None, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            finetune(model or tiny_llama(), tokenizer, documents, config(tmp_path / "run", **{**STAGES, **changes}))

    refused("was trained on 64 tokens, and 64 are not beyond them", stages=["64", "128"])
    refused(
        "the stage of 128 tokens cannot be trained: token_budget 255 is less than one step, 256 tokens",
        stages=["96:500", "128:255"],
    )
    refused("extended already .yarn, factor 2.*on_scaled='replace'", patch_model(tiny_llama(), "yarn", 2))
    assert not (tmp_path / "run").exists()
    small = {**STAGES, "token_budget": 400, "per_device_train_batch_size": 1, "eval_documents": 0}
    replaced = config(tmp_path / "run", **{**small, "stages": ["96", "160"], "on_scaled": "replace"})
    result = finetune(patch_model(tiny_llama(), "linear", 2), tokenizer, documents, replaced)
    assert (result.steps, (read_manifest(tmp_path / "run") or {})["method"]) == (2 + 1, "yarn")
    with pytest.raises(ValueError, match=r"\(stage-1-96, ...\)"):
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path / "run", eval_documents=0))
    finetune(tiny_llama(), tokenizer, documents, config(tmp_path / "single", eval_documents=0, token_budget=256))
    with pytest.raises(ValueError, match="without stages"):
        finetune(tiny_llama(), tokenizer, documents, config(tmp_path / "single", **small))


@pytest.mark.slow
def test_two_processes_go_through_the_stages_as_one_does(tmp_path: Path, tiny_checkpoint: Path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The {n}th letter came to her sister in May. " for n in range(300)))

    def run(launcher: list[str], name: str, *flags: str) -> list[list[dict[str, Any]]]:
        command = [sys.executable, *launcher, ROOT / "scripts/finetune.py", tiny_checkpoint, "--documents", text]
        command += ["--output-dir", tmp_path / name, "--device", "cpu", "--stages", "96:768", "128:1024"]
        command += ["--learning-rate", "1e-3", "--eval-lengths", "64", "--eval-documents", "2", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return [read_log(tmp_path / name / stage / "train_log.jsonl") for stage in ("stage-1-96", "stage-2-128")]

    two = [*TORCHRUN, "--nproc_per_node", "2"]
    alone, both = run([], "one", "--gradient-accumulation-steps", "2"), run(two, "two")
    for expected, actual in zip(alone, both, strict=True):
        assert len(actual) == 4
        assert [line["loss"] for line in actual] == pytest.approx([line["loss"] for line in expected], rel=1e-3)
        assert [line["tokens_trained"] for line in actual] == [line["tokens_trained"] for line in expected]
    assert run(two, "two", "--resume-from-checkpoint") == both  # nothing is trained again
    # The unextended model, then before the first stage and after each.
    assert len(read_records(tmp_path / "two/results.jsonl")) == len(read_records(tmp_path / "one/results.jsonl")) == 4
