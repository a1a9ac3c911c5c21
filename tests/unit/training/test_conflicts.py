"""Settings that do not go together: refused with its message, and the nearest settings that do go are let through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_posenc.cli.main import main
from hf_posenc.training import FinetuneConfig
from hf_posenc.training.conflicts import CONFLICTS, Combination, refuse_conflicts
from hf_posenc.training.launch import Launch

CP = {"processes": 4, "fsdp": 2, "cp_size": 2}
SP = {"processes": 4, "zero": 3, "sp_size": 2, "sp_attention": "flash_attention_2"}
SHIFTED = {"config": {"shifted_sparse_attention": True}}
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
HYBRID = {"unmasked": {"conv": 1, "linear_attention": 2}}
# Of each rule: what breaks it, what is changed to mend it, and what the message names.
TABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fsdp1": ({"fsdp": 1}, {"fsdp": 2}, "rounds the rotary frequencies.*fsdp2"),
    "fsdp and its own activation checkpointing": (
        {"fsdp": 2, "wraps_layers": True},
        {"wraps_layers": False},
        "gradient_checkpointing=True",
    ),
    "tensor parallelism": ({"processes": 2, "fsdp": 2, "tp_size": 2}, {"tp_size": 1}, "tp_size 2"),
    "groups and processes": ({**CP, "processes": 3}, {"processes": 2}, "3 processes.*2 x 1"),
    "cp and sp": ({**CP, "sp_size": 2}, {"sp_size": 1}, "cp_size 2.*sp_size 2"),
    "cp without fsdp2": ({**CP, "fsdp": 0}, {"fsdp": 2}, "needs FSDP2"),
    "cp and attention": ({**CP, "attention": "flash_attention_2"}, {"attention": "sdpa"}, "'flash_attention_2'"),
    "cp and seq_len": ({**CP, "seq_len": 102}, {"seq_len": 104}, "2 x 2 chunks, and seq_len 102"),
    "sp without deepspeed": ({**SP, "zero": None}, {"zero": 3}, "needs DeepSpeed"),
    "sp and attention": ({**SP, "sp_attention": "sdpa"}, {"sp_attention": "flash_attention_3"}, "FlashAttention only"),
    "sp and seq_len": ({**SP, "seq_len": 101}, {"seq_len": 102}, "seq_len 101"),
    "cp and short windows": (
        {**CP, "config": {"short_share": 0.25}},
        {"config": {"short_share": 0.0}},
        "short_share 0.25 reads blocks as several windows",
    ),
    "cp and a mixture": ({**CP, "config": {"task_mix": ["kv=1"]}}, {"config": {"task_mix": None}}, "several. Launch"),
    "a mixture and layers without a mask": (
        {**HYBRID, "config": {"task_mix": ["kv=1"]}},
        {"config": {"packing": False}},
        "task_mix, whose blocks hold several pieces: 3 of its layers",
    ),
    "short windows and layers without a mask": (
        {**HYBRID, "config": {"short_share": 0.25, "packing": False}},
        {"config": {"packing": False}},
        r"short_share 0.25.*\(conv, linear_attention\)",
    ),
    "shared sequences and layers without a mask": (
        {**CP, **HYBRID, "config": {"packing": False}},
        {"cp_size": 1},
        "a part of a sequence: 3 of its layers",
    ),
    "packing and layers without a mask": (
        HYBRID,
        {"config": {"packing": False}},
        r"Give packing=False \(--packing false\)",
    ),
    "shared sequences and a method in the attention": (
        {**CP, "method": "self_extend", "changes_attention": True},
        {"changes_attention": False},
        "self_extend changes the attention",
    ),
    "shifted attention and shared sequences": ({**CP, **SHIFTED}, {"cp_size": 1}, "Use one of the two"),
    "shifted attention and flash": (
        {**SHIFTED, "attention": "flash_attention_2"},
        {"attention": "sdpa"},
        "'flash_attention_2'",
    ),
    "quantised and shared out": ({"fsdp": 2, "is_quantised": True}, {"fsdp": 0}, "multi_gpu"),
    "8-bit states shared out": (
        {"fsdp": 2, "config": {"optim": "adamw_bnb_8bit"}},
        {"config": {"optim": "adamw_torch"}},
        "states in blocks of whole weights.*multi_gpu",
    ),
    "a sharded checkpoint elsewhere": (
        {"fsdp": 2, "checkpoint": "pytorch_model_fsdp_0", "config": {"resume_from_checkpoint": True}},
        {"state_dict": SHARDED},
        "fsdp_state_dict_type: SHARDED_STATE_DICT",
    ),
    "a deepspeed checkpoint elsewhere": (
        {"checkpoint": "global_step5", "config": {"resume_from_checkpoint": True}},
        {"zero": 3},
        "DeepSpeed's, which no other launch reads",
    ),
    "lora and the parameters of an encoding": (
        {"config": {"lora": True}, "method": "t5_bias"},
        {"method": "alibi"},
        "t5_bias has parameters, which an adapter does not hold",
    ),
    "trainable and the parameters of an encoding": (
        {"config": {"trainable": "attention"}, "method": "learned"},
        {"config": {"trainable": "all"}},
        "learned has parameters outside the attention",
    ),
    "another checkpoint under deepspeed": (
        {"zero": 3, "checkpoint": "model.safetensors", "config": {"resume_from_checkpoint": True}},
        {"zero": None},
        "not written by DeepSpeed",
    ),
}


def combination(folder: Path, settings: dict[str, Any]) -> Combination:
    settings = dict(settings)
    config = {"output_dir": str(folder), "factor": 4.0, **settings.pop("config", {})}
    if name := settings.pop("checkpoint", ""):
        (folder / "checkpoint-5" / name).mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint-5" / "trainer_state.json").touch()
    names = ("attention", "is_quantised", "seq_len", "unmasked", "method", "changes_attention")
    known = {name: settings.pop(name) for name in names if name in settings}
    return Combination(FinetuneConfig(**config), Launch(**settings), **known)


def check(folder: Path, settings: dict[str, Any]) -> None:
    refuse_conflicts(combination(folder, settings))


@pytest.mark.parametrize("name", TABLE)
def test_each_conflict(tmp_path: Path, name: str):
    broken, mend, message = TABLE[name]
    with pytest.raises(ValueError, match=message):
        check(tmp_path, broken)
    check(tmp_path, {**broken, **mend})


def test_no_conflict_is_missing_in_the_table(tmp_path: Path) -> None:
    runs = [combination(tmp_path / str(number), broken) for number, (broken, _, _) in enumerate(TABLE.values())]
    assert {next(one for one in CONFLICTS if one.holds(run)) for run in runs} == set(CONFLICTS)
    assert len(TABLE) == len(CONFLICTS)


def test_the_launch_is_read_as_accelerate_writes_it():
    given = {"WORLD_SIZE": "8", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": SHARDED}
    assert Launch.from_environment(given) == Launch(8, fsdp=2, state_dict=SHARDED)
    given |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "4"}
    launch = Launch.from_environment(given)
    assert (launch.cp_size, launch.replicas, launch.shares_sequences) == (4, 2, True)
    assert Launch.from_environment({"ACCELERATE_USE_DEEPSPEED": "true"}) == Launch(zero=2)
    assert Launch.from_environment({"PARALLELISM_CONFIG_CP_SIZE": "4"}) == Launch()  # left over, not in use


def test_refused_before_a_model_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # version 1, as accelerate takes it without a word
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")  # loading this would fail in another way
    assert main(["finetune", str(model), "--documents", "x.txt", "--output-dir", str(tmp_path / "out")]) == 2
    assert "FSDP version 1" in capsys.readouterr().err
