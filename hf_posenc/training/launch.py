"""The start of this process by accelerate's launcher: the kind of sharding, the number of processes, and the groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_GROUPS = {"cp_size": "CP", "sp_size": "SP", "tp_size": "TP"}


@dataclass(frozen=True)
class Launch:
    """The launch environment, as accelerate writes it (``accelerate/utils/launch.py``).

    Attributes:
        processes: In all, over all machines.
        fsdp: Version of FSDP, 1 or 2; 0 without it.
        zero: Stage of DeepSpeed ZeRO, 1 to 3; 0 is DeepSpeed that shards nothing; None without DeepSpeed.
        state_dict: ``FULL_STATE_DICT`` or ``SHARDED_STATE_DICT``, of FSDP's checkpoints.
        wraps_layers: FSDP is to checkpoint activations itself.
        cp_size: Processes that share each sequence by context parallelism (torch).
        sp_size: Those that share it by Ulysses (DeepSpeed).
        sp_attention: Attention that Ulysses is to run; empty if nothing says it.
        tp_size: Those that share each matrix.
    """

    processes: int = 1
    fsdp: int = 0
    zero: int | None = None
    state_dict: str = "FULL_STATE_DICT"
    wraps_layers: bool = False
    cp_size: int = 1
    sp_size: int = 1
    sp_attention: str = ""
    tp_size: int = 1

    @property
    def replicas(self) -> int:
        """Processes that get different data, of those that share a sequence one."""
        return self.processes // (self.cp_size * self.sp_size * self.tp_size)

    @property
    def shares_sequences(self) -> bool:
        """Whether a sequence is spread over processes."""
        return self.cp_size * self.sp_size > 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """Read it from the variables that ``accelerate launch`` and torchrun set."""

        def on(name: str) -> bool:
            return environment.get(name, "false").lower() in ("true", "1", "yes")

        groups = on("ACCELERATE_USE_PARALLELISM_CONFIG")
        sizes = {name: int(environment.get(f"PARALLELISM_CONFIG_{key}_SIZE", "1")) for name, key in _GROUPS.items()}
        deepspeed = on("ACCELERATE_USE_DEEPSPEED")
        return cls(
            processes=int(environment.get("WORLD_SIZE", "1")),
            fsdp=int(environment.get("FSDP_VERSION", "1")) if on("ACCELERATE_USE_FSDP") else 0,
            zero=int(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")) if deepspeed else None,
            state_dict=environment.get("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT"),
            wraps_layers=on("FSDP_ACTIVATION_CHECKPOINTING"),
            sp_attention=environment.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", ""),
            **(sizes if groups else {}),
        )
