"""Retrieval by task, context length and depth: a record for each prompt, resumable."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.evaluation.documents import hash_token_ids, hash_tokenizer
from hf_posenc.evaluation.lm_head import check_head
from hf_posenc.evaluation.losses import Advance, evaluation_mode, length_dependent_rope_types
from hf_posenc.evaluation.memory import peak_memory, reset_peak_memory
from hf_posenc.evaluation.model_facts import hash_weights, make_run_key, model_facts
from hf_posenc.evaluation.records import RetrievalRecord, append_line, check_output, read_retrieval_records
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.retrieval.config import DEFAULT_DEPTHS, check_retrieval
from hf_posenc.retrieval.haystack import read_haystack
from hf_posenc.retrieval.prompts import Chat, Prompt, PromptMaker
from hf_posenc.retrieval.scoring import Reply, reply
from hf_posenc.retrieval.tasks import get_task
from hf_posenc.utils.console import Progress
from hf_posenc.utils.dtypes import slow_dtype_advice
from hf_posenc.utils.processes import Processes

logger = logging.getLogger(__name__)


def retrieval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str] = ("passkey",),
    context_lengths: Sequence[int] = (),
    depths: Sequence[float] = DEFAULT_DEPTHS,
    samples: int = 1,
    *,
    documents: Sequence[str] | None = None,
    chat: Chat = "auto",
    seed: int = 0,
    prefill_chunk: int | None = None,
    output: str | Path | None = None,
    label: str = "",
    model_name: str | None = None,
    tokens_trained: int | None = 0,
    progress: bool = True,
    sharded: bool = False,
    command: str = "",
) -> list[RetrievalRecord]:
    """Ask a model for what is hidden in long texts.

    A prompt and its longest answer fill a context length to the token; nothing is ever cut off. Each is scored twice:
    teacher-forced on the tokens that hold the answer, and by what the model writes greedily. The answer is begun for
    the model ("The pass key is").

    Args:
        model: A causal language model, patched or not, wrapped by PEFT or not.
        tokenizer: Its tokenizer, a fast one.
        tasks: Names of ``hf_posenc.retrieval.tasks.tasks()``.
        context_lengths: Tokens of prompt and answer together.
        depths: Where needles are hidden, in percent of the text before them.
        samples: Prompts of each task, length and depth; their seeds are ``seed``, ``seed + 1``, ... A task with nothing
            at one depth gets as many prompts as the others.
        documents: The texts to hide things in; None takes the novels in the package.
        chat: Whether a prompt is a user's message in the tokenizer's chat template: "on", "off", or "auto", where there
            is a template.
        seed: Of the first sample. The same seed gives the same prompts, whatever else is measured.
        prefill_chunk: Feed a prompt in chunks of so many tokens: less memory for activations.
        output: JSON-lines file the records are appended to; prompts whose records are in it are not repeated.
        label: Free words for the records.
        model_name: The records' model; None takes the path or name the model was loaded from.
        tokens_trained: Tokens the model was fine-tuned on, for the records; 0 is zero-shot, None unknown.
        progress: Show a progress bar with the remaining time.
        sharded: Share the prompts among the processes of torchrun or accelerate, as ``perplexity`` does documents.
        command: What was typed to measure this, for the records.

    Returns:
        A record per prompt: by task, rising length and depth, and seed.

    Raises:
        ValueError: A task, length, depth or number that cannot be; a length too short for a task, with the counts;
            documents too short; a chat template that is required and missing; ``output`` is a folder; a model whose
            head cannot be trusted.
    """
    if output is not None:
        check_output(output)
    model = RotaryModel(model).model
    lengths = check_retrieval(tasks, context_lengths, depths, samples)
    _check_chunk(model, prefill_chunk)
    maker = PromptMaker(tokenizer, read_haystack(tokenizer, documents), chat)
    # Each is made when it is needed: many long prompts would fill the memory.
    prompts = [
        partial(maker.make, task, length, depth, one)
        for task in dict.fromkeys(tasks)
        for length in lengths
        for depth, one in _depths_and_seeds(task, depths, seed, samples)
    ]
    with evaluation_mode(model):
        check_head(model)
        facts = model_facts(model, model_name, tokens_trained, label, command)
        facts |= {"tokenizer_hash": hash_tokenizer(tokenizer), "chat": maker.in_chat}
        weights = hash_weights(model)
        identities = [_identify(make(), facts, weights) for make in prompts]
        processes = Processes(sharded)
        prompting = _Prompting(model, tokenizer, prefill_chunk, None if output is None else Path(output), processes)
        return prompting.answer_all(prompts, identities, progress)


class _Prompting:
    """A model to put prompts to, and the file its replies go to."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prefill_chunk: int | None,
        output: Path | None,
        processes: Processes,
    ) -> None:
        self.model, self.tokenizer, self.prefill_chunk, self.output = model, tokenizer, prefill_chunk, output
        self.processes = processes
        self.stop_ids = _stop_ids(model, tokenizer)

    def answer_all(
        self, prompts: Sequence[Callable[[], Prompt]], identities: list[dict[str, Any]], progress: bool
    ) -> list[RetrievalRecord]:
        """Return the records of all prompts; those in the file are not repeated."""
        written = self.processes.from_main(lambda: [] if self.output is None else read_retrieval_records(self.output))
        self.processes.agree([identity["run_key"] for identity in identities])
        known = {one.run_key: one for one in written}
        todo = [at for at, identity in enumerate(identities) if identity["run_key"] not in known]
        if len(todo) < len(prompts):
            found = len(prompts) - len(todo)
            logger.warning("%d of %d results are already in %s: not repeated.", found, len(prompts), self.output)
        reset_peak_memory(self.model)
        total = sum(identities[at]["num_prompt_tokens"] for at in todo)
        shown, alone = progress and self.processes.is_main, self.processes.count == 1
        shorter = slow_dtype_advice(self.model) + "fewer --samples or --depths, or shorter --context-lengths"
        with Progress("retrieval", total, shown=shown, shorter=shorter) as bar:
            inside = bar.update if alone else None
            answered = self.processes.share(todo, lambda at: self._answer(prompts[at](), identities[at], inside))
            for at, record in answered:
                known[record.run_key] = record
                if self.output is not None and self.processes.is_main:
                    append_line(self.output, record.to_json())
                if not alone:  # a process knows of the others' prompts when they are answered
                    bar.update(identities[at]["num_prompt_tokens"])
        return [known[identity["run_key"]] for identity in identities]

    def _answer(self, prompt: Prompt, identity: dict[str, Any], advance: Advance | None) -> RetrievalRecord:
        started = time.perf_counter()
        got = reply(
            self.model,
            prompt.ids,
            prompt.answer_ids,
            prompt.max_new_tokens,
            stop_ids=self.stop_ids,
            prefill_chunk=self.prefill_chunk,
            advance=advance,
        )
        written = str(self.tokenizer.decode(got.written))
        return RetrievalRecord(
            **identity,
            **_score(prompt, got, written),
            forced=str(self.tokenizer.decode(got.choices)),
            written=written,
            seconds=time.perf_counter() - started,
            peak_memory_bytes=peak_memory(self.model),
        )


def _check_chunk(model: PreTrainedModel, prefill_chunk: int | None) -> None:
    if prefill_chunk is None:
        return
    if prefill_chunk < 1:
        raise InvalidRequestError(f"{argument('prefill_chunk')} must be at least 1 token, got {prefill_chunk}.")
    if rope_types := length_dependent_rope_types(model):
        raise InvalidRequestError(
            f"{argument('prefill_chunk')} cannot be used with rope_type {' and '.join(rope_types)!r}: its "
            f"frequencies change with the length fed. Leave {argument('prefill_chunk')} out."
        )


def _identify(prompt: Prompt, facts: dict[str, Any], weights: str) -> dict[str, Any]:
    """Return a record's fields except its results; ``run_key`` is a hash of them and of the weights."""
    identity = {
        **facts,
        "task": prompt.task,
        "context_length": prompt.context_length,
        "depth": prompt.depth,
        "seed": prompt.seed,
        "num_prompt_tokens": len(prompt.ids),
        "max_new_tokens": prompt.max_new_tokens,
        "needle_places": list(prompt.needle_places),
        "answers": list(prompt.answers),
        "text_hash": hash_token_ids([torch.tensor(prompt.ids), torch.tensor(prompt.answer_ids)]),
    }
    return {**identity, "run_key": make_run_key(identity, weights)}


def _score(prompt: Prompt, got: Reply, written: str) -> dict[str, Any]:
    right = [choice == token for choice, token in zip(got.choices, prompt.answer_ids, strict=True)]
    positions = [at for span in prompt.answer_positions for at in span]
    return {
        "num_forced": sum(all(right[at] for at in span) for span in prompt.answer_positions)
        if prompt.ordered
        else None,
        "num_written": sum(_has_word(written, answer) for answer in prompt.answers),
        "n_tokens": len(positions),
        "n_right": sum(right[at] for at in positions),
        "nll_sum": math.fsum(got.losses[at] for at in positions),
    }


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _depths_and_seeds(task: str, depths: Sequence[float], seed: int, samples: int) -> list[tuple[float | None, int]]:
    each = sorted(set(depths))
    if get_task(task).has_depth:
        return [(depth, one) for depth in each for one in range(seed, seed + samples)]
    return [(None, one) for one in range(seed, seed + samples * len(each))]


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer, as the tokenizer and the generation config have them."""
    config = getattr(model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    several = found if isinstance(found, list) else [found]
    return frozenset(int(one) for one in (*several, tokenizer.eos_token_id) if one is not None)
