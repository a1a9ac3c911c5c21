"""Fine-tune an extended model on a token budget: Trainer does the training, this file prepares and keeps account."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed

from hf_posenc.checkpoint import save_extended
from hf_posenc.data import tokenize_documents
from hf_posenc.evaluation import Record
from hf_posenc.evaluation.facts import hash_weights
from hf_posenc.families import unwrap
from hf_posenc.patching import describe, patch_model
from hf_posenc.training.card import model_card
from hf_posenc.training.chunked_loss import chunked_lm_loss
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.lora import add_lora, base_not_looked_up
from hf_posenc.training.measure import default_lengths, hold_out, measure
from hf_posenc.training.packing import BlockSchedule, PackedDataset, log_summary
from hf_posenc.training.precision import float32_trained_weights, is_half
from hf_posenc.training.probe import probe_isolation
from hf_posenc.training.run_folder import open_run
from hf_posenc.training.train_log import LossLog, read_log

logger = logging.getLogger(__name__)

LOSS_LOG = "train_log.jsonl"
RESULTS = "results.jsonl"


@dataclass(frozen=True)
class FinetuneResult:
    """What a run gave.

    Attributes:
        output_dir: The trained model, its card, logs and checkpoints.
        model: The trained model, as saved (PEFT-wrapped for LoRA).
        tokens_trained: Tokens trained on, repeated passes counted.
        steps: Optimizer steps.
        train_loss: Mean of the logged losses, nats per token.
        records: Perplexities before and after, told apart by ``tokens_trained``.
        seconds: Of training, over all resumed parts.
    """

    output_dir: Path
    model: Any
    tokens_trained: int
    steps: int
    train_loss: float
    records: list[Record]
    seconds: float


def finetune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[torch.Tensor] | Sequence[str],
    config: FinetuneConfig,
    *,
    eval_documents: Sequence[torch.Tensor] | Sequence[str] | None = None,
) -> FinetuneResult:
    """Extend a model, train it on packed documents, measure it before and after, and save it.

    The model is trained in place. Trained weights are float32 meanwhile and end in the dtype they came in.

    Args:
        model: A causal language model; extended by ``config``'s method unless it is extended already.
        tokenizer: Its tokenizer; ends each document with its EOS.
        documents: Texts, or their token ids (int64, 1-D).
        config: The run.
        eval_documents: Held-out texts or ids; None holds out the last twentieth of ``documents``.

    Raises:
        ValueError: The request contradicts the model, or the folder holds another run.
        RuntimeError: Packed documents would see each other (see ``probe_isolation``).
    """
    set_seed(config.seed)
    base_model = str(unwrap(model).config.name_or_path or "")
    _extend(model, config)
    description = describe(model)
    target, original = description["context_length"], description["original_max_position_embeddings"]
    lengths = sorted(set(config.eval_lengths or default_lengths(original, target)))
    train_ids, held_out = _documents(tokenizer, documents, eval_documents, max(lengths), config)
    eos: Any = tokenizer.eos_token_id
    packed = PackedDataset(train_ids, config.seq_len or target, eos_token_id=eos, seed=config.seed)
    log_summary(packed.summary(original), original)

    folder = Path(config.output_dir)
    args = _training_arguments(model, config, autocast=is_half(model) if config.bf16 is None else config.bf16)
    main = args.process_index == 0
    settings = {**config.fixed_settings(), "data": packed.fingerprint(), "base_weights": hash_weights(model)}
    checkpoint = open_run(folder, settings, resume=config.resume, write=main)
    tokens_per_step = _blocks_per_step(args) * packed.seq_len
    _set_steps(args, config, packed, tokens_per_step)
    tokens_trained = args.max_steps * tokens_per_step

    results = folder / RESULTS if main else None
    before = measure(model, tokenizer, held_out, lengths, config, tokens_trained=0, output=results)
    trained = add_lora(model, config.lora_rank, config.lora_alpha) if config.lora else model
    loss_log = LossLog(folder / LOSS_LOG, tokens_per_step, unwrap(model).config.get_text_config().vocab_size)
    _train(trained, args, packed, config, loss_log, checkpoint)
    after = measure(trained, tokenizer, held_out, lengths, config, tokens_trained=tokens_trained, output=results)
    if main:
        card = model_card(description, base_model, tokens_trained, _card_settings(config, packed, args), before, after)
        with base_not_looked_up():
            save_extended(trained, folder, tokenizer, tokens_trained=tokens_trained, base_model=base_model, card=card)
    lines = read_log(folder / LOSS_LOG)
    return FinetuneResult(
        output_dir=folder,
        model=trained,
        tokens_trained=tokens_trained,
        steps=args.max_steps,
        train_loss=math.fsum(line["loss"] for line in lines) / max(len(lines), 1),
        records=before + after,
        seconds=lines[-1]["seconds"] if lines else 0.0,
    )


def _extend(model: PreTrainedModel, config: FinetuneConfig) -> None:
    """Patch the model as asked; take one that is extended already as it is, unless it contradicts the request."""
    there = describe(model)
    if there["method"] == "none":
        patch_model(model, config.method, config.factor, context_length=config.context_length, **config.options)
        return
    asked = {"factor": config.factor, "context_length": config.context_length}
    if any(value is not None for value in asked.values()):
        asked["method"] = config.method  # type: ignore[assignment]
    wrong = {name: value for name, value in asked.items() if value is not None and there[name] != value}
    wrong |= {name: value for name, value in config.options.items() if there["options"].get(name) != value}
    if wrong:
        raise ValueError(
            f"the model is extended already: {there['method']}, factor {there['factor']:g}, {there['context_length']} "
            f"tokens, options {there['options']}; asked for: {', '.join(f'{k} {v}' for k, v in wrong.items())}. "
            "Leave factor, context_length and options out to train it as it is, or unpatch_model(model) first."
        )
    logger.info("training the model as it is extended: %s, factor %g", there["method"], there["factor"])


def _documents(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[torch.Tensor] | Sequence[str],
    eval_documents: Sequence[torch.Tensor] | Sequence[str] | None,
    longest: int,
    config: FinetuneConfig,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return token ids to train on and to measure on."""
    ids = _token_ids(tokenizer, documents)
    if not ids:
        raise ValueError("there are no documents to train on.")
    if config.eval_documents == 0:
        return ids, []
    if eval_documents is not None:
        return ids, _token_ids(tokenizer, eval_documents)
    return hold_out(ids, longest)


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[torch.Tensor] | Sequence[str]
) -> list[torch.Tensor]:
    if isinstance(documents, (str, torch.Tensor)):
        raise TypeError("documents must be a list of texts or of token id tensors; put a single one in a list.")
    return [d if isinstance(d, torch.Tensor) else tokenize_documents(tokenizer, [d])[0] for d in documents]


def _training_arguments(model: PreTrainedModel, config: FinetuneConfig, *, autocast: bool) -> TrainingArguments:
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    on_cpu = unwrap(model).device.type == "cpu"
    values: dict[str, Any] = dict(  # noqa: C408
        output_dir=config.output_dir,
        max_steps=1,  # set when the number of devices is known
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_schedule,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        max_grad_norm=config.max_grad_norm,
        bf16=autocast,
        seed=config.seed,
        save_strategy="steps",
        save_steps=config.save_steps,
        save_total_limit=2,
        logging_strategy="steps",
        logging_steps=config.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        report_to=config.report_to,
        run_name=config.run_name,
        remove_unused_columns=False,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
    )
    values[checkpointing] = config.gradient_checkpointing
    args = TrainingArguments(**values)
    if args.n_gpu > 1:
        logger.warning(
            "one process uses one GPU; start it with `accelerate launch` or torchrun to use all %d", args.n_gpu
        )
        args._n_gpu = 1  # DataParallel copies modules, which the loss in chunks does not survive
    return args


def _set_steps(args: TrainingArguments, config: FinetuneConfig, packed: PackedDataset, tokens_per_step: int) -> None:
    args.max_steps = max(1, config.token_budget // tokens_per_step)
    args.warmup_steps = min(config.warmup_steps, args.max_steps // 5)
    logger.info(
        "%d steps of %d tokens: %d tokens, %.2f passes over the data; warm-up over %d steps",
        args.max_steps,
        tokens_per_step,
        args.max_steps * tokens_per_step,
        args.max_steps * tokens_per_step / (len(packed) * packed.seq_len),
        args.warmup_steps,
    )


def _blocks_per_step(args: TrainingArguments) -> int:
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


class _InOrderTrainer(Trainer):
    """Trainer over a dataset that is already in the order of training."""

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> SequentialSampler:
        dataset: Any = train_dataset if train_dataset is not None else self.train_dataset
        return SequentialSampler(dataset)


def _train(
    model: Any,
    args: TrainingArguments,
    packed: PackedDataset,
    config: FinetuneConfig,
    loss_log: LossLog,
    checkpoint: Path | None,
) -> None:
    schedule = BlockSchedule(packed, args.max_steps * _blocks_per_step(args), config.seed)
    base = unwrap(model)
    use_cache = base.config.use_cache
    autocast = torch.autocast(base.device.type, torch.bfloat16) if args.bf16 else nullcontext()
    began = time.perf_counter()
    try:
        with float32_trained_weights(model), chunked_lm_loss(model, config.logits_chunk):
            with autocast:
                probe_isolation(model, args.train_batch_size)
            trainer = _InOrderTrainer(model=model, args=args, train_dataset=schedule, callbacks=[loss_log])
            with base_not_looked_up():
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    finally:
        base.config.use_cache = use_cache  # Trainer may switch it off for checkpointing
    model.eval()
    logger.info("trained in %.0f s", time.perf_counter() - began)


def _card_settings(config: FinetuneConfig, packed: PackedDataset, args: TrainingArguments) -> dict[str, Any]:
    shown = ("lora", "learning_rate", "lr_schedule", "weight_decay", "seed")
    return {
        "seq_len": packed.seq_len,
        "steps": args.max_steps,
        "tokens_per_step": _blocks_per_step(args) * packed.seq_len,
        **{name: getattr(config, name) for name in shown},
        **({"lora_rank": config.lora_rank, "lora_alpha": config.lora_alpha} if config.lora else {}),
        "warmup_steps": args.warmup_steps,
        "computed in": "bfloat16, float32 weights" if args.bf16 else "float32",
        "data": packed.fingerprint(),
    }
