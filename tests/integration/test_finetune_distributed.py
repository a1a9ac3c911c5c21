"""Two processes on the CPU, by DistributedDataParallel and by FSDP2, against one that does all of a step itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import one_of_several
from distributed_runs import (
    FSDP2,
    LAUNCHER,
    Run,
    assert_same_steps,
    in_two_processes,
    log_of,
    returned_by,
    zero,
)
from folders import ROOT
from hf_posenc.checkpoint.extended import load_extended
from hf_posenc.checkpoint.manifest import read_manifest
from tiny_runs import SEQ

ALONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
SHARED = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "untied": {"model": {}},
    "lora": {"settings": {"lora": True}},
    "checkpointing": {
        "settings": {"gradient_checkpointing": True, "per_device_train_batch_size": 2, "token_budget": 8 * 4 * SEQ}
    },
    "masked": {"masked": True},
    "kept": {"settings": {"keep": 0.1}},  # weights between those before and after the training
    "accumulating": {"settings": {"token_budget": 8 * 4 * SEQ}, "times": 2},  # two micro-batches in each process
}


def runs_of(folder: Path, split: dict[str, int], **changes: Any) -> dict[str, Run]:
    """Return a run of each kind that goes through, and one of full and LoRA training that breaks off after step 8."""
    killed = {f"{kind}-killed": {**KINDS[kind], "killed_at": 8} for kind in ("full", "lora")}
    runs = {}
    for name, kind in {**KINDS, **killed}.items():
        steps = kind.get("times", 1) * split["gradient_accumulation_steps"]
        settings = {**split, "gradient_accumulation_steps": steps, **kind.get("settings", {})}
        given = {key: value for key, value in kind.items() if key != "times"}
        runs[name] = Run(str(folder / name), **{**given, "settings": settings}, **changes)
    return runs


def resumed(run: Run, folder: Path, split: dict[str, int]) -> Run:
    """Return the continuation of a killed run, in a copy of its folder and shared out otherwise."""
    shutil.copytree(run.folder, folder)
    return Run(str(folder), {**run.settings, **split, "resume_from_checkpoint": True}, run.model)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    runs = runs_of(tmp_path_factory.mktemp("alone"), ALONE)
    for run in runs.values():
        one_of_several.do(run)
    return runs


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, alone: dict[str, Run]) -> Any:
    """The same runs in two processes, and continuations of runs that one process began."""
    folder = tmp_path_factory.mktemp(request.param)
    runs = runs_of(folder, SHARED)
    for kind in ("full", "lora"):
        runs[f"{kind}-resumed"] = resumed(alone[f"{kind}-killed"], folder / f"{kind}-resumed", SHARED)
    in_two_processes(folder / "runs.json", list(runs.values()), FSDP2 if request.param == "fsdp2" else {})
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one_does(alone: dict[str, Run], shared: dict[str, Run], kind: str):
    assert_same_steps(shared[kind], alone[kind])
    expected = returned_by(alone[kind])
    for process in (0, 1):  # both return the whole trained model, and it is the plain one it was
        seen = returned_by(shared[kind], process)
        assert (seen["kind"], seen["hooks"]) == (expected["kind"], expected["hooks"])
        assert seen["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(seen["weights"][name], weight, rtol=1e-4, atol=1e-4, msg=name)
    records = [
        [json.loads(line) for line in Path(run.folder, "results.jsonl").read_text().splitlines()]
        for run in (alone[kind], shared[kind])
    ]
    assert [len(record) for record in records] == [9, 9]  # as it came, before and after, each length once
    for one, other in zip(*records, strict=True):
        assert other["perplexity"] == pytest.approx(one["perplexity"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_two_processes_save_is_what_one_saves(alone: dict[str, Run], shared: dict[str, Run], kind: str):
    file = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    last = max(int(path.name.rpartition("-")[2]) for path in Path(alone[kind].folder).glob("checkpoint-*"))
    for folder in (".", f"checkpoint-{last}"):
        expected, saved = (load_file(Path(run.folder, folder, file)) for run in (alone[kind], shared[kind]))
        assert saved.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(saved[name], weight, rtol=1e-4, atol=1e-4, msg=f"{folder} {name}")
        files = [{path.name for path in Path(run.folder, folder).iterdir()} for run in (alone[kind], shared[kind])]
        assert files[1] - files[0] <= {"rng_state_0.pth", "rng_state_1.pth", "returned-1.pt"}
    assert read_manifest(Path(shared[kind].folder)) == read_manifest(Path(alone[kind].folder))
    if kind == "full":
        plain = AutoModelForCausalLM.from_pretrained(shared[kind].folder)
        torch.testing.assert_close(
            plain.model.norm.weight, load_extended(shared[kind].folder).model.norm.weight, rtol=0, atol=0
        )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_and_saves_as_one_process_does(alone: dict[str, Run], stage: int, tmp_path: Path):
    pytest.importorskip("deepspeed")
    kinds = ("full", "lora")
    runs = {kind: Run(str(tmp_path / kind), {**SHARED, **KINDS[kind].get("settings", {})}) for kind in kinds}
    in_two_processes(tmp_path / "runs.json", list(runs.values()), zero(stage))
    for kind, run in runs.items():
        assert_same_steps(run, alone[kind])
        name = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
        saved, expected = (load_file(Path(one.folder) / name) for one in (run, alone[kind]))
        assert saved.keys() == expected.keys()
        for key, value in saved.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_either_goes_on_with_the_checkpoints_of_the_other(
    tmp_path: Path, alone: dict[str, Run], shared: dict[str, Run], kind: str
):
    by_one = resumed(shared[f"{kind}-killed"], tmp_path / "by-one", ALONE)
    one_of_several.do(by_one)
    for run in (by_one, shared[f"{kind}-resumed"]):
        assert not Path(run.folder, "raised-0").exists(), Path(run.folder, "raised-0").read_text()
        assert_same_steps(run, alone[kind])
        weights, expected = returned_by(run)["weights"], returned_by(alone[kind])["weights"]
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
def test_sharded_checkpoints_and_half_precision(tmp_path: Path):
    one, two = (Run(str(tmp_path / name), split, dtype="bfloat16") for name, split in (("1", ALONE), ("2", SHARED)))
    killed = Run(str(tmp_path / "killed"), SHARED, dtype="bfloat16", killed_at=8)
    again = Run(killed.folder, {**SHARED, "resume_from_checkpoint": True}, dtype="bfloat16")
    one_of_several.do(one)
    sharded = {**FSDP2, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    in_two_processes(tmp_path / "runs.json", [two, killed, again], sharded)
    assert_same_steps(again, two, rel=1e-5)
    assert [line["loss"] for line in log_of(two)] == pytest.approx([line["loss"] for line in log_of(one)], rel=1e-3)
    for name, weight in returned_by(one)["weights"].items():
        assert returned_by(two)["weights"][name].dtype == weight.dtype == torch.bfloat16
        torch.testing.assert_close(returned_by(two, 1)["weights"][name], weight, rtol=0.02, atol=0.02, msg=name)
    assert not Path(two.folder, "checkpoint-12/model.safetensors").exists()  # sharded: no process had it all
    assert (
        load_file(Path(two.folder, "model.safetensors")).keys()
        == load_file(Path(one.folder, "model.safetensors")).keys()
    )


@pytest.mark.slow
def test_an_error_of_the_first_process_stops_all(tmp_path: Path):
    taken = Run(str(tmp_path / "taken"), SHARED)
    Path(taken.folder, "checkpoint-1").mkdir(parents=True)
    Path(taken.folder, "checkpoint-1/trainer_state.json").write_text("{}")
    in_two_processes(tmp_path / "runs.json", [taken], {})  # would time out if the other waited
    said = [Path(taken.folder, f"raised-{process}").read_text() for process in (0, 1)]
    assert "holds checkpoints" in said[0]
    assert said[1] == f"the main process stopped this run. InvalidRequestError: {said[0]}"


DECIDES = """
import os, sys
from accelerate import PartialState
from hf_posenc.utils.processes import from_main, leave_processes

PartialState(cpu=True)
def fail():
    raise ValueError("no")
said = [from_main(lambda: os.environ["RANK"])]
try:
    from_main(fail)
except (ValueError, RuntimeError) as error:
    said.append(f"{type(error).__name__}: {error}")
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write("; ".join(said))
leave_processes()
"""


@pytest.mark.slow
def test_the_first_process_decides_for_all(tmp_path: Path):
    script = tmp_path / "decides.py"
    script.write_text(DECIDES)
    command = [*LAUNCHER, str(script), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    assert (tmp_path / "0").read_text() == "0; ValueError: no"
    assert (tmp_path / "1").read_text() == "0; RunStoppedError: the main process stopped this run. ValueError: no"
