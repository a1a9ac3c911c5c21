"""Perplexity by context length while Trainer trains: a metric to watch, to keep the best model by, to stop by."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object  # type: ignore[import-untyped]  # accelerate ships no types
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation import Record, perplexity
from hf_posenc.evaluation.config import EvalConfig
from hf_posenc.evaluation.documents import Document, choose_texts, settle_bos, to_token_ids
from hf_posenc.evaluation.effective_length import CURVE_PROTOCOLS
from hf_posenc.evaluation.model_facts import hash_weights
from hf_posenc.families.rotary_model import RotaryModel

logger = logging.getLogger(__name__)


class PerplexityCallback(TrainerCallback):
    """Measure perplexity at several context lengths whenever Trainer, or TRL's trainers, evaluate.

    ``trainer.add_callback(PerplexityCallback(trainer, documents, [2048, 8192]))`` gives the metrics
    ``eval_perplexity_2048`` and ``eval_perplexity_8192``: in what ``trainer.evaluate()`` returns, in the log and the
    trackers, and for ``metric_for_best_model`` and early stopping (with ``greater_is_better=False``). The numbers are
    those of ``hf_posenc.perplexity``, which never holds a document's logits as ``compute_metrics`` would need them;
    under mixed precision the model runs in autocast, as in Trainer's own evaluation. Training goes on as if nothing had
    been measured, to the bit. The processes of a distributed run (DDP) share the documents, and get the same numbers.

    Args:
        trainer: The trainer; the callback logs through it.
        documents: Held-out texts, or rows of token ids. Those that reach the longest length are measured.
        context_lengths: Tokens fed at a time.
        tokenizer: None takes the trainer's ``processing_class``.
        protocol: ``truncated``, ``last_k`` or ``sliding_window``, as for ``perplexity``.
        seed: Seed of the bootstrap intervals.
        **settings: The other fields of ``EvalConfig``, such as ``stride``, ``last_k``, ``max_documents`` and ``cut``.

    Attributes:
        records: The last measurement, each number with how it was measured; ``label`` has the step, and
            ``tokens_trained`` what Trainer counted (``include_num_input_tokens_seen``), else 0.

    Raises:
        TypeError: A setting that is not ``perplexity``'s.
        ValueError: No document is long enough, a length or setting that cannot be, or a model that FSDP or ZeRO-3
            holds in shards.
    """

    def __init__(
        self,
        trainer: Trainer,
        documents: Sequence[Document],
        context_lengths: Sequence[int],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        protocol: str = "truncated",
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if protocol not in CURVE_PROTOCOLS:
            raise InvalidRequestError(f"protocol must be one of {', '.join(CURVE_PROTOCOLS)}, got {protocol!r}.")
        if trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
            raise InvalidRequestError(
                "PerplexityCallback needs the whole model in every process, which FSDP and ZeRO-3 do not leave there. "
                "Train with DDP (--accelerate-config multi_gpu), or measure saved checkpoints: hf-posenc eval FOLDER."
            )
        self.trainer, self.seed = trainer, seed
        self.config = EvalConfig.of(context_lengths, protocol, **settings)
        given = tokenizer if tokenizer is not None else trainer.processing_class
        self.tokenizer = given if isinstance(given, PreTrainedTokenizerBase) else None  # a processor cannot cut texts
        self.text_config = RotaryModel(trainer.model).text_config
        self.documents = to_token_ids(documents, self.tokenizer, self.text_config.vocab_size)
        self.context_lengths = self._check()
        self.records: list[Record] = []
        self._step: int | None = None

    def _check(self) -> list[int]:
        """Find now what ``perplexity`` would refuse hours later, at the first evaluation; return the lengths."""
        runs, bos_id = settle_bos(self.config.runs(), self.text_config, self.tokenizer, self.config.bos)
        choose_texts(runs, self.documents, bos_id, self.config)
        return [run.context_length for run in runs]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        best = (args.metric_for_best_model or "").removeprefix("eval_")
        if best in map(_name, self.context_lengths) and args.greater_is_better:  # Trainer's default for such a name
            raise InvalidRequestError(
                f"metric_for_best_model is {best!r} and greater_is_better is True, which would keep the worst model. "
                "Pass TrainingArguments(greater_is_better=False)."
            )
        if args.eval_strategy == "no":
            logger.warning("PerplexityCallback measures when Trainer evaluates, and eval_strategy is 'no'.")
        self._step = None
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)  # before EarlyStoppingCallback and whoever else reads the metrics

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        # Of several eval_dataset, each is an evaluation of its own at the same step.
        new = not self.trainer.is_in_train or self._step != state.global_step
        if new:
            self.records, self._step = self._measure(state), state.global_step
        values = {f"eval_{_name(record.context_length)}": record.perplexity for record in self.records}
        if metrics is not None:
            metrics.update(values)
        if new:  # the metrics themselves are logged already
            self.trainer.log(values)

    def _measure(self, state: TrainerState) -> list[Record]:
        model = RotaryModel(self.trainer.model).model
        device, sharded = model.device, self._all_hold_the_same(model)
        random = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with random, self.trainer.accelerator.autocast():
            records = perplexity(
                model,
                self.documents,
                self.config,
                tokenizer=self.tokenizer,
                label=f"step {state.global_step}",
                tokens_trained=int(state.num_input_tokens_seen),
                sharded=sharded,
                progress=state.is_world_process_zero and not self.trainer.args.disable_tqdm,
                seed=self.seed,
            )
        answer = [records]
        broadcast_object_list(answer)  # a last bit that differs could stop one process early, and not the others
        return answer[0]

    def _all_hold_the_same(self, model: PreTrainedModel) -> bool:
        """Return whether there are several processes, and all of them hold the same model, as DDP has it."""
        if self.trainer.args.world_size == 1:
            return False
        if len(set(gather_object([hash_weights(model)]))) == 1:
            return True
        # Frequencies that depend on what a process has read (Transformers' dynamic), or GPUs that round otherwise.
        logger.warning("the processes' models differ, so each measures all documents; the first one's numbers count.")
        return False


def _name(context_length: int) -> str:
    return f"perplexity_{context_length}"
