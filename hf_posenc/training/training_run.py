"""A fine-tuning run: prepared, trained and saved as its plan says; Trainer does the training."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed

from hf_posenc.checkpoint.extended import UNFINISHED, save_checkpoint
from hf_posenc.checkpoint.manifest import RESULTS, read_manifest
from hf_posenc.checkpoint.pretrained import load_weights
from hf_posenc.checkpoint.quantised import keep_layout, refuse_laid_out
from hf_posenc.data.packing import PackedDocuments
from hf_posenc.data.retained_texts import RetainedTexts
from hf_posenc.data.tokens import Tokens, ids_of
from hf_posenc.errors import HfPosencError, InvalidRequestError
from hf_posenc.evaluation import Record, perplexity
from hf_posenc.evaluation.lm_head import check_head
from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.evaluation.model_facts import hash_weights
from hf_posenc.evaluation.records import RetrievalRecord
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.mixtures import get_kind
from hf_posenc.patching.api import is_patched, unpatch_model, unpatched
from hf_posenc.publishing.card import write_card
from hf_posenc.publishing.provenance import document_source, source_settings
from hf_posenc.publishing.repository import Repository, make_repository
from hf_posenc.publishing.trained_run import TrainedRun, TrainedStage
from hf_posenc.retrieving.measuring_retrieval import check_prompts, retrieval
from hf_posenc.training.answers import ANSWERS, table
from hf_posenc.training.base_model_facts import ModelFacts
from hf_posenc.training.blending import SHORT_TEXTS, Blend, RetentionLimit, short_texts
from hf_posenc.training.blocks import TrainingBlocks
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.data import Documents, Texts, make_blocks, read_texts
from hf_posenc.training.extending import check_extended, extend
from hf_posenc.training.launch import Launch
from hf_posenc.training.lora import (
    add_lora,
    attention_linears,
    base_not_looked_up,
    begin_from_adapter,
    check_trainable,
    is_adapted,
    without_adapters,
)
from hf_posenc.training.retaining import long_retained_texts, retained_texts
from hf_posenc.training.run_file import RUN_FILE, write_run
from hf_posenc.training.run_folder import LOSS_LOG, PARTIAL, open_run, read_log, resumable
from hf_posenc.training.run_plan import RunPlan, StagePlan, naming_stage, plan_run
from hf_posenc.training.train_log import LossLog
from hf_posenc.training.trainer import meet_processes, train, training_arguments
from hf_posenc.training.weights import trained_alone
from hf_posenc.utils.processes import from_main
from hf_posenc.utils.warning import warn_user

logger = logging.getLogger(__name__)

# Checkpoints and stages of the run, whole or not, and names that begin with "_", as Trainer leaves them out.
_NOT_PUSHED = ["checkpoint-*", f"{PARTIAL}/*", f"{UNFINISHED}/*", "stage-*", "_*"]


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a run.

    Attributes:
        output_dir: The trained model, its card, logs and checkpoints.
        model: The trained model, as saved (PEFT-wrapped for LoRA).
        tokens_trained: Tokens the model was fine-tuned on, repeated passes counted, those of earlier runs included.
        steps: Optimizer steps of this run, over all resumed parts.
        train_loss: Mean of the losses of its steps, nats per token.
        records: Perplexities of the model without its extension (``method`` is "none"), where it was the base model;
            then those of the extended model before and after, distinguished by ``tokens_trained``.
        seconds: Seconds of training, over all resumed parts.
        blend: How much of the training was kept, and its cost on short texts; None where ``keep`` was not given, or an
            earlier part of the run had finished.
        answers: Records of ``eval_tasks``, before and after, distinguished by ``tokens_trained``.
    """

    output_dir: Path
    model: Any
    tokens_trained: int
    steps: int
    train_loss: float
    records: list[Record]
    seconds: float
    blend: Blend | None = None
    answers: list[RetrievalRecord] = field(default_factory=list)


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
        tokenizer: Its tokenizer; ends each document with its EOS, and begins it with its BOS if it puts one before a
            text by itself.
        documents: Texts, or their token ids (int64, 1-D), or rows of a dataset with a column ``text``, ``messages``
            (chats, put through the tokenizer's chat template), or ``prompt`` and ``completion``. Config says what of
            them counts in the loss (``assistant_only_loss``, ``completion_only_loss``).
        config: The run.
        eval_documents: Held-out documents; None holds out the last twentieth of ``documents``. They are measured on
            all of their tokens.
        tokens_trained: Tokens the model was fine-tuned on before, as its manifest says; counted on.
        source: More keys for ``run.toml``: where the command line read model and documents from. The model card names
            the documents by it too: ``{"documents": "emozilla/pg19", "split": "train"}``, as
            ``DocumentStream`` takes them.

    Raises:
        HubAccessError, HubUnreachableError: The repository to push to cannot be made or written to.
        ValueError: The request contradicts the model or its quantised weights, or the folder holds another run or the
            model itself.
        RuntimeError: Packed documents would see each other (see ``probe_isolation``).
    """
    source = {**source_settings(documents), **(source or {})}
    facts = ModelFacts.of(RotaryModel(model))
    if facts.device == "cpu" and torch.cuda.is_available() and not config.use_cpu:
        warn_user(
            "the model is on the CPU, so it is trained there, and this machine has a GPU. Call model.to('cuda') first, "
            "or set use_cpu=True."
        )
    plan = plan_run(config, facts, Launch.from_environment(), source)
    meet_processes(plan.stages[0].trainer)
    run = Run(
        plan,
        model,
        tokenizer,
        tokens_trained,
        repository=from_main(lambda: make_repository(**plan.hub) if plan.hub else None),
    )
    return run.do(documents, eval_documents)


class Run:
    """A run in progress: what its stages share, and what they have given so far.

    Args:
        plan: Everything that is decided.
        model: What is trained, in place.
        tokenizer: The model's.
        tokens_trained: Tokens the model was fine-tuned on before.
        is_base: Its weights are those of the base model, but for an adapter; None: if it is one, or not fine-tuned.
        repository: What the trained model is pushed to; None for nothing. Only that of the first process is used.

    Attributes:
        model: What is trained; PEFT-wrapped once adapters are added.
    """

    def __init__(
        self,
        plan: RunPlan,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tokens_trained: int = 0,
        *,
        is_base: bool | None = None,
        repository: Repository | None = None,
    ) -> None:
        if isinstance(tokens_trained, bool) or not isinstance(tokens_trained, int) or tokens_trained < 0:
            raise InvalidRequestError(f"tokens_trained must be a whole number >= 0, got {tokens_trained!r}.")
        self.plan, self.model, self.tokenizer, self.tokens_trained = plan, model, tokenizer, tokens_trained
        self._tokens_before = tokens_trained
        self._is_base = (is_adapted(model) or not tokens_trained) if is_base is None else is_base
        self._repository = repository
        self._stages: list[TrainedStage] = []
        self._unextended: list[Record] = []
        self._before: list[Record] = []
        self._after: list[Record] = []
        self._answers: list[list[RetrievalRecord]] = []  # before the training, and after each stage
        self._logs: list[list[dict[str, Any]]] = []  # of each stage
        self._short_texts: RetentionLimit | None = None
        self._blend: Blend | None = None

    def do(self, documents: Documents, eval_documents: Documents | None = None) -> FinetuneResult:
        """Prepare the run, train and save every stage, and return the result; arguments as for ``finetune``."""
        with resumable(self.plan.folder):
            meet_processes(self.plan.stages[0].trainer)
            self.prepare(documents, eval_documents)
            for stage in self.plan.stages:
                is_new = self.train(stage)
                self.save(stage, is_new=is_new)
            return self.finish()

    def prepare(self, documents: Documents, eval_documents: Documents | None = None) -> None:
        """Read the texts, and check every stage on the model, before the first one is trained.

        The model is left as the first stage extends it.

        Args:
            documents, eval_documents: As for ``finetune``.
        """
        plan, rotary = self.plan, RotaryModel(self.model)
        _refuse_other_kind_of_run(plan)
        self._begins_from_adapter = check_trainable(self.model, plan.step.lora)
        if plan.step.trainable == "attention":
            attention_linears(self.model)  # or an error, before anything is written
        refuse_laid_out(self.model, "the model cannot be fine-tuned")
        keep_layout(self.model)  # checkpoints are written between forwards
        self._held_out = eval_documents is None
        was_patched = is_patched(rotary)
        self._adapter_is_extension = was_patched and is_adapted(self.model)
        try:
            self._prepare_stages(rotary, documents, eval_documents)
        except HfPosencError:
            if not was_patched and is_patched(rotary):
                unpatch_model(self.model)
            raise

    def _prepare_stages(self, rotary: RotaryModel, documents: Documents, eval_documents: Documents | None) -> None:
        plan, vocab_size = self.plan, rotary.text_config.vocab_size
        texts: Texts | None = None
        blocks: list[TrainingBlocks] = []
        for stage in reversed(plan.stages):
            set_seed(stage.seed)
            extend(rotary, stage.extension)
            check_extended(rotary, adapters=plan.step.lora is not None or is_adapted(self.model), group=stage.group)
            with evaluation_mode(rotary.model):
                check_head(rotary.model)
            if texts is None:
                if plan.data.eval_tasks:
                    check_prompts(
                        self.tokenizer, plan.data.eval_tasks, plan.data.task_lengths, plan.data.eval_questions
                    )
                texts = read_texts(self.tokenizer, documents, eval_documents, plan.data, vocab_size)
                self._texts, short_retained = texts.held_out, self._retained_texts(rotary, texts.train)
                if plan.keep is not None:
                    given = self._texts, plan.data.original_length, plan.stages[0].seed
                    with self._before_extension():
                        kinds = short_texts(rotary.model, self.tokenizer, *given)
                    self._short_texts = RetentionLimit(kinds, plan.keep)
            with naming_stage(stage.positions.target_length if len(plan.stages) > 1 else None):
                retained = dict(short_retained)
                blocks.insert(0, make_blocks(self.tokenizer, texts, plan.data, stage, vocab_size, retained))
                retained |= self._long_retained_texts(rotary, blocks[0].packed, stage)
        self._blocks = blocks

    def _retaining(self, *, short: bool) -> dict[str, float]:
        """Return the kinds of data that retain predictions on short or on long texts, with their shares."""
        return {
            name: share
            for name, share in (self.plan.data.task_mix or {}).items()
            if get_kind(name).needs_retained_texts and get_kind(name).is_short == short
        }

    def _retained_texts(self, rotary: RotaryModel, documents: Sequence[Tokens]) -> dict[str, RetainedTexts]:
        """Return what the model predicts without its extension, or with it where it was trained with that."""
        plan, shares = self.plan, self._retaining(short=True)
        if not shares:
            return {}
        num_tokens = math.ceil(max(shares.values()) * sum(stage.num_tokens for stage in plan.stages))
        length = min(plan.data.original_length, *(stage.seq_len for stage in plan.stages))
        # As the training computes: twice as fast, where bfloat16 is native.
        with self._before_extension(), plan.step.autocast(rotary.device.type):
            given = num_tokens, length, plan.stages[0].seed, [ids_of(document) for document in documents]
            return dict.fromkeys(shares, retained_texts(rotary.model, self.tokenizer, *given))

    def _long_retained_texts(
        self, rotary: RotaryModel, packed: PackedDocuments, stage: StagePlan
    ) -> dict[str, RetainedTexts]:
        """Return what the model, as it is extended for a stage, predicts before its training."""
        shares = self._retaining(short=False)
        with self.plan.step.autocast(rotary.device.type):
            return {
                name: long_retained_texts(rotary.model, math.ceil(share * stage.num_tokens), packed, stage.positions)
                for name, share in shares.items()
            }

    @contextmanager
    def _before_extension(self) -> Iterator[int]:
        """While open, the model is what is to be retained: the base model, where it is that but for its extension.

        Yields:
            The tokens that it was trained on.
        """
        with ExitStack() as stack:
            if self._is_extended_base():
                stack.enter_context(unpatched(self.model))
                if self._adapter_is_extension:
                    stack.enter_context(without_adapters(self.model))
                yield 0
            else:
                yield self.tokens_trained

    def _is_extended_base(self) -> bool:
        """Return whether the model is the base model but for its extension, which can be taken out.

        An adapter that a model came with, and with an extension, is part of that: it is used with it alone.
        """
        return self._is_base and is_patched(self.model)

    def train(self, stage: StagePlan) -> bool:
        """Train the model to the length of a stage.

        Args:
            stage: The next one of the plan; those before it are trained and saved.

        Returns:
            Whether it was trained; not where an earlier part of the run had finished the stage.
        """
        plan, blocks = self.plan, self._blocks[len(self._stages)]
        if len(plan.stages) > 1:
            length = stage.positions.target_length
            logger.info("stage %d of %d: %d tokens", len(self._stages) + 1, len(plan.stages), length)
        if self._stages:
            set_seed(stage.seed)
            extend(RotaryModel(self.model), stage.extension)
        args = training_arguments(stage.trainer)
        self._is_main, self._are_several = args.process_index == 0, args.world_size > 1
        if args.world_size > 1 and getattr(RotaryModel(self.model).model, "hf_device_map", None) is None:
            model: Any = self.model
            model.to(args.device)  # every process to its own GPU, before the first forward
        self._log_steps(stage, blocks)
        decides = {
            **stage.fixed,
            "data": blocks.fingerprint(),
            "tokens_trained_before": self.tokens_trained,
            "base_weights": hash_weights(RotaryModel(self.model).model),
            "tokens_per_step": stage.tokens_per_step,
        }
        checkpoint = from_main(lambda: open_run(stage.folder, decides, resume=plan.resumes, named=plan.checkpoint))
        from_main(lambda: write_run(plan.folder / RUN_FILE, plan.settings))
        if not self._stages:
            self._unextended = self._measure_unextended(args)
            self._before = self._measure(self.tokens_trained)
            self._answers.append(self._ask())
            if self._short_texts is not None:
                with self._same_random_numbers(args):
                    facts = {"tokens_trained": self.tokens_trained, **self._to(SHORT_TEXTS)}
                    self._short_texts.begin(self.model, self._before_extension(), **facts)
            if self._begins_from_adapter:
                self.model = begin_from_adapter(self.model, plan.step.lora)
        if plan.step.lora is not None and not is_adapted(self.model):
            self.model = add_lora(self.model, plan.step.lora)
        total = self.tokens_trained + stage.num_tokens
        finished = plan.resumes and stage.folder != plan.folder and from_main(lambda: _is_finished(stage, total))
        with trained_alone(self.model, plan.step.trainable):
            if self._short_texts is not None and not self._stages:
                self._short_texts.remember(self.model)
            if finished:
                _load_finished(self.model, stage.saved_to)
            else:
                log = LossLog(stage.folder / LOSS_LOG, stage.tokens_per_step, self.tokens_trained, blocks.kinds)
                train(self.model, args, blocks, plan, stage, log, checkpoint, self.tokens_trained)
                if self._short_texts is not None:
                    self._blend = self._short_texts.blend(
                        self.model,
                        trained_before=self._tokens_before if self._stages else None,
                        tokens_trained=total,
                        **self._to(SHORT_TEXTS),
                    )
        self._stages.append(TrainedStage(stage.positions.target_length, stage.max_steps, stage.num_tokens))
        self.tokens_trained = total
        return not finished

    def save(self, stage: StagePlan, *, is_new: bool) -> None:
        """Measure the model after a stage, and save it with its card.

        Args:
            stage: That was trained last.
            is_new: It was trained now; a model that an earlier part of the run saved is kept.
        """
        after = self._measure(self.tokens_trained)
        self._after += after
        self._answers.append(self._ask())
        log = from_main(lambda: read_log(stage.folder / LOSS_LOG))
        self._logs.append(log)
        if is_new:
            from_main(lambda: self._save(stage, after, log))

    def finish(self) -> FinetuneResult:
        """Push the trained model, if that was requested, and return what all stages gave together."""
        from_main(self._push)
        steps = sum(stage.steps for stage in self._stages)
        means = [math.fsum(line["loss"] for line in log) / max(len(log), 1) for log in self._logs]
        weighted = math.fsum(mean * stage.steps for mean, stage in zip(means, self._stages, strict=True))
        return FinetuneResult(
            output_dir=self.plan.folder,
            model=self.model,
            tokens_trained=self.tokens_trained,
            steps=steps,
            train_loss=means[0] if len(means) == 1 else weighted / steps,
            records=self._unextended + self._before + self._after,
            seconds=sum(log[-1]["seconds"] for log in self._logs if log),
            blend=self._blend,
            answers=[record for asked in self._answers for record in asked],
        )

    def _push(self) -> None:
        if self._repository is not None:
            self._repository.upload(self.plan.folder, "Model trained by hf_posenc", leave_out=_NOT_PUSHED)

    def _log_steps(self, stage: StagePlan, blocks: TrainingBlocks) -> None:
        passes = stage.num_blocks / len(blocks.packed)
        logger.info(
            "%d steps of %d tokens: %d tokens%s; warm-up over %d steps",
            stage.max_steps,
            stage.tokens_per_step,
            stage.num_tokens,
            f", {passes:.2f} passes over the data" if blocks.kinds is None else "",
            stage.trainer["warmup_steps"],
        )
        blocks.log_summary(wants_distances=stage.wants_distances, group=stage.group)

    def _save(self, stage: StagePlan, after: Sequence[Record], log: Sequence[Mapping[str, Any]]) -> None:
        plan, blocks = self.plan, self._blocks[len(self._stages) - 1]
        run = TrainedRun(
            document_source(plan.settings),
            held_out=self._held_out,
            settings=_what_was_read(plan.settings, blocks)
            | dict(stage.shown)
            | {"data": blocks.fingerprint()}
            | _tokens_of_kinds(log, stage.tokens_per_step, plan.data.task_mix or {}),
            stages=list(self._stages),
            lengths=plan.data.eval_lengths,
            unextended=self._unextended,
            before=self._before,
            after=after,
            answers=table(self._answers[0], self._answers[-1]),
            short_texts=() if self._blend is None else self._blend.rows(),
            kept="" if self._blend is None else str(self._blend),
        )
        hub = self._repository if stage.saved_to == plan.folder else None  # earlier stages stay here
        with base_not_looked_up():
            save_checkpoint(
                self.model,
                stage.saved_to,
                self.tokenizer,
                tokens_trained=self.tokens_trained,
                base_model=plan.base_model,
                finish=lambda written: write_card(self.model, written, stage.saved_to, repository=hub, run=run),
            )

    def _ask(self) -> list[RetrievalRecord]:
        """Ask the questions of the plan, and append the answers to the results; the processes share them."""
        data = self.plan.data
        if not data.eval_tasks:
            return []
        return retrieval(
            self.model,
            self.tokenizer,
            data.eval_tasks,
            data.task_lengths,
            questions=data.eval_questions,
            tokens_trained=self.tokens_trained,
            **self._to(ANSWERS),
        )

    def _measure_unextended(self, args: TrainingArguments) -> list[Record]:
        """Measure the model as it is without its extension; nothing where that is not the base model any more."""
        if self.plan.data.eval_documents == 0 or not self._is_extended_base():
            return []
        with self._same_random_numbers(args), self._before_extension() as tokens_trained:
            return self._measure(tokens_trained)

    def _same_random_numbers(self, args: TrainingArguments) -> AbstractContextManager[Any]:
        """Return a context manager, after which random numbers are as before, so that the training depends on none."""
        return torch.random.fork_rng([args.device] if args.device.type == "cuda" else [])

    def _to(self, name: str) -> dict[str, Any]:
        """Return where a measurement's records go, whether its progress is shown, and whether processes share it."""
        output = self.plan.folder / name if self._is_main else None  # only the first writes
        return {"output": output, "progress": self._is_main, "sharded": self._are_several}

    def _measure(self, tokens_trained: int) -> list[Record]:
        """Measure perplexity at the lengths that a held-out text reaches, and append it to the results.

        Texts are cut in pieces of the longest length, so that short lengths are scored on many texts too. The processes
        share them; the first writes the records and shows progress.
        """
        data, texts = self.plan.data, self._texts
        if data.eval_documents == 0:
            return []
        longest = max((len(document) for document in texts), default=0)
        reached = [length for length in data.eval_lengths if length <= longest]
        if len(reached) < len(data.eval_lengths):
            logger.warning(
                "the longest held-out text has %d tokens, so perplexity at %s is not measured. Pass longer "
                "eval_documents.",
                longest,
                ", ".join(str(length) for length in data.eval_lengths if length > longest),
            )
        if not reached:
            return []
        return perplexity(
            self.model,
            [document for document in texts if len(document) >= max(reached)],
            reached,
            tokenizer=self.tokenizer,
            cut=True,
            max_documents=data.eval_documents,
            logits_chunk=self.plan.step.logits_chunk,
            tokens_trained=tokens_trained,
            **self._to(RESULTS),
        )


def _refuse_other_kind_of_run(plan: RunPlan) -> None:
    """Refuse to put a run in stages into the folder of one without, and the other way round."""
    folder = plan.folder
    if plan.stages[0].folder != folder and read_log(folder / LOSS_LOG):
        raise InvalidRequestError(f"{folder} holds a run without stages. Choose another output_dir.")
    logs = sorted(folder.glob(f"stage-*/{LOSS_LOG}"))
    if plan.stages[0].folder == folder and logs:
        raise InvalidRequestError(
            f"{folder} holds a run in stages ({logs[0].parent.name}, ...). Give the same stages and "
            "resume_from_checkpoint=True (--resume-from-checkpoint) to continue it, or another output_dir."
        )


def _is_finished(stage: StagePlan, tokens_trained: int) -> bool:
    manifest = read_manifest(stage.saved_to)
    return (
        manifest is not None
        and manifest["tokens_trained"] == tokens_trained
        and bool(read_log(stage.folder / LOSS_LOG))
    )


def _load_finished(model: Any, folder: Path) -> None:
    """Put the weights that a finished stage saved into the model as it was before that stage, in place."""
    if is_adapted(model):
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    else:
        model.load_state_dict(load_weights(folder, dtype="auto").state_dict())
    logger.info("%s holds this stage, finished: it is not trained again", folder)


def _what_was_read(settings: Mapping[str, Any], blocks: TrainingBlocks) -> dict[str, Any]:
    """Return the columns of the documents that were read, and which tokens counted, where not all did."""
    columns = settings.get("text_field") or ()
    columns = [columns] if isinstance(columns, str) else columns
    counted = 100 * blocks.packed.counted.double().mean().item()
    read: dict[str, Any] = {}
    if columns:
        read["columns"] = ", ".join(f"`{name}`" for name in columns)
    if settings.get("template"):
        read["template"] = f"`{settings['template']!r}`"
    if counted < 100:
        read["counted in the loss"] = f"answers or turns of the assistant, {counted:.1f} % of the tokens"
    return read


def _tokens_of_kinds(
    lines: Sequence[Mapping[str, Any]], tokens_per_step: int, shares: Mapping[str, float]
) -> dict[str, Any]:
    """Return of each kind of data in a mixture the tokens that were read, and those that counted in the loss."""
    read: dict[str, Any] = {}
    for name, share in shares.items():
        counted = [line["tokens_in_loss"] for line in lines if line["kind"] == name]
        num_tokens = len(counted) * tokens_per_step
        steps = f"{len(counted)} steps, {num_tokens:,} tokens, {sum(counted):,} of them counted in the loss"
        read[f"task_mix, {name}"] = f"{share} of the tokens: {steps}"
    return read
