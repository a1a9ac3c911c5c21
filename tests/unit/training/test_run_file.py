"""A run as a file: every setting survives it, flags win over it, and mistakes are named with file and key."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, LlamaForCausalLM

from hf_posenc.cli.finetune import FinetuneModelArguments, TrainingDocumentArguments, finetune
from hf_posenc.cli.main import main
from hf_posenc.training import FinetuneConfig
from hf_posenc.training.run_file import RUN_FILE, read_run, write_run
from refused_commands import refused
from tiny_llama import make_tiny_llama
from training_plans import plan_for

KNOWN = (FinetuneConfig, TrainingDocumentArguments, FinetuneModelArguments)
# None of them the default; for fields that others exclude, the second config.
OTHER: dict[str, Any] = {
    "output_dir": 'a "folder"\\of\nmine, ö \x7f',
    "recipe": "pose",
    "check_first_loss": True,
    "method": "yarn",
    "factor": 2.5,
    "original_max_position_embeddings": 4096,
    "sliding_window": "8192",
    "on_scaled": "replace",
    "eval_tasks": ["passkey", "niah_multikey_1"],
    "eval_questions": 7,
    "options": {"beta_fast": 16, "ramp": "paper", "truncate": False, "attention_factor": 1.25e-5},
    "token_budget": 123_456,
    "seq_len": 2048,
    "packing": False,
    "position_schedule": "pose",
    "pose_chunks": 3,
    "short_share": 0.25,
    "length_upsampling": 5.0,
    "shifted_sparse_attention": True,
    "group_share": 0.5,
    "assistant_only_loss": True,
    "completion_only_loss": False,
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 7,
    "learning_rate": 3.1e-07,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 5,
    "optim": "adamw_bnb_8bit",
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.99,
    "max_grad_norm": 0.3,
    "lora": True,
    "lora_rank": 64,
    "lora_alpha": 32,
    "trainable": "attention",
    "lora_embeddings": False,
    "gradient_checkpointing": True,
    "bf16": False,
    "seed": 3,
    "save_steps": 17,
    "logging_steps": 2,
    "report_to": "all",
    "run_name": "one = two # three",
    "eval_lengths": [512, 4096],
    "eval_documents": 3,
    "keep": 0.015,
    "logits_chunk": 100,
    # Of TrainingArguments, which files hold where they are not the default.
    "save_total_limit": 5,
    "adam_epsilon": 1e-6,
    "lr_scheduler_kwargs": {"num_cycles": 0.25, "some more": [1, True]},
    "dataloader_num_workers": 2,
    "torch_compile": True,
    "push_to_hub": True,
    "hub_model_id": "somebody/longer",
}
EXCLUDED: dict[str, Any] = {
    "context_length": 32768,
    "preset": "qwen3-yarn-4x",
    "rope_scaling": '{"type": "linear", "factor": 2.0}',
    "stages": ["16k:500k", "32k:1M"],
    "task_mix": ["kv=0.3", "text=0.7"],
}


def test_every_field_survives(tmp_path: Path) -> None:
    ours = {one.name for one in dataclasses.fields(FinetuneConfig)} & FinetuneConfig.__annotations__.keys()
    # A new field is to be added above.
    assert ours - FinetuneConfig.HELP_HIDDEN <= {*OTHER, *EXCLUDED, "resume_from_checkpoint"}
    first = FinetuneConfig(**OTHER)
    assert all(getattr(first, name) != getattr(FinetuneConfig("x"), name) for name in OTHER)
    sets = [first, *(FinetuneConfig("x", **{name: value}) for name, value in EXCLUDED.items()), FinetuneConfig("x")]
    for made in sets:
        write_run(tmp_path / RUN_FILE, made.settings())
        assert FinetuneConfig(**read_run(tmp_path / RUN_FILE, KNOWN)) == made
    write_run(tmp_path / RUN_FILE, FinetuneConfig("x", resume_from_checkpoint=True).settings())
    assert "resume_from_checkpoint" not in read_run(tmp_path / RUN_FILE, KNOWN)  # a repeated run begins
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]


def test_a_mixture_may_be_one_word_in_a_file(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text('task_mix = "kv=0.3, text=0.7"\n')
    assert FinetuneConfig("x", **read_run(tmp_path / RUN_FILE, KNOWN)).task_mix == ["kv=0.3", "text=0.7"]


def parsed(*argv: Any) -> tuple[FinetuneConfig, TrainingDocumentArguments, FinetuneModelArguments]:
    """What the command makes of its words, up to where it would read texts."""
    seen: list[Any] = []

    def stop(*args: Any, **kwargs: Any) -> Any:
        seen.extend(parse(*args, **kwargs)[:3])
        raise KeyboardInterrupt

    parse = HfArgumentParser.parse_args_into_dataclasses
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HfArgumentParser, "parse_args_into_dataclasses", stop)
        with pytest.raises(KeyboardInterrupt):
            finetune(["model", *map(str, argv)])
    return seen[0], seen[1], seen[2]


def test_flags_win_over_the_file_the_file_over_the_recipe_and_it_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'output-dir = "out"\nlearning_rate = 1e-4\ntoken-budget = "300k"\ncontext_length = "32k"\n'
        "lora_embeddings = true\n"
        'documents = "books"\ndtype = "bfloat16"\n[options]\nrope-theta = 9e5\n'
    )
    run, source, loading = parsed("--config", file, "--recipe", "qlora", "--token-budget", "1M", "--method", "abf")
    assert (run.output_dir, run.learning_rate, run.token_budget) == ("out", 1e-4, 1_000_000)
    assert (run.recipe, run.lora, run.lora_rank, run.context_length) == ("qlora", True, 64, 32768)
    assert (run.lora_embeddings, run.seq_len, run.warmup_steps) == (True, None, 20)
    assert (run.method, run.options) == ("abf", {"rope_theta": 9e5})
    assert (source.documents, loading.dtype, loading.load_in_4bit) == ("books", "bfloat16", True)
    file.write_text('recipe = "pose"\noutput_dir = "out"\n')
    assert parsed("--config", file)[0] == FinetuneConfig.from_recipe("pose", output_dir="out")
    # A flag that says what is the default anyway wins too.
    run, _, loading = parsed("--config", file, "--learning-rate", "2e-5", "--recipe", "qlora", "--load-in-4bit", "no")
    assert (run.recipe, run.learning_rate, run.lora_rank, loading.load_in_4bit) == ("qlora", 2e-5, 64, False)
    run, _, _ = parsed("--recipe", "longlora", "--output-dir", "x", "--lora", "false", "--no-lora-embeddings")
    assert (run.lora, run.lora_embeddings, run.shifted_sparse_attention) == (False, False, True)
    run, _, _ = parsed("--recipe", "pose", "--output-dir", "x", "--method", "ntk")
    assert (run.method, run.options) == ("ntk", {})
    assert parsed("--output-dir", "x")[0] == FinetuneConfig("x")


def test_a_flag_wins_over_what_the_file_says_in_another_way(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('output_dir = "out"\nmethod = "yarn"\nfactor = 4.0\n[options]\nramp = "harmonic"\n')
    run, _, _ = parsed("--config", file, "--context-length", "2k")
    assert (run.factor, run.context_length, run.options) == (None, 2048, {"ramp": "harmonic"})
    run, _, _ = parsed("--config", file, "--stages", "2k", "4k")
    assert (run.factor, run.stages) == (None, ["2k", "4k"])
    run, _, _ = parsed("--config", file, "--method", "linear")
    assert (run.method, run.factor, run.options) == ("linear", 4.0, {})
    run, _, _ = parsed("--config", file, "--preset", "qwen3-yarn-4x")
    assert (run.preset, run.method, run.factor, run.options) == ("qwen3-yarn-4x", None, None, {})
    dictionary = '{"rope_type": "linear", "factor": 2.0}'
    run, _, _ = parsed("--config", file, "--rope-scaling", dictionary)
    assert (run.rope_scaling, run.method, run.factor, run.options) == (dictionary, None, None, {})
    file.write_text('output_dir = "out"\nrope_scaling = "yarn"\ncontext_length = 2048\n')
    for dictionary in ('{"rope_type": "linear"}', '{"rope_type": "yarn", "attention_factor": 1.1}'):
        run, _, _ = parsed("--config", file, "--rope-scaling", dictionary)
        assert (run.rope_scaling, run.context_length) == (dictionary, 2048)
    run, _, _ = parsed("--config", file, "--method", "ntk")
    assert (run.rope_scaling, run.method, run.context_length) == (None, "ntk", 2048)
    write_run(tmp_path / RUN_FILE, {"output_dir": "x", "options": {"attention_factor": None, "ramp": "paper"}})
    assert read_run(tmp_path / RUN_FILE, KNOWN)["options"] == {"ramp": "paper"}


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        finetune(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "results and logs (required)" in shown
    assert "--learning-rate X peak learning rate (YaRN, PI for 7B: 2e-5) (default: 2e-05)" in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat = 1", "unknown key 'learning_rat'. Did you mean 'learning_rate'"),
        (
            "beta_fast = 1",
            "unknown key 'beta_fast'. Options of the method are under options. Known: accelerator_config",
        ),
        ('learning_rate = "2e-5"', "learning_rate must be a number, got '2e-5'"),
        ("lora = 1", "lora must be true or false, got 1"),
        ("lora_rank = true", "lora_rank must be a whole number, got True"),
        ("lora_rank = 2.0", "lora_rank must be a whole number, got 2.0"),
        ("method = 3", "method must be a word in quotes, got 3"),
        ('on_scaled = "merge"', "on_scaled must be one of refuse, replace, got 'merge'"),
        ('token_budget = "lots"', "token_budget expected a number of tokens"),
        ("token_budget = 1.5", 'token_budget must be a number of tokens, such as 32768 or "32k", got 1.5'),
        ('eval_lengths = "2k"', "eval_lengths must be a list, got '2k'"),
        ("eval_lengths = [1979-05-27]", "eval_lengths must be a number of tokens"),
        ("options = 3", "options must be a table"),
        ("seq-len = 4\nseq_len = 4", "seq_len is given twice"),
        ("seq_len = ", "is no TOML file: Invalid value"),
        ("config = 'x'", "unknown key 'config'"),
        ("[lora]\nrank = 8", "lora must be true or false, got {'rank': 8}"),
        ('recipe = "yarn-40"', "unknown recipe 'yarn-40'. Did you mean 'yarn-400'"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert main(["finetune", "nowhere", "--config", str(file), "--output-dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    if "recipe" not in text:
        assert f"{file}" in error


def test_yaml_says_the_same_as_toml(tmp_path: Path) -> None:
    """With 1e-4 as a number, which PyYAML alone reads as text."""
    (tmp_path / "run.toml").write_text(
        'method = "yarn"\nlearning-rate = 1e-4\nadam_epsilon = 2.5E-7\ntoken_budget = "300k"\nlora = true\n'
        "eval_lengths = [512, 4096]\nlr_scheduler_kwargs = { num_cycles = 0.25 }\n[options]\nbeta-fast = 16\n"
    )
    (tmp_path / "run.yaml").write_text(
        "# a comment\nmethod: yarn\nlearning-rate: 1e-4\nadam_epsilon: 2.5E-7\ntoken_budget: 300k\nlora: true\n"
        "eval_lengths:\n- 512\n- 4096\nlr_scheduler_kwargs: {num_cycles: 0.25}\nfactor:\noptions:\n  beta-fast: 16\n"
    )
    found = read_run(tmp_path / "run.yaml", KNOWN)
    assert found == read_run(tmp_path / "run.toml", KNOWN)
    assert (found["learning_rate"], found["token_budget"], found["options"]) == (1e-4, 300_000, {"beta_fast": 16})
    settings = {name: value for name, value in FinetuneConfig(**OTHER).settings().items() if name != "model_values"}
    (tmp_path / "all.yml").write_text(json.dumps(settings))
    assert FinetuneConfig(**read_run(tmp_path / "all.yml", KNOWN)) == FinetuneConfig(**OTHER)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq_len: 4\nseq_len: 5", "a key is given twice"),
        ("seq_len: 4\nseq-len: 5", "seq_len is given twice"),
        ("seq_len: [4", "is no YAML file of settings"),
        ("", "it holds NoneType, not keys with values"),
        ("- yarn", "it holds list, not keys with values"),
        ("lora: 1", "lora must be true or false, got 1"),
        ("learning_rate: fast", "learning_rate must be a number, got 'fast'"),
        ("seq_len: !!python/object/apply:os.getcwd []", "is no YAML file of settings"),
    ],
)
def test_mistakes_in_yaml_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises((ValueError, TypeError), match=message):
        read_run(tmp_path / "run.yaml", KNOWN)


def test_a_run_leaves_a_file_that_repeats_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 60)
    flags = ["--documents", str(text), "--method", "yarn", "--factor", "2", "--option", "beta_fast=8"]
    flags += ["--token-budget", "512", "--eval-documents", "0", "--learning-rate", "1e-3", "--warmup-steps", "0"]
    assert main(["finetune", str(tiny_checkpoint), *flags, "--output-dir", str(tmp_path / "one")]) == 0
    again = ["--config", str(tmp_path / "one/run.toml"), "--output-dir", str(tmp_path / "two")]
    assert main(["finetune", str(tiny_checkpoint), *again]) == 0
    one, two = (read_run(tmp_path / name / RUN_FILE, KNOWN) for name in ("one", "two"))
    assert {**one, "output_dir": ""} == {**two, "output_dir": ""}
    assert (one["documents"], one["options"], one["dtype"]) == (str(text), {"beta_fast": 8}, "auto")
    weights = [LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two")]
    assert all(value.equal(weights[1][name]) for name, value in weights[0].items())
    kept = (tmp_path / "one/run.toml").read_bytes()
    assert main(["finetune", str(tiny_checkpoint), *flags, "--output-dir", str(tmp_path / "one"), "--seed", "4"]) == 2
    assert (tmp_path / "one/run.toml").read_bytes() == kept  # a run that is refused leaves it alone


def test_no_token_is_written_down(tmp_path: Path) -> None:
    secret = FinetuneConfig("x", hub_token="hf_secret", push_to_hub=True)
    write_run(tmp_path / RUN_FILE, secret.settings())
    assert "hf_secret" not in (tmp_path / RUN_FILE).read_text() + str(
        plan_for(secret, make_tiny_llama()).settings
    ) + repr(secret)


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    refused(capsys, "finetune", "m", "--config", tmp_path / "none.toml", "--output-dir", "o")
