"""``--accelerate-config``: the same command again, in several processes, through accelerate's launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hf_posenc.errors import InvalidRequestError

CONFIGS = Path(__file__).with_name("accelerate_configs")
_LAUNCHED = "HF_POSENC_LAUNCHED"


@dataclass
class LaunchArguments:
    """Training in several processes.

    Every flag but the first is passed to ``accelerate launch`` unchanged.
    """

    HELP_COMMON: ClassVar[tuple[str, ...]] = ()

    accelerate_config: str | None = field(
        default=None,
        metadata={"help": "start with accelerate launch: single_gpu, multi_gpu, fsdp2, zero3, ... or a .yaml file"},
    )
    num_processes: int | None = field(
        default=None, metadata={"help": "with --accelerate-config: total number of processes; default: its own"}
    )
    num_machines: int | None = field(default=None, metadata={"help": "with --accelerate-config: number of machines"})
    machine_rank: int | None = field(
        default=None, metadata={"help": "with --accelerate-config: rank of this machine, from 0"}
    )
    main_process_ip: str | None = field(
        default=None, metadata={"help": "with --accelerate-config: address of machine 0"}
    )
    main_process_port: int | None = field(
        default=None, metadata={"help": "with --accelerate-config: port of machine 0"}
    )


def config_file(name: str) -> Path:
    """Return the file of one of our configurations, given by its name, or of any other, given by its path.

    Raises:
        ValueError: There is neither.
    """
    ours = CONFIGS / f"{name}.yaml"
    if ours.is_file() or Path(name).is_file():
        return ours if ours.is_file() else Path(name)
    known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    fsdp1 = " FSDP1 rounds rotary frequencies under mixed precision: take fsdp2." if name == "fsdp1" else ""
    raise InvalidRequestError(
        f"there is no accelerate configuration {name!r}.{fsdp1} Known: {known}; or the path of a file."
    )


def launch_words(launch: LaunchArguments, argv: Sequence[str]) -> list[str] | None:
    """Return the command that starts ``hf-posenc finetune ARGV`` as requested; None if this process is to go on itself.

    Raises:
        ValueError: An unknown configuration, or a flag of the launcher without one.
    """
    given = {name: value for name, value in vars(launch).items() if value is not None}
    if _LAUNCHED in os.environ:  # the launcher's children get the same words
        return None
    if launch.accelerate_config is None:
        if given:
            raise InvalidRequestError(
                f"--{next(iter(given)).replace('_', '-')} goes with --accelerate-config: give that too."
            )
        return None
    file = config_file(given.pop("accelerate_config"))
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), *flags]
    return [*words, "-m", "hf_posenc", "finetune", *argv]


def relaunch(words: Sequence[str]) -> None:
    """Become the launcher: signals reach it, and its exit code is this command's."""
    sys.stdout.flush()
    os.execve(words[0], list(words), {**os.environ, _LAUNCHED: "1"})


def own_device(device: str | None) -> str | None:
    """Return where a launched process loads its model: its own GPU, where one was left to choose."""
    if device not in (None, "cuda") or "LOCAL_RANK" not in os.environ:
        return device
    import torch

    return f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else device
