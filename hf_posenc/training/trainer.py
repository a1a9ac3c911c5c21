"""Transformers' Trainer as a run needs it: its settings, the order of its data, and checkpoints that can be resumed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
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
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_posenc.attention.shifted import shifted_sparse_attention
from hf_posenc.checkpoint.extended import write_extension
from hf_posenc.errors import InvalidRequestError, RunStoppedError
from hf_posenc.evaluation.losses import length_dependent_rope_types
from hf_posenc.families.discovery import is_adapter
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.training.blocks import TrainingBlocks
from hf_posenc.training.chunked_loss import chunked_lm_loss
from hf_posenc.training.kernels import training_kernels
from hf_posenc.training.lora import base_not_looked_up
from hf_posenc.training.run_folder import PARTIAL, clear_partial, move_into_place
from hf_posenc.training.run_plan import RunPlan, StagePlan
from hf_posenc.training.start_checks import (
    RotaryCallback,
    check_positions_arrive,
    expected_first_loss,
    probe_isolation,
    shares_sequences,
    tolerance_of,
)
from hf_posenc.training.train_log import ADVICE_NOT_FINITE, Console
from hf_posenc.training.weights import float32_weights, load_shards, remember_modules, shard_like, unshard
from hf_posenc.utils.console import without_weight_bars
from hf_posenc.utils.dtypes import round_to_stored
from hf_posenc.utils.processes import from_main

logger = logging.getLogger(__name__)


def training_arguments(options: Mapping[str, Any]) -> TrainingArguments:
    """Return Trainer's settings of a stage (``StagePlan.trainer``); making them joins a distributed run's processes."""
    args = TrainingArguments(**options)
    if args.n_gpu > 1:
        logger.warning(
            "one process uses one GPU; start it with `accelerate launch` or torchrun to use all %d", args.n_gpu
        )
        args._n_gpu = 1  # DataParallel copies modules, which the loss in chunks does not survive
    return args


def meet_processes(options: Mapping[str, Any]) -> None:
    """Join a distributed run's processes by the settings of a stage (``ddp_timeout``, ``ddp_backend``).

    The first call that joins them decides these settings for the whole run.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        training_arguments(options)


def train(
    model: Any,
    args: TrainingArguments,
    blocks: TrainingBlocks,
    plan: RunPlan,
    stage: StagePlan,
    watch: TrainerCallback,
    checkpoint: Path | None = None,
    tokens_before: int = 0,
) -> None:
    """Train a model in place, and leave nothing else changed in it.

    Args:
        model: The extended model, PEFT-wrapped or not.
        args: From ``training_arguments``.
        blocks: What it is trained on, in order.
        plan: How it computes.
        stage: Its steps and groups.
        watch: Sees every step first: the loss log.
        checkpoint: Trainer's folder to resume from; None begins.
        tokens_before: Tokens of earlier runs and stages, counted in the manifests of the checkpoints.
    """
    rotary = RotaryModel(model)

    def mark(folder: Path, step: int) -> None:
        trained = tokens_before + step * stage.tokens_per_step
        write_extension(
            rotary.model, folder, adapter=is_adapter(model), tokens_trained=trained, base_model=plan.base_model
        )

    base = rotary.model
    use_cache = {name: value for name, value in vars(base.config).items() if name == "use_cache"}
    console = Console(plan.logging_steps, plan.shorter)
    began = time.perf_counter()
    sparse = nullcontext() if stage.group is None else shifted_sparse_attention(model, stage.group)
    try:
        with (
            sparse,
            float32_weights(model, frozen=not plan.step.bf16) as dtypes,
            training_kernels(rotary, flash=plan.flash),
            chunked_lm_loss(model, plan.step.logits_chunk),
        ):
            with plan.step.autocast(rotary.device.type):
                probe_isolation(rotary, args.train_batch_size, stage.positions, packed=not plan.data.one_document)
                expected = None
                if plan.checks_first_loss and checkpoint is None and not length_dependent_rope_types(base):
                    own = range(args.process_index, stage.blocks_per_step, args.world_size)
                    expected = expected_first_loss(rotary, (blocks[index] for index in own), plan.step.logits_chunk)
            modules = remember_modules(model)
            callbacks = [watch, RotaryCallback(rotary, expected, tolerance_of(rotary, autocast=bool(plan.step.bf16)))]
            trainer = LongTrainer(
                model=model,
                args=args,
                train_dataset=blocks,
                callbacks=callbacks,
                mark=mark,
                shards_weights=plan.shards_weights,
            )
            trainer.logs_tokens_in_loss = blocks.kinds is not None
            trainer.attends_within_rows = stage.group is None and not shares_sequences(trainer)
            if not args.disable_tqdm:
                trainer.remove_callback(ProgressCallback)
                trainer.add_callback(console)
            with base_not_looked_up(), without_weight_bars():
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
            unshard(model, modules, dtypes)
    finally:
        console.close()
        vars(base.config).pop("use_cache", None)  # Trainer may switch it off for checkpointing, on any config
        vars(base.config).update(use_cache)
    round_to_stored(base)
    model.eval()
    logger.info("trained in %.0f s", time.perf_counter() - began)


class LongTrainer(Trainer):
    """Trainer over a dataset that is already in the order of training; ``mark`` completes its checkpoints.

    It checks what it feeds, and moves a checkpoint into place when all processes are through with it. Trainer itself
    writes in place, and finds a checkpoint by its name: one that is being written when the process is killed, or the
    disk is full, is taken for whole by ``resume_from_checkpoint=True``.

    Under FSDP2 with ``FULL_STATE_DICT`` a checkpoint has the files of a run in one process, ``model.safetensors`` and
    ``optimizer.pt``: either kind of run resumes the other's. The first process holds all of it in CPU memory while it
    writes (12 bytes a trained parameter), and every process while it reads. ``SHARDED_STATE_DICT`` needs no such
    memory, and only FSDP2 reads it.

    Private methods of Trainer are overridden where it has no public ones: ``_get_output_dir`` and ``_save_checkpoint``
    write aside and move into place; ``_save`` keeps tied weights of a gathered model from being written twice;
    ``_save_optimizer_and_scheduler``, ``_load_from_checkpoint`` and ``_load_optimizer_and_scheduler`` are those files
    of FSDP2; ``_prepare_input`` rounds nothing.

    Attributes:
        logs_tokens_in_loss: With the loss of a step, log how many tokens it is the mean of.
        attends_within_rows: Each process has whole rows, and a row of any length can be attended in.
    """

    logs_tokens_in_loss = False
    attends_within_rows = False
    _positions_arrived = False

    def __init__(self, *args: Any, mark: Callable[[Path, int], None], shards_weights: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mark = mark
        if shards_weights and not self.is_fsdp_enabled:
            raise InvalidRequestError(
                f"the launch asks for FSDP, but accelerate shares out no weights on {self.args.device.type}. Launch "
                "with --accelerate-config multi_gpu there."
            )
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        self.writes_full_state = plugin is not None and "FULL" in str(plugin.state_dict_type)
        if plugin is not None and self.args.bf16:
            # accelerate's own policy also sums gradients in bfloat16 and rounds the loss to it
            plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the blocks in their order, in batches of this run; Trainer's are shuffled, or as the checkpoint's."""
        args, dataset = self.args, cast("Dataset[Any]", self.train_dataset)
        names = (
            "num_workers",
            "pin_memory",
            "persistent_workers",
            "prefetch_factor",
            "multiprocessing_context",
            "in_order",
        )
        options = {name: getattr(args, f"dataloader_{name}") for name in names if hasattr(args, f"dataloader_{name}")}
        loader = DataLoader(dataset, batch_size=args.train_batch_size, collate_fn=self.data_collator, **options)
        return cast("DataLoader[Any]", self.accelerator.prepare(loader))

    def _prepare_input(self, data: Any) -> Any:
        """Move a tensor to the device; Trainer's own would round log-probabilities to bfloat16 under DeepSpeed."""
        return data.to(self.args.device) if isinstance(data, torch.Tensor) else super()._prepare_input(data)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._positions_arrived:
            check_positions_arrive(self, model, inputs)
            self._positions_arrived = True
        if self.attends_within_rows and "likely_ids" in inputs:
            inputs = one_text_a_row(inputs)
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        batches, self.tokens_in_loss = super().get_batch_samples(*args, **kwargs)
        return batches, self.tokens_in_loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.logs_tokens_in_loss and "loss" in logs:
            logs["tokens_in_loss"] = int(self.tokens_in_loss or 0)
        super().log(logs, *args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return os.path.join(super()._get_output_dir(trial), PARTIAL)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder, step = Path(str(self.args.output_dir)), self.state.global_step
        refuse_not_finite(model, step)
        from_main(lambda: clear_partial(folder))
        super()._save_checkpoint(model, trial)
        if self.args.should_save and (self.writes_full_state or not self.is_fsdp_enabled):
            self.mark(folder / PARTIAL / f"checkpoint-{step}", step)
        self.accelerator.wait_for_everyone()
        from_main(lambda: move_into_place(folder, step, self.args.save_total_limit))

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
        if not self.writes_full_state:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer: Any = self.optimizer
        scheduler: Any = self.lr_scheduler
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
        optimizer: Any = self.optimizer
        scheduler: Any = self.lr_scheduler
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, values in state["state"].items():
            for key, value in values.items():
                if value.shape == parameters[index].shape:  # not the count of steps
                    values[key] = shard_like(value, parameters[index])
        optimizer.load_state_dict(state)
        scheduler.load_state_dict(torch.load(file.with_name(SCHEDULER_NAME), weights_only=True))


def one_text_a_row(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return blocks of packed texts as a batch with one text in each row, if all texts have one length.

    Packed, attention costs as much as for one long text, however many of them see nothing of each other.

    Args:
        inputs: Tensors ``(batch, seq_len, ...)``, ``position_ids`` among them, which are 0 where a text begins.
    """
    starts = (inputs["position_ids"] == 0).flatten().nonzero().flatten().tolist()
    length = inputs["position_ids"].numel() // len(starts)
    if starts != list(range(0, length * len(starts), length)):
        return dict(inputs)
    return {name: value.reshape(len(starts), length, *value.shape[2:]) for name, value in inputs.items()}


@torch.no_grad()
def refuse_not_finite(model: nn.Module, step: int) -> None:
    """Refuse to save weights that can only give NaN: the loss of a step says what they were before it, not after.

    Args:
        model: Sharded or not; each process looks at what it holds.
        step: That was just done.

    Raises:
        RuntimeError: A trained weight is NaN or infinite, in every process.
    """
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    held = ((name, p.to_local() if isinstance(p, DTensor) else p) for name, p in trained)
    bad = next((name for name, values in held if not values.isfinite().all()), None)
    names = [name for name in gather_object([bad]) if name is not None]
    if names:
        raise RunStoppedError(
            f"weights are not finite after step {step}, {names[0]} first, so no checkpoint of it was written. "
            + ADVICE_NOT_FINITE
        )
