"""The accelerate configurations that are shipped, and the flag that starts a command through one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from distributed_runs import CONTEXT_PARALLEL, FSDP2
from folders import ROOT
from hf_posenc.assets import tiny_model_path
from hf_posenc.cli.main import main
from hf_posenc.training import FinetuneConfig
from hf_posenc.training.conflicts import Combination, refuse_conflicts
from hf_posenc.training.launch import Launch
from hf_posenc.utils.launching import CONFIGS, LaunchArguments, config_file, launch_words

# Names as in TRL, of its command line and its examples.
EXPECTED = {
    "single_gpu": Launch(1),
    "multi_gpu": Launch(8),
    "fsdp2": Launch(8, fsdp=2),
    "zero1": Launch(8, zero=1),
    "zero2": Launch(8, zero=2),
    "zero3": Launch(8, zero=3),
    "context_parallel_2gpu": Launch(2, fsdp=2, cp_size=2),
    "context_parallel_4gpu": Launch(4, fsdp=2, cp_size=4),  # this one and the next are ours
    "context_parallel_8gpu": Launch(8, fsdp=2, cp_size=8),
    "alst_ulysses_4gpu": Launch(4, zero=3, sp_size=2, sp_attention="flash_attention_2"),
}


def environment_of(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return what the installed accelerate would start the processes of a configuration with."""
    for variable in [v for v in os.environ if v.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]:
        monkeypatch.delenv(variable)
    args = launch_command_parser().parse_args(["--config_file", str(config_file(name)), "script.py"])
    args, defaults, _ = _validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)  # as launch_command does
        environment = prepare_deepspeed_cmd_env(args)[1]
    elif args.num_processes > 1:
        environment = prepare_multi_gpu_env(args)
    else:
        environment = {}
    return {**environment, "WORLD_SIZE": str(args.num_processes)}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_each_configuration_as_it_is_meant(path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded = load_config_from_file(str(path))
    assert loaded.num_processes == EXPECTED[path.stem].processes
    environment = environment_of(path.stem, monkeypatch)
    launch = Launch.from_environment(environment)
    assert launch == EXPECTED[path.stem]
    assert environment.get("ACCELERATE_MIXED_PRECISION", "no") == "no"
    refuse_conflicts(Combination(FinetuneConfig("out", factor=4.0), launch))  # refuses none


def test_all_of_them_are_there():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize(("name", "ours"), [("fsdp2", FSDP2), ("context_parallel_2gpu", CONTEXT_PARALLEL)])
def test_the_distributed_tests_start_their_processes_as_the_configurations_do(
    name: str, ours: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    environment = environment_of(name, monkeypatch)
    assert ours == {key: environment[key] for key in ours}


def test_what_the_flag_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    argv = ["model", "--accelerate-config", "fsdp2", "--num-processes", "2"]
    words = launch_words(LaunchArguments(accelerate_config="fsdp2", num_processes=2), argv)
    assert words is not None
    at = words.index("hf_posenc") - 1
    args = launch_command_parser().parse_args(words[3:])
    assert (Path(args.config_file), args.num_processes, args.module) == (CONFIGS / "fsdp2.yaml", 2, True)
    assert words[at:] == ["-m", "hf_posenc", "finetune", *argv]
    assert launch_words(LaunchArguments(), ["model"]) is None
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE"}))
    assert config_file(str(own)) == own
    monkeypatch.setenv("HF_POSENC_LAUNCHED", "1")  # a process that was started so goes on itself
    assert launch_words(LaunchArguments(accelerate_config="fsdp2"), argv) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--accelerate-config", "fsdp3"], "no accelerate configuration 'fsdp3'. Known: alst_ulysses_4gpu, context"),
        (["--accelerate-config", "fsdp1"], "take fsdp2"),
        (["--num-processes", "2"], "--num-processes goes with --accelerate-config"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str):
    words = ["finetune", str(tiny_model_path()), "--documents", "x.txt", "--output-dir", str(tmp_path / "out")]
    assert main([*words, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("before", [True, False])
def test_the_processes_show_tracebacks_too(before: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    class Launched(Exception):  # no mistake of the user's, so main lets it through
        pass

    def launched(words: list[str]) -> None:
        raise Launched(*words)

    monkeypatch.setattr("hf_posenc.cli.finetune.relaunch", launched)
    words = ["finetune", str(tiny_model_path()), "--output-dir", str(tmp_path / "out"), "--accelerate-config", "fsdp2"]
    with pytest.raises(Launched) as plain:
        main(words)
    assert "--traceback" not in plain.value.args
    with pytest.raises(Launched) as raised:
        main(["--traceback", *words] if before else [*words[:2], "--traceback", *words[2:]])
    started = raised.value.args[raised.value.args.index("hf_posenc") + 1 :]
    assert started == (*words, "--traceback")
    monkeypatch.setenv("HF_POSENC_LAUNCHED", "1")
    with pytest.raises(ValueError, match="--documents"):  # what a process does with these words
        main(started)


@pytest.mark.slow
def test_the_flag_trains_in_several_processes(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The {n}th letter came to her sister on a morning in May. " for n in range(600)))
    command = [sys.executable, "-m", "hf_posenc", "finetune", str(tiny_model_path()), "--documents", str(text)]
    command += ["--output-dir", str(tmp_path / "out"), "--device", "cpu", "--factor", "2", "--seq-len", "256"]
    command += ["--token-budget", "2048", "--eval-documents", "0"]
    command += ["--accelerate-config", "multi_gpu", "--num-processes", "2", "--main-process-port", "29417"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("saved:") == 1  # the first process speaks for all
    lines = [json.loads(line) for line in (tmp_path / "out/train_log.jsonl").read_text().splitlines()]
    assert [line["tokens_trained"] for line in lines] == [512, 1024, 1536, 2048]  # two blocks a step: two processes
