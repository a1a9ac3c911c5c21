"""The settings of a fine-tuning run: refused when they cannot be, and every field a flag."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_posenc.training import FinetuneConfig, finetune
from hf_posenc.training import training_run as run_module
from tiny_runs import SEQ, Build, config, losses, make_documents, make_tokenizer
from training_plans import plan_for


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"factor": 2.0, "context_length": 128}, ValueError, "give factor or context_length, not both"),
        ({"factor": 0.25}, ValueError, "factor must be >= 1, got 0.25"),
        ({"method": "yran"}, ValueError, "unknown method 'yran'. Did you mean 'yarn'"),
        ({"preset": "qwen3-yarn-4"}, ValueError, "unknown preset 'qwen3-yarn-4'. Did you mean 'qwen3-yarn-4x'"),
        ({"preset": "qwen3-yarn-4x", "method": "yarn"}, ValueError, "decides method"),
        (
            {"preset": "qwen3-yarn-4x", "factor": 4.0, "options": {"beta_fast": 3}},
            ValueError,
            "decides factor, options",
        ),
        ({"sliding_window": "of"}, ValueError, "sliding_window must be 'keep', 'off' or a number of tokens"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be 'keep', 'off' or a number of tokens"),
        ({"method": "linear", "options": {"beta_fast": 3}}, TypeError, "'linear' takes no option 'beta_fast'"),
        ({"token_budget": 0}, ValueError, "token_budget must be at least 1"),
        ({"token_budget": "lots"}, ValueError, "token_budget: expected a number of tokens"),
        ({"seq_len": 1}, ValueError, "seq_len must be at least 2"),
        (
            {"per_device_train_batch_size": 0},
            ValueError,
            "per_device_train_batch_size must be a whole number >= 1, got 0",
        ),
        ({"save_steps": 2.5}, ValueError, "save_steps must be a whole number >= 1, got 2.5"),
        ({"learning_rate": 0}, ValueError, "learning_rate must be greater than 0, got 0. YaRN and PI use 2e-5"),
        ({"learning_rate": "2e-5"}, TypeError, r"learning_rate must be a number, got '2e-5' \(str\)"),
        ({"learning_rate": float("inf")}, ValueError, "learning_rate must be a finite number, got inf"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay must be"),
        ({"factor": float("inf")}, ValueError, "factor must be a finite number, got inf"),
        ({"factor": "2", "context_length": 4}, ValueError, "give factor or context_length, not both"),
        ({"lora": "yes"}, TypeError, "lora must be True or False, got 'yes'"),
        ({"on_scaled": "merge"}, ValueError, "on_scaled must be 'refuse' or 'replace', got 'merge'"),
        ({"options": "beta_fast=16"}, TypeError, "options must be a dict"),
        ({"eval_lengths": "2k"}, TypeError, "eval_lengths must be a list of lengths in tokens, got '2k'"),
        ({"output_dir": ""}, ValueError, "output_dir is empty"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay must be >= 0"),
        ({"adam_beta2": 1.0}, ValueError, r"adam_beta2 must be below 1"),
        ({"lr_scheduler_type": "zigzag"}, ValueError, "unknown lr_scheduler_type 'zigzag'"),
        ({"eval_lengths": [0]}, ValueError, "eval_lengths must be at least 1"),
        ({"optim": "adamv"}, ValueError, "unknown optim 'adamv'. Did you mean"),
        ({"warmup_steps": 2.5}, ValueError, "warmup_steps must be a whole number of steps, or a share of the run"),
        ({"save_total_limit": 0}, ValueError, "save_total_limit must be a whole number >= 1, got 0"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ValueError, "depends on evaluations during the training"),
        ({"save_strategy": "best"}, ValueError, "save_strategy 'best' depends on evaluations"),
        ({"num_train_epochs": 1}, ValueError, "num_train_epochs cannot be 1 here: token_budget says"),
        ({"eval_strategy": "steps"}, ValueError, "eval_strategy cannot be 'steps' here: the model is measured before"),
        ({"fp16": True}, ValueError, "fp16 cannot be True here: half precision is bfloat16 here: give bf16"),
        ({"deepspeed": "zero.json"}, ValueError, "deepspeed cannot be 'zero.json' here: .*--accelerate-config"),
        ({"label_smoothing_factor": 0.1}, ValueError, "label_smoothing_factor cannot be 0.1 here"),
        ({"resume_from_checkpoint": "elsewhere/checkpoint-3"}, ValueError, "is no checkpoint of the run in nowhere"),
        (
            {"resume_from_checkpoint": "nowhere/checkpoint-3", "stages": ["16k"]},
            ValueError,
            "a run in stages finds its checkpoint itself",
        ),
    ],
)
def test_bad_settings_are_refused_when_made(changes: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        FinetuneConfig(**{"output_dir": "nowhere", **changes})


def test_every_option_of_training_arguments_is_one_of_the_config():
    theirs = {one.name for one in dataclasses.fields(TrainingArguments)}
    assert theirs <= {one.name for one in dataclasses.fields(FinetuneConfig)}
    assert theirs >= {"optim", "push_to_hub", "dataloader_num_workers", "report_to", "torch_compile", "run_name"}
    chosen = {"optim": "adafactor", "torch_compile": True, "hub_model_id": "a/b", "dataloader_num_workers": 3}
    made = FinetuneConfig("x", report_to=["none"], **chosen)
    assert {name: getattr(made, name) for name in chosen} == chosen
    again = dataclasses.replace(made, seed=3)
    assert (again.seed, again.optim, again.save_steps) == (3, "adafactor", 100)


def test_a_config_touches_no_machine(monkeypatch: pytest.MonkeyPatch):
    """A launcher's processes meet, and DeepSpeed changes how models are loaded, when TrainingArguments are made."""
    monkeypatch.setattr(TrainingArguments, "_setup_devices", property(lambda self: pytest.fail("devices are set up")))
    assert FinetuneConfig("x", bf16=True).bf16 is True  # which TrainingArguments refuses where there is no GPU


@pytest.mark.skipif("activation_checkpointing" not in FinetuneConfig.defaults(), reason="an older Transformers")
def test_the_newer_name_of_gradient_checkpointing_is_the_same_option():
    made = FinetuneConfig("x", activation_checkpointing=True)
    assert made == FinetuneConfig("x", gradient_checkpointing=True)
    assert not dataclasses.replace(made, gradient_checkpointing=False).gradient_checkpointing


@pytest.mark.parametrize(("given", "resumes"), [(None, False), (False, False), ("false", False), (True, True)])
def test_resuming_is_on_or_off_or_a_folder(given: Any, resumes: bool):
    made = FinetuneConfig("x", resume_from_checkpoint=given)
    assert (made.resumes, made.named_checkpoint) == (resumes, None)
    assert FinetuneConfig("x", resume_from_checkpoint="x/checkpoint-3").named_checkpoint == Path("x/checkpoint-3")


def test_flags_are_made_from_the_config():
    parser = HfArgumentParser(FinetuneConfig)
    flags = ["--output-dir", "out", "--context-length", "32k", "--token-budget", "300k", "--seq-len", "4k", "--lora"]
    flags += ["--eval-lengths", "2k", "32k", "--bf16", "true", "--on-scaled", "replace"]
    flags += ["--sliding-window", "4k"]
    flags += ["--original-max-position-embeddings", "4k"]
    (made,) = parser.parse_args_into_dataclasses(flags, look_for_args_file=False)
    assert (made.context_length, made.token_budget, made.seq_len) == (32768, 300_000, 4096)
    assert (made.on_scaled, made.original_max_position_embeddings) == ("replace", 4096)
    assert (made.preset, made.sliding_window) == (None, "4096")
    assert "--options" not in parser.format_help()  # --option of the command line is the one way
    assert made.eval_lengths == [2048, 32768]
    assert (made.lora, made.bf16, made.factor, made.resumes) == (True, True, None, False)
    (plain,) = parser.parse_args_into_dataclasses(["--output_dir", "out"], look_for_args_file=False)
    assert plain == FinetuneConfig("out")
    assert (plain.learning_rate, plain.warmup_steps, plain.adam_beta2) == (2e-5, 20, 0.95)
    assert "(YaRN, PI for 7B: 2e-5)" in " ".join(parser.format_help().split())


def test_options_of_trainer_that_are_not_ours_reach_it(tmp_path: Path, tiny_llama: Build):
    chosen: dict[str, Any] = {"optim": "adafactor", "lr_scheduler_type": "cosine_with_min_lr", "adam_epsilon": 1e-5}
    chosen |= {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "neftune_noise_alpha": 1.0, "dataloader_num_workers": 1}
    chosen |= {"warmup_steps": 0.25, "save_total_limit": 1, "disable_tqdm": True, "save_steps": 2}
    seen: list[TrainingArguments] = []
    train = run_module.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "train", lambda *args, **kwargs: (seen.append(args[1]), train(*args, **kwargs)))
        finetune(tiny_llama(), make_tokenizer(), make_documents(), config(tmp_path / "run", eval_documents=0, **chosen))
    (args,) = seen
    assert type(args) is TrainingArguments  # its pickle in the checkpoints is read where hf_posenc is not installed
    assert {name: getattr(args, name) for name in chosen} == {**chosen, "warmup_steps": 3}  # of 12 steps
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-12"]


def test_a_run_goes_on_from_the_checkpoint_that_is_named(tmp_path: Path, tiny_llama: Build):
    tokenizer, documents, chosen = make_tokenizer(), make_documents(), {"eval_documents": 0, "save_total_limit": None}
    run = tmp_path / "run"
    finetune(tiny_llama(), tokenizer, documents, config(run, save_steps=4, **chosen))
    first = losses(run)
    named = config(run, save_steps=4, resume_from_checkpoint=str(run / "checkpoint-4"), **chosen)
    (run / "checkpoint-4" / "trainer_state.json").rename(tmp_path / "trainer_state.json")
    with pytest.raises(ValueError, match=r"checkpoint-4.*trainer_state\.json"):
        finetune(tiny_llama(), tokenizer, documents, named)
    (tmp_path / "trainer_state.json").rename(run / "checkpoint-4" / "trainer_state.json")
    (run / "train_log.jsonl").write_text("")  # so that what is written again shows where it went on
    finetune(tiny_llama(), tokenizer, documents, named)
    assert losses(run) == first[4:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"position_schedule": "foo"}, "position_schedule"), ({"lora": "yes"}, "lora must be True or False")],
)
def test_a_subclass_is_checked_as_its_parent(settings: dict[str, Any], message: str) -> None:
    class Mine(FinetuneConfig):
        pass

    with pytest.raises((ValueError, TypeError), match=message):
        Mine("out", **settings)


def test_checking_a_config_does_not_rewrite_it() -> None:
    """Every field that is not given keeps its default, so that no command or file repeats it as a choice."""
    made, usual = FinetuneConfig("x"), FinetuneConfig.defaults()
    assert {name: getattr(made, name) for name in usual} == usual
    given = FinetuneConfig("x", method="YaRN", context_length="16k", task_mix=["text=1"], push_to_hub=True)
    assert dataclasses.replace(given) == given


@pytest.mark.parametrize(("steps", "warmup"), [(4, 0), (12, 2), (99, 19), (100, 20), (200, 20)])
def test_warmup_is_at_most_a_fifth_of_the_run(steps: int, warmup: int, tmp_path: Path, tiny_llama: Build) -> None:
    run = config(tmp_path, token_budget=steps * 2 * SEQ, warmup_steps=20, report_to="none")
    (stage,) = plan_for(run, tiny_llama()).stages
    args = TrainingArguments(**stage.trainer)
    assert (args.max_steps, args.warmup_steps, args.get_warmup_steps(steps)) == (steps, warmup, warmup)


@pytest.mark.parametrize("name", ["tensorbord", "comet_ml"])  # unknown, and not installed
def test_a_tracker_that_transformers_refuses_is_refused_before_the_training(
    name: str, tmp_path: Path, tiny_llama: Build
) -> None:
    with pytest.raises(ValueError, match=f"report_to '{name}': .*{name.split('_')[0]}"):
        plan_for(config(tmp_path, report_to=name), tiny_llama())
