"""Transformers' Trainer over data in their final order; its checkpoints fit any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_FILE
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, SequentialSampler
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_posenc.training.careful_trainer import CarefulTrainer
from hf_posenc.training.launch import Launch
from hf_posenc.training.lora import base_not_looked_up
from hf_posenc.training.sharding import load_shards, shard_like


class InOrderTrainer(CarefulTrainer):
    """CarefulTrainer over a dataset that is already in the order of training; ``mark`` completes its checkpoints.

    Under FSDP2 with ``FULL_STATE_DICT`` a checkpoint has the files of a run in one process, ``model.safetensors`` and
    ``optimizer.pt``: either kind of run resumes the other's. The first process holds all of it in CPU memory while it
    writes (12 bytes a trained parameter), and every process while it reads. ``SHARDED_STATE_DICT`` needs no such
    memory, and only FSDP2 reads it.
    """

    def __init__(self, *args: Any, mark: Callable[[Path, int], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mark = mark
        launch = Launch.from_environment()
        if launch.fsdp and launch.processes > 1 and not self.is_fsdp_enabled:
            raise ValueError(
                f"the launch asks for FSDP, but accelerate shares out no weights on {self.args.device.type}. Launch "
                "with --accelerate-config multi_gpu there."
            )
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        self.writes_whole = plugin is not None and "FULL" in str(plugin.state_dict_type)
        if plugin is not None and self.args.bf16:
            # accelerate's own policy also sums gradients in bfloat16 and rounds the loss to it
            plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> SequentialSampler:
        dataset: Any = train_dataset if train_dataset is not None else self.train_dataset
        return SequentialSampler(dataset)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.should_save and (self.writes_whole or not self.is_fsdp_enabled):
            self.mark(Path(output_dir or str(self.args.output_dir)), self.state.global_step)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if state_dict:  # gathered: tied weights as copies, which would be written twice
            first: dict[int, str] = {}
            model: Any = self.model
            for name, parameter in model.named_parameters(remove_duplicate=False):
                tied = first.setdefault(id(parameter), name)
                if {name, tied} <= state_dict.keys():
                    state_dict[name] = state_dict[tied]
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.writes_whole:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer, scheduler = self._optimizers()
        state = optimizer.state_dict()
        whole = {  # a collective call, in the same order everywhere
            index: {key: v.full_tensor().cpu() if isinstance(v, DTensor) else v for key, v in values.items()}
            for index, values in state["state"].items()
        }
        if self.args.should_save:
            torch.save({**state, "state": whole}, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        inside: Any = self.model if model is None else model
        adapted = isinstance(inside, PeftModel)
        file = folder / (ADAPTER_FILE if adapted else SAFE_WEIGHTS_NAME)
        if not self.is_fsdp_enabled or not file.is_file():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights = load_file(file)
        if adapted:  # the file leaves the adapter's name out
            with base_not_looked_up():
                saved = get_peft_model_state_dict(inside, state_dict=inside.state_dict(keep_vars=True))
            names = {id(parameter): name for name, parameter in inside.named_parameters()}
            weights = {names[id(parameter)]: weights[key] for key, parameter in saved.items() if key in weights}
        if missing := load_shards(inside, weights):
            raise ValueError(f"{file} lacks {', '.join(missing[:3])}: it was written for another model.")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        file = None if checkpoint is None else Path(checkpoint) / OPTIMIZER_NAME
        if not self.is_fsdp_enabled or file is None or not file.is_file():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = torch.load(file, map_location="cpu", weights_only=True)
        optimizer, scheduler = self._optimizers()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, values in state["state"].items():
            for key, value in values.items():
                if value.shape == parameters[index].shape:  # not the count of steps
                    values[key] = shard_like(value, parameters[index])
        optimizer.load_state_dict(state)
        scheduler.load_state_dict(torch.load(file.with_name(SCHEDULER_NAME), weights_only=True))

    def _optimizers(self) -> tuple[Any, Any]:
        return self.optimizer, self.lr_scheduler
