"""Transformers' Trainer as a run needs it: its settings, the order of its data, what its checkpoints say."""

from __future__ import annotations

import dataclasses
import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, ProgressCallback, TrainerCallback, TrainingArguments

from hf_posenc.attention.shifted import shifted_sparse_attention
from hf_posenc.checkpoint.extended import write_extension
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.losses import length_dependent_rope_types
from hf_posenc.families.discovery import unwrap
from hf_posenc.training.block_trainer import BlockTrainer
from hf_posenc.training.chunked_loss import chunked_lm_loss
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.first_loss import FirstLossCheck, expected_first_loss, tolerance_of
from hf_posenc.training.kernels import liger_arguments, training_kernels
from hf_posenc.training.launch import Launch
from hf_posenc.training.lora import base_not_looked_up
from hf_posenc.training.packing import BlockSchedule, PackedDataset, log_summary
from hf_posenc.training.precision import float32_weights, is_half
from hf_posenc.training.probe import probe_isolation
from hf_posenc.training.sharding import make_whole, remember_modules
from hf_posenc.training.train_log import Console
from hf_posenc.training.writing import warn_if_too_small
from hf_posenc.utils.console import without_weight_bars
from hf_posenc.utils.dtypes import computes_natively, round_to_stored

logger = logging.getLogger(__name__)


def training_arguments(model: PreTrainedModel, config: FinetuneConfig, packed: PackedDataset) -> TrainingArguments:
    """Return Trainer's settings; making them joins the process group of a distributed run."""
    values = {one.name: getattr(config, one.name) for one in dataclasses.fields(TrainingArguments) if one.init}
    if "activation_checkpointing" in values:  # Transformers 5.23 warns of the older name
        for kind in ("", "_kwargs"):
            values[f"activation_checkpointing{kind}"] = values.pop(f"gradient_checkpointing{kind}")
    device = unwrap(model).device
    on_cpu = device.type == "cpu"
    in_bf16 = is_half(model) and computes_natively(torch.bfloat16, device)
    values |= {
        "max_steps": 1,  # set when the number of devices is known
        "bf16": in_bf16 if config.bf16 is None else config.bf16,
        "logging_steps": 1,  # LossLog needs every step
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": config.dataloader_pin_memory and not on_cpu,
        # finetune pushes the trained model itself; Trainer's copy is saved with each checkpoint, and holds no token.
        "push_to_hub": False,
        "hub_token": None,
        "resume_from_checkpoint": None,
    }
    values |= liger_arguments(model)
    args = TrainingArguments(**values)
    if args.n_gpu > 1:
        logger.warning(
            "one process uses one GPU; start it with `accelerate launch` or torchrun to use all %d", args.n_gpu
        )
        args._n_gpu = 1  # DataParallel copies modules, which the loss in chunks does not survive
    _set_steps(args, config, packed)
    return args


def _set_steps(args: TrainingArguments, config: FinetuneConfig, packed: PackedDataset) -> None:
    per_step = tokens_per_step(args, packed)
    args.max_steps = config.token_budget // per_step
    if args.max_steps == 0:
        raise InvalidRequestError(
            f"token_budget {config.token_budget} is less than one step, {per_step} tokens. Give it more, or lower "
            "gradient_accumulation_steps, per_device_train_batch_size or seq_len."
        )
    if config.warmup_steps >= 1:
        args.warmup_steps = min(config.warmup_steps, args.max_steps // 5)
    else:
        args.warmup_steps = args.get_warmup_steps(args.max_steps)
    logger.info(
        "%d steps of %d tokens: %d tokens, %.2f passes over the data; warm-up over %d steps",
        args.max_steps,
        per_step,
        args.max_steps * per_step,
        args.max_steps * per_step / (len(packed) * packed.seq_len),
        args.warmup_steps,
    )
    schedule = BlockSchedule(packed, args.max_steps * _blocks_per_step(args), config.seed)
    positions = packed.positions
    # nope has no positions, and is trained on short texts first; an encoding may be trained for the length it has.
    wants_distances = config.method != "nope" and positions.target_length > positions.original_length
    group = config.group(packed.seq_len)
    log_summary(schedule.summary(group), positions.original_length, wants_distances=wants_distances, group=group)


def _blocks_per_step(args: TrainingArguments) -> int:
    replicas = Launch.from_environment().replicas  # processes that share a sequence read the same blocks
    return int(args.train_batch_size * args.gradient_accumulation_steps * replicas)


def tokens_per_step(args: TrainingArguments, packed: PackedDataset) -> int:
    """Return the tokens one optimizer step is trained on, over all processes."""
    return _blocks_per_step(args) * packed.seq_len


def train(
    model: Any,
    args: TrainingArguments,
    packed: PackedDataset,
    config: FinetuneConfig,
    watch: TrainerCallback,
    checkpoint: Path | None,
    base_model: str,
    tokens_before: int = 0,
    known_loss: float | None = None,
) -> None:
    """Train a model in place, and leave nothing else changed in it.

    Args:
        model: The extended model, PEFT-wrapped or not.
        args: From ``training_arguments``.
        packed: The blocks.
        config: The run.
        watch: Sees every step first: the loss log.
        checkpoint: Trainer's folder to go on from; None begins.
        base_model, tokens_before: For the manifests of the checkpoints: the latter counts the tokens of earlier runs.
        known_loss: Of the model on other texts, nats per token; for ``FirstLossCheck``.
    """

    def mark(folder: Path, step: int) -> None:
        trained = tokens_before + step * tokens_per_step(args, packed)
        adapter = hasattr(model, "peft_config")
        write_extension(unwrap(model), folder, adapter=adapter, tokens_trained=trained, base_model=base_model)

    group = config.group(packed.seq_len)
    schedule = BlockSchedule(packed, args.max_steps * _blocks_per_step(args), config.seed)
    if args.should_save:
        warn_if_too_small(Path(str(config.output_dir)), model, args.save_total_limit)
    base = unwrap(model)
    use_cache = base.config.use_cache
    autocast = torch.autocast(base.device.type, torch.bfloat16) if args.bf16 else nullcontext()
    console = Console(int(config.logging_steps), _shorter(config, args))
    began = time.perf_counter()
    sparse = nullcontext() if group is None else shifted_sparse_attention(model, group)
    try:
        with (
            sparse,
            float32_weights(model, frozen=not args.bf16) as dtypes,
            training_kernels(model, config, bf16=args.bf16),
            chunked_lm_loss(model, config.logits_chunk),
        ):
            with autocast:
                probe_isolation(model, args.train_batch_size, packed.positions)
                check = _first_loss_check(model, args, schedule, config, checkpoint, known_loss)
            modules = remember_modules(model)
            callbacks = [watch, check]
            trainer = BlockTrainer(model=model, args=args, train_dataset=schedule, callbacks=callbacks, mark=mark)
            trainer.checks_positions = config.check_first_loss
            if not args.disable_tqdm:
                trainer.remove_callback(ProgressCallback)
                trainer.add_callback(console)
            with base_not_looked_up(), without_weight_bars():
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
            make_whole(model, modules, dtypes)
    finally:
        console.close()
        base.config.use_cache = use_cache  # Trainer may switch it off for checkpointing
    round_to_stored(base)
    model.eval()
    logger.info("trained in %.0f s", time.perf_counter() - began)


def _shorter(config: FinetuneConfig, args: TrainingArguments) -> str:
    """Return what would make a training shorter, in the words of the command line."""
    ways = ["a smaller --token-budget"]
    if config.position_schedule == "full" and config.method != "nope":
        ways.insert(0, "--position-schedule pose, whose blocks have the original length")
    if args.bf16 and not computes_natively(torch.bfloat16, args.device):
        ways.insert(0, "--bf16 false (bfloat16 is emulated here)")
    return ", ".join(ways)


def _first_loss_check(
    model: Any,
    args: TrainingArguments,
    schedule: BlockSchedule,
    config: FinetuneConfig,
    checkpoint: Path | None,
    known_loss: float | None,
) -> FirstLossCheck:
    """Return the check, with the loss of the first step's blocks where it can be known before training."""
    expected = None
    another_attention = config.shifted_sparse_attention or length_dependent_rope_types(unwrap(model))
    another_loss = another_attention or config.neftune_noise_alpha is not None  # noise is added to the embedding
    if config.check_first_loss and checkpoint is None and not another_loss:
        own = range(args.process_index, _blocks_per_step(args), args.world_size)
        expected = expected_first_loss(model, (schedule[index] for index in own), config.logits_chunk)
    tolerance = tolerance_of(model, autocast=args.bf16)
    return FirstLossCheck(model, expected, known_loss, tolerance, judges=config.check_first_loss)
