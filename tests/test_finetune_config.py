"""What a fine-tuning run is told: refused when it cannot be, and every field a flag."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import HfArgumentParser

from hf_posenc.training import FinetuneConfig, trackers


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
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size must be a whole number >= 1, got 0"),
        ({"save_steps": 2.5}, ValueError, "save_steps must be a whole number >= 1, got 2.5"),
        ({"learning_rate": 0}, ValueError, "learning_rate must be greater than 0, got 0. YaRN and PI use 2e-5"),
        ({"learning_rate": "2e-5"}, TypeError, r"learning_rate must be a number, got '2e-5' \(str\)"),
        ({"learning_rate": float("inf")}, ValueError, "learning_rate must be a finite number, got inf"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay must be"),
        ({"factor": float("inf")}, ValueError, "factor must be a finite number, got inf"),
        ({"factor": "2", "context_length": 4}, ValueError, "give factor or context_length, not both"),
        ({"lora": "yes"}, TypeError, "lora must be True or False, got 'yes'"),
        ({"on_scaled": "merge"}, ValueError, "unknown on_scaled 'merge'. Known: refuse, replace"),
        ({"options": "beta_fast=16"}, TypeError, "options must be a dict"),
        ({"eval_lengths": "2k"}, TypeError, "eval_lengths must be a list of lengths in tokens, got '2k'"),
        ({"output_dir": ""}, ValueError, "output_dir is empty"),
        ({"report_to": "tensorbord"}, ValueError, "unknown report_to 'tensorbord'. Known: none, all, .*tensorboard"),
        ({"report_to": "comet_ml"}, ValueError, "not installed: pip install comet-ml"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay must be >= 0"),
        ({"adam_beta2": 1.0}, ValueError, r"adam_beta2 must be in \[0, 1\)"),
        ({"lr_schedule": "zigzag"}, ValueError, "unknown lr_schedule 'zigzag'"),
        ({"eval_lengths": [0]}, ValueError, "eval_lengths must be at least 1"),
    ],
)
def test_bad_settings_are_refused_when_made(
    changes: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)  # as if no tracker were installed
    with pytest.raises(error, match=message):
        FinetuneConfig(**{"output_dir": "nowhere", **changes})


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
    assert (made.lora, made.bf16, made.factor, made.resume) == (True, True, None, False)
    (plain,) = parser.parse_args_into_dataclasses(["--output_dir", "out"], look_for_args_file=False)
    assert plain == FinetuneConfig("out")
    assert (plain.learning_rate, plain.warmup_steps, plain.adam_beta2) == (2e-5, 20, 0.95)
    assert "2e-5 is YaRN's and PI's" in " ".join(parser.format_help().split())
