"""Fine-tune an extended model on a token budget: Trainer does the training, this file prepares and keeps account."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed

from hf_posenc.checkpoint.extended import partial_of, save_checkpoint
from hf_posenc.checkpoint.manifest import RESULTS, read_manifest
from hf_posenc.checkpoint.quantised import keep_layout, refuse_laid_out
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation import Record, perplexity
from hf_posenc.evaluation.lm_head import check_head
from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.evaluation.model_facts import hash_weights
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import is_patched, unpatch_model, unpatched
from hf_posenc.publishing.card import write_card
from hf_posenc.publishing.provenance import document_source, source_settings
from hf_posenc.publishing.repository import Repository
from hf_posenc.publishing.trained_run import TrainedRun, TrainedStage
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.extending import begin, check_with_model
from hf_posenc.training.lora import add_lora, base_not_looked_up, check_trainable, is_adapted
from hf_posenc.training.mixing import MixedDataset, kinds_of_steps
from hf_posenc.training.packing import PackedDataset
from hf_posenc.training.recipes import fit_recipe
from hf_posenc.training.run_file import RUN_FILE, write_run
from hf_posenc.training.run_folder import (
    LOSS_LOG,
    check_not_the_models_own,
    make_repo,
    open_run,
    push,
    read_log,
    saved_bytes,
    says_how_to_go_on,
    writing,
)
from hf_posenc.training.stages import load_finished, original_length, refuse_other_kind, settings_of_stages
from hf_posenc.training.texts import Documents, Texts, prepare_texts, read_stream, to_token_ids
from hf_posenc.training.train_log import LossLog
from hf_posenc.training.trainer import train, training_arguments
from hf_posenc.utils.processes import from_main
from hf_posenc.utils.units import TokenCount

logger = logging.getLogger(__name__)

_LORA_SETTINGS = ("lora_rank", "lora_alpha", "lora_targets", "lora_embeddings")


@dataclass(frozen=True)
class FinetuneResult:
    """What a run gave.

    Attributes:
        output_dir: The trained model, its card, logs and checkpoints.
        model: The trained model, as saved (PEFT-wrapped for LoRA).
        tokens_trained: Tokens the model was fine-tuned on, repeated passes counted, those of earlier runs included.
        steps: Optimizer steps of this run, over all resumed parts.
        train_loss: Mean of the losses of its steps, nats per token.
        records: Perplexities of the model without its extension (``method`` is "none"), where it was the base model;
            then those of the extended model before and after, distinguished by ``tokens_trained``.
        seconds: Of training, over all resumed parts.
    """

    output_dir: Path
    model: Any
    tokens_trained: int
    steps: int
    train_loss: float
    records: list[Record]
    seconds: float


@says_how_to_go_on
def finetune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    config: FinetuneConfig,
    *,
    eval_documents: Documents | None = None,
    tokens_trained: int = 0,
    source: Mapping[str, Any] | None = None,
) -> FinetuneResult:
    """Extend a model, train it on packed documents, measure the base model and the extended one, and save it.

    The model is trained in place. Trained weights are float32 meanwhile and end in the dtype they came in. In a
    distributed run every process calls this; the first one writes the files, and all return the same numbers.

    Args:
        model: A causal language model; extended by ``config``'s method unless it is extended already.
        tokenizer: Its tokenizer; ends each document with its EOS.
        documents: Texts, or their token ids (int64, 1-D), or rows of a dataset with a column ``text``, ``messages``
            (chats, put through the tokenizer's chat template), or ``prompt`` and ``completion``. Config says what of
            them counts in the loss (``assistant_only_loss``, ``completion_only_loss``).
        config: The run.
        eval_documents: Held-out documents; None holds out the last twentieth of ``documents``. They are measured on
            all of their tokens.
        tokens_trained: Tokens the model was fine-tuned on before, as its manifest says; counted on.
        source: More keys for ``run.toml``: where the command line read model and documents from. The model card names
            the documents by it too: ``{"documents": "emozilla/pg19", "split": "train"}``, as ``read_documents`` takes
            them.

    Raises:
        HubAccessError, HubUnreachableError: The repository to push to cannot be made or written to.
        ValueError: The request contradicts the model or its quantised weights, or the folder holds another run or the
            model itself.
        RuntimeError: Packed documents would see each other (see ``probe_isolation``).
    """
    if isinstance(tokens_trained, bool) or not isinstance(tokens_trained, int) or tokens_trained < 0:
        raise InvalidRequestError(f"tokens_trained must be a whole number >= 0, got {tokens_trained!r}.")
    rotary, folder = RotaryModel(model), Path(str(config.output_dir))
    settings = {**config.settings(), **source_settings(documents), **(source or {})}
    check_not_the_models_own(folder, _name(rotary))
    config = fit_recipe(rotary, config)
    check_with_model(rotary, config)
    repository = from_main(lambda: make_repo(config))
    refuse_other_kind(folder, staged=config.stages is not None)
    stages = [config]
    if config.stages is not None:
        stages = settings_of_stages(rotary, config)
        if not isinstance(documents, Sequence):
            # Once, for all stages: each then trains on, and holds out, the same documents.
            longest = dataclasses.replace(
                config, stages=None, token_budget=TokenCount(max(one.token_budget for one in stages))
            )
            holds_out = config.eval_documents > 0 and eval_documents is None
            documents = read_stream(tokenizer, documents, original_length(rotary, config), longest, holds_out)
        # Once too: each stage is checked and trained on the same tokens.
        documents = to_token_ids(tokenizer, documents, config)
        eval_documents = None if eval_documents is None else to_token_ids(tokenizer, eval_documents, None)
    run = _Run(folder, settings, tokenizer, documents, eval_documents, tokens_trained, repository)
    for number, one in enumerate(stages[1:], 2):
        run.check_stage(rotary, one, f"{number} of {len(stages)}")
    trained: Any = model
    for number, one in enumerate(stages, 1):
        if config.stages is not None:
            found = (number, len(stages), one.context_length, one.token_budget)
            logger.info("stage %d of %d: %d tokens, trained on %d", *found)
        if number > 1 and is_patched(trained):
            unpatch_model(trained)
        trained = run.train(trained, one, saved_to=folder if one is stages[-1] else Path(one.output_dir))
    if repository is not None:
        from_main(lambda: push(config, repository))
    return run.result(trained)


def _name(rotary: RotaryModel) -> str:
    return str(rotary.model.config.name_or_path or "")


class _Run:
    """One call of ``finetune``: what its stages share, and what they have given so far.

    Args:
        folder: Gets ``results.jsonl``, ``run.toml`` and the trained model.
        settings: What ``run.toml`` says.
        tokenizer, documents, eval_documents, tokens_trained: As for ``finetune``.
        repository: What the trained model is pushed to; None for nothing.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        documents: Documents,
        eval_documents: Documents | None,
        tokens_trained: int,
        repository: Repository | None,
    ) -> None:
        self.folder, self.settings = folder, settings
        self.tokenizer, self.documents, self.eval_documents = tokenizer, documents, eval_documents
        self.tokens_trained, self.repository = tokens_trained, repository
        self.unextended: list[Record] = []
        self.before: list[Record] = []
        self.after: list[Record] = []
        self.stages: list[TrainedStage] = []
        self.losses: list[float] = []  # the mean of each stage
        self.seconds: list[float] = []

    def result(self, model: Any) -> FinetuneResult:
        """Return what all stages gave together."""
        steps = sum(stage.steps for stage in self.stages)
        weighted = math.fsum(loss * stage.steps for loss, stage in zip(self.losses, self.stages, strict=True))
        return FinetuneResult(
            output_dir=self.folder,
            model=model,
            tokens_trained=self.tokens_trained,
            steps=steps,
            train_loss=self.losses[0] if len(self.losses) == 1 else weighted / steps,
            records=self.unextended + self.before + self.after,
            seconds=sum(self.seconds),
        )

    def check_stage(self, rotary: RotaryModel, config: FinetuneConfig, which: str) -> None:
        """Raise what a later stage would raise when it begins, before the first one trains.

        The model is left as it came, or without an extension of ours.
        """
        logger.info("checking stage %s: %d tokens", which, config.context_length)
        try:
            self._prepare(rotary, config)
        except ValueError as error:
            raise InvalidRequestError(
                f"stages: the stage of {config.context_length} tokens cannot be trained: {error}"
            ) from error
        finally:
            if is_patched(rotary.model):
                unpatch_model(rotary.model)

    def _prepare(self, rotary: RotaryModel, config: FinetuneConfig) -> tuple[dict[str, Any], Texts]:
        """Extend the model and make blocks of the texts; whatever does not go together is refused here."""
        description, positions = begin(rotary, config)
        with evaluation_mode(rotary.model):
            check_head(rotary.model)
        texts = prepare_texts(rotary, self.tokenizer, self.documents, self.eval_documents, config, positions)
        return description, texts

    def train(self, model: Any, config: FinetuneConfig, saved_to: Path) -> Any:
        """Do one run, or one stage of one, and save its model; nothing is trained where it was already.

        Args:
            model: Trained by the stages before.
            config: The stage; its ``output_dir`` gets logs and checkpoints.
            saved_to: Gets the trained model and its card.

        Returns:
            The trained model, PEFT-wrapped for LoRA.
        """
        rotary, folder = RotaryModel(model), Path(str(config.output_dir))
        base_model = _name(rotary)
        check_trainable(model, config.lora and not self.stages)
        refuse_laid_out(model, "the model cannot be fine-tuned")
        keep_layout(model)  # checkpoints are written between forwards
        set_seed(config.seed)
        description, texts = self._prepare(rotary, config)
        args = training_arguments(model, config, texts.packed)
        if args.world_size > 1 and getattr(rotary.model, "hf_device_map", None) is None:
            model.to(args.device)  # every process to its own GPU, before the first forward

        per_step = config.tokens_per_step(texts.packed.seq_len)
        decides = {
            **config.fixed_settings(),
            "data": texts.packed.fingerprint(),
            "tokens_trained_before": self.tokens_trained,
            "base_weights": hash_weights(model),
            "tokens_per_step": per_step,
        }
        checkpoint = from_main(lambda: open_run(folder, decides, resume=config.resumes, named=config.named_checkpoint))
        from_main(lambda: write_run(self.folder / RUN_FILE, self.settings))
        if not self.stages:
            self.unextended = self._measure_unextended(model, texts, config, args)
            self.before = self._measure(model, texts, config, args)
        trained = add_lora(model, config) if config.lora and not is_adapted(model) else model
        kinds = kinds_of_steps(texts.packed.shares, args.max_steps) if isinstance(texts.packed, MixedDataset) else None
        loss_log = LossLog(folder / LOSS_LOG, per_step, self.tokens_trained, kinds)
        this_stage = TrainedStage(description["context_length"], args.max_steps, args.max_steps * per_step)
        total = self.tokens_trained + this_stage.tokens

        def is_finished() -> bool:
            manifest = read_manifest(saved_to)
            return manifest is not None and manifest["tokens_trained"] == total and bool(read_log(loss_log.path))

        finished = folder != self.folder and config.resumes and from_main(is_finished)
        if finished:
            load_finished(trained, saved_to)
        else:
            known = min((math.log(record.perplexity) for record in self.before), default=None)
            train(trained, args, texts.packed, config, loss_log, checkpoint, base_model, self.tokens_trained, known)
        self.stages.append(this_stage)
        self.tokens_trained = total
        after = self._measure(trained, texts, config, args)
        self.after += after

        def save() -> list[dict[str, Any]]:
            run = TrainedRun(
                document_source(self.settings),
                held_out=self.eval_documents is None,
                settings=_what_was_read(self.settings, texts.packed)
                | _card_settings(config, texts.packed, args)
                | _tokens_of_kinds(read_log(loss_log.path), per_step, config),
                stages=list(self.stages),
                lengths=texts.lengths,
                unextended=self.unextended,
                before=self.before,
                after=after,
            )
            pushed = self.repository if saved_to == self.folder else None  # earlier stages stay here
            with base_not_looked_up():
                save_checkpoint(
                    trained,
                    saved_to,
                    self.tokenizer,
                    tokens_trained=total,
                    base_model=base_model,
                    finish=lambda written: write_card(trained, written, saved_to, repository=pushed, run=run),
                )
            return read_log(loss_log.path)

        with writing("the trained model", saved_to, saved_bytes(trained), leftovers=partial_of(saved_to)):
            lines = from_main((lambda: read_log(loss_log.path)) if finished else save)
        self.losses.append(math.fsum(line["loss"] for line in lines) / max(len(lines), 1))
        self.seconds.append(lines[-1]["seconds"] if lines else 0.0)
        return trained

    def _measure_unextended(
        self, model: Any, texts: Texts, config: FinetuneConfig, args: TrainingArguments
    ) -> list[Record]:
        """Measure the model as it is without its extension; nothing where that is not the base model any more."""
        if config.eval_documents == 0 or self.tokens_trained or not is_patched(model):
            return []
        devices = [args.device] if args.device.type == "cuda" else []
        with torch.random.fork_rng(devices), unpatched(model):  # what it is trained to must not depend on this
            return self._measure(model, texts, config, args)

    def _measure(self, model: Any, texts: Texts, config: FinetuneConfig, args: TrainingArguments) -> list[Record]:
        """Measure perplexity at the lengths that a held-out text reaches, and append it to the results.

        Texts are cut in pieces of the longest length, so that short lengths are scored on many texts too. Every process
        measures, so that none waits for another; the first writes the records and shows progress.
        """
        if config.eval_documents == 0:
            return []
        longest = max((len(document) for document in texts.held_out), default=0)
        reached = [length for length in texts.lengths if length <= longest]
        if len(reached) < len(texts.lengths):
            logger.warning(
                "the longest held-out text has %d tokens, so perplexity at %s is not measured. Pass longer "
                "eval_documents.",
                longest,
                ", ".join(str(length) for length in texts.lengths if length > longest),
            )
        if not reached:
            return []
        main = args.process_index == 0
        return perplexity(
            model,
            [document for document in texts.held_out if len(document) >= max(reached)],
            reached,
            tokenizer=self.tokenizer,
            cut=True,
            max_documents=config.eval_documents,
            logits_chunk=config.logits_chunk,
            output=self.folder / RESULTS if main else None,
            tokens_trained=self.tokens_trained,
            progress=main,
        )


def _what_was_read(settings: Mapping[str, Any], packed: PackedDataset) -> dict[str, Any]:
    """Return which columns of the documents were read, and what of their tokens counted, where that is not all."""
    columns = settings.get("text_field") or ()
    columns = [columns] if isinstance(columns, str) else columns
    counted = 100 * packed.counted.double().mean().item()
    read: dict[str, Any] = {}
    if columns:
        read["columns"] = ", ".join(f"`{name}`" for name in columns)
    if settings.get("template"):
        read["template"] = f"`{settings['template']!r}`"
    if counted < 100:
        read["counted in the loss"] = f"answers or turns of the assistant, {counted:.1f} % of the tokens"
    return read


def _tokens_of_kinds(lines: Sequence[Mapping[str, Any]], per_step: int, config: FinetuneConfig) -> dict[str, Any]:
    """Return of each kind of data in a mixture the tokens that were read, and those that counted in the loss."""
    found: dict[str, Any] = {}
    for word in config.task_mix or ():
        name, _, share = word.partition("=")
        counted = [line["tokens_in_loss"] for line in lines if line["kind"] == name]
        read = len(counted) * per_step
        steps = f"{len(counted)} steps, {read:,} tokens, {sum(counted):,} of them counted in the loss"
        found[f"task_mix, {name}"] = f"{share} of the tokens: {steps}"
    return found


def _card_settings(config: FinetuneConfig, packed: PackedDataset, args: TrainingArguments) -> dict[str, Any]:
    usual, group = config.defaults(), config.group(packed.seq_len)
    positions = ("position_schedule", "pose_chunks", "short_share", "length_upsampling")
    unusual = [
        name
        for name in (*positions, "assistant_only_loss", "completion_only_loss")
        if getattr(config, name) != usual[name]
    ]
    shown = ("lora", "learning_rate", "lr_scheduler_type", "weight_decay", "seed")
    return {
        **({"recipe": config.recipe} if config.recipe is not None else {}),
        "seq_len": packed.seq_len,
        "steps": args.max_steps,
        "tokens_per_step": config.tokens_per_step(packed.seq_len),
        **{name: getattr(config, name) for name in (*unusual, *shown, *(_LORA_SETTINGS if config.lora else ()))},
        **({"shifted sparse attention while training, tokens of a group": group} if group is not None else {}),
        "warmup_steps": args.warmup_steps,
        "computed in": "bfloat16, float32 weights" if args.bf16 else "float32",
        "data": packed.fingerprint(),
    }
