"""Transformers' Trainer over blocks in their order: positions reach the model, checkpoints are whole and resumable."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]  # accelerate ships no types
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_FILE
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_posenc.errors import InvalidRequestError, RunStoppedError
from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.training.checkpoints import PARTIAL, clear_partial, move_into_place
from hf_posenc.training.launch import Launch
from hf_posenc.training.lora import base_not_looked_up
from hf_posenc.training.sharding import load_shards, shard_like
from hf_posenc.training.train_log import ADVICE_NOT_FINITE
from hf_posenc.training.writing import checkpoint_bytes, how_to_go_on, writing
from hf_posenc.utils.processes import from_main


class BlockTrainer(Trainer):
    """Trainer over a dataset that is already in the order of training; ``mark`` completes its checkpoints.

    It checks what it feeds, and moves a checkpoint into place when all processes are through with it. Trainer itself
    writes in place, its state last, and finds a checkpoint by its name: one that is being written when the process is
    killed, or the disk is full, is taken for whole by ``resume_from_checkpoint=True``.

    Under FSDP2 with ``FULL_STATE_DICT`` a checkpoint has the files of a run in one process, ``model.safetensors`` and
    ``optimizer.pt``: either kind of run resumes the other's. The first process holds all of it in CPU memory while it
    writes (12 bytes a trained parameter), and every process while it reads. ``SHARDED_STATE_DICT`` needs no such
    memory, and only FSDP2 reads it.

    Attributes:
        checks_positions: Before the first step, see that positions reach the model.
    """

    checks_positions = True
    _aside = False

    def __init__(self, *args: Any, mark: Callable[[Path, int], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mark = mark
        launch = Launch.from_environment()
        if launch.fsdp and launch.processes > 1 and not self.is_fsdp_enabled:
            raise InvalidRequestError(
                f"the launch asks for FSDP, but accelerate shares out no weights on {self.args.device.type}. Launch "
                "with --accelerate-config multi_gpu there."
            )
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        self.writes_whole = plugin is not None and "FULL" in str(plugin.state_dict_type)
        if plugin is not None and self.args.bf16:
            # accelerate's own policy also sums gradients in bfloat16 and rounds the loss to it
            plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the blocks in their order; Trainer's own loader would shuffle them."""
        args, dataset = self.args, cast("Dataset[Any]", self.train_dataset)
        names = (
            "num_workers",
            "pin_memory",
            "persistent_workers",
            "prefetch_factor",
            "multiprocessing_context",
            "in_order",
        )
        told = {name: getattr(args, f"dataloader_{name}") for name in names if hasattr(args, f"dataloader_{name}")}
        loader = DataLoader(dataset, batch_size=args.train_batch_size, collate_fn=self.data_collator, **told)
        return cast("DataLoader[Any]", self.accelerator.prepare(loader))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.checks_positions:
            check_positions_arrive(self, model, inputs)
            self.checks_positions = False
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.should_save and (self.writes_whole or not self.is_fsdp_enabled):
            self.mark(Path(output_dir or str(self.args.output_dir)), self.state.global_step)

    def _get_output_dir(self, trial: Any) -> str:
        folder: str = super()._get_output_dir(trial)
        return os.path.join(folder, PARTIAL) if self._aside else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder, step = Path(str(self.args.output_dir)), self.state.global_step
        refuse_not_finite(model, folder, step)
        from_main(lambda: clear_partial(folder))
        self._aside = True
        try:
            with writing(f"the checkpoint of step {step}", folder, checkpoint_bytes(model), leftovers=folder / PARTIAL):
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                from_main(lambda: move_into_place(folder, step, self.args.save_total_limit))
        finally:
            self._aside = False

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
            raise InvalidRequestError(f"{file} lacks {', '.join(missing[:3])}: it was written for another model.")

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


@torch.no_grad()
def check_positions_arrive(trainer: Trainer, model: nn.Module, inputs: dict[str, Any]) -> None:
    """Raise if position_ids make no difference to the loss: something around the model drops them.

    ``probe_isolation`` asks the bare model; here it has every wrapper that Trainer and accelerate put around it.
    Other positions give another loss, by however little; dropped ones give the same, to the bit.

    Args:
        trainer: In training.
        model: As its ``training_step`` gets it.
        inputs: The first batch; its first block is fed twice.

    Raises:
        RuntimeError: They do not arrive.
    """
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        return  # one device may not hold a whole block
    block = {name: value[:1] for name, value in trainer._prepare_inputs(inputs).items()}
    positions = block["position_ids"]
    block["labels"] = block["input_ids"]  # all of them: where few count in the loss, these may see no other positions
    running_on = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    other = running_on % max(positions.shape[1] // 2, 1) if positions.equal(running_on) else running_on
    with evaluation_mode(model):  # type: ignore[arg-type]  # what it unwraps is one
        losses: list[Any] = [
            trainer.compute_loss(model, {**block, "position_ids": p.contiguous()}) for p in (positions, other)
        ]
    if losses[0].equal(losses[1]):
        raise RunStoppedError(
            f"position_ids do not reach the model: with others the loss is {losses[0].item():.6f} just the same. "
            "Something that wraps the model, or its forward, drops them, so packed documents would see each other. "
            "Train the model without that wrapper, or have it pass position_ids on."
        )


@torch.no_grad()
def refuse_not_finite(model: nn.Module, folder: Path, step: int) -> None:
    """Refuse to save weights that can only give NaN: the loss of a step says what they were before it, not after.

    Args:
        model: Sharded or not; each process looks at what it holds.
        folder: Of the run, for the message.
        step: That was just done.

    Raises:
        RuntimeError: A trained weight is NaN or infinite, in every process.
    """
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    bad = next((name for name, p in trained if not _local(p).isfinite().all()), None)
    found = [name for name in gather_object([bad]) if name is not None]
    if found:
        raise RunStoppedError(
            f"weights are not finite after step {step}, {found[0]} first, so no checkpoint of it was written. "
            + ADVICE_NOT_FINITE.format(how_to_go_on(folder, "If the cause is mended otherwise, run"))
        )


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this process holds."""
    shard: Any = getattr(parameter, "to_local", None)
    return parameter if shard is None else shard()
