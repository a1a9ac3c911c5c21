"""Retrieval by task, context length and depth: a record for each question, resumable."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.errors import argument
from hf_posenc.evaluation.documents import hash_token_ids, hash_tokenizer
from hf_posenc.evaluation.lm_head import check_head
from hf_posenc.evaluation.losses import Advance, evaluation_mode, length_dependent_rope_types, refuse_chunks
from hf_posenc.evaluation.memory import peak_memory, reset_peak_memory
from hf_posenc.evaluation.model_facts import hash_weights, make_run_key, model_facts
from hf_posenc.evaluation.records import RetrievalRecord, append_line, check_output, read_retrieval_records
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.retrieving.config import DEFAULT_DEPTHS, check_retrieval
from hf_posenc.retrieving.haystack import read_haystack
from hf_posenc.retrieving.prompts import Chat, Prompt, PromptMaker
from hf_posenc.retrieving.scoring import Asked, Reply, replies
from hf_posenc.retrieving.tasks import expand_groups, get_task
from hf_posenc.retrieving.tasks.base import num_written
from hf_posenc.settings import optional, tokens
from hf_posenc.utils.console import Progress
from hf_posenc.utils.dtypes import slow_dtype_advice
from hf_posenc.utils.processes import Processes
from hf_posenc.utils.units import ContextLength

logger = logging.getLogger(__name__)


def retrieval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str] = ("passkey",),
    context_lengths: Sequence[int] = (),
    depths: Sequence[float] = DEFAULT_DEPTHS,
    samples: int = 1,
    *,
    questions: int = 1,
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

    With several ``questions`` a text holds the needles of all of them. It is read once and each question is put to the
    model as if it were the only one, so that a hundred cost little more than one. Such questions are not independent:
    ``share_interval`` says what they are worth.

    Args:
        model: A causal language model, patched or not, wrapped by PEFT or not.
        tokenizer: Its tokenizer, a fast one.
        tasks: Names of ``hf_posenc.retrieving.tasks.tasks()``, or of groups.
        context_lengths: Tokens of prompt and answer together.
        depths: Where needles are hidden, in percent of the text before them; with several questions they lie at all
            depths, and this has to be left as it is.
        samples: Texts of each task, length and depth; their seeds are ``seed``, ``seed + 1``, ... With one question, a
            task with nothing at one depth gets as many prompts as the others; with several, there are as many texts of
            each task and length.
        questions: Asked of each text.
        documents: The texts to hide things in; None takes the novels in the package.
        chat: Whether a prompt is a user's message in the tokenizer's chat template: "on", "off", or "auto", where there
            is a template.
        seed: Seed of the first sample. The same seed gives the same prompts, whatever else is measured.
        prefill_chunk: Feed a prompt in chunks of so many tokens: less memory for activations.
        output: JSON-lines file the records are appended to; prompts whose records are in it are not repeated.
        label: Free words for the records.
        model_name: The records' model; None takes the path or name the model was loaded from.
        tokens_trained: Tokens the model was fine-tuned on, for the records; 0 is zero-shot, None unknown.
        progress: Show a progress bar with the remaining time.
        sharded: Share the prompts among the processes of torchrun or accelerate, as ``perplexity`` does documents.
        command: What was typed to measure this, for the records.

    Returns:
        A record per question: by task, rising length and depth, seed, and question of a text.

    Raises:
        ValueError: A task, length, depth or number that cannot be; several questions of a task that has one for a text;
            a length too short for a task and its questions, with the counts;
            documents too short; a chat template that is required and missing; ``output`` is a folder; a model whose
            head cannot be trusted.
    """
    file = None if output is None else check_output(output)
    model = RotaryModel(model).model
    tasks = expand_groups(tasks)
    lengths = check_retrieval(tasks, context_lengths, depths, samples, questions)
    prefill_chunk = optional(tokens(ContextLength))(argument("prefill_chunk"), prefill_chunk)
    refuse_chunks(length_dependent_rope_types(model), prefill_chunk)
    maker = PromptMaker(tokenizer, read_haystack(tokenizer, documents), chat)
    # Each is made when it is needed: many long prompts would fill the memory.
    makers = [
        partial(maker.make, task, length, depth, one, questions)
        for task in tasks
        for length in lengths
        for depth, one in _depths_and_seeds(task, depths, seed, samples, questions)
    ]
    with evaluation_mode(model):
        check_head(model)
        facts = model_facts(model, model_name, tokens_trained, label, command)
        facts |= {"tokenizer_hash": hash_tokenizer(tokenizer), "chat": maker.in_chat}
        weights = hash_weights(model)
        texts = [_Text.of(make, facts, weights) for make in makers]
        processes = Processes(sharded)
        prompting = _Prompting(model, tokenizer, prefill_chunk, file, processes)
        return prompting.answer_all(texts, progress)


def check_prompts(
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    context_lengths: Sequence[int],
    questions: int = 1,
    *,
    documents: Sequence[str] | None = None,
    chat: Chat = "auto",
) -> None:
    """Raise what ``retrieval`` would, from the tokenizer alone: a prompt of each task and length is made.

    Raises:
        ValueError: A task, length or number that cannot be; several questions of a task that has one for a text; a
            length too short for a task and its questions, with the counts; documents too short; a chat template that is
            required and missing.
    """
    tasks = expand_groups(tasks)
    lengths = check_retrieval(tasks, context_lengths, DEFAULT_DEPTHS, 1, questions)
    maker = PromptMaker(tokenizer, read_haystack(tokenizer, documents), chat)
    for task in tasks:
        for length in lengths:
            maker.make(task, length, None, 0, questions)


@dataclass(frozen=True)
class _Text:
    """A text with its questions: ``make`` makes the prompts, ``identities`` are their records without the results."""

    make: Callable[[], tuple[Prompt, ...]]
    identities: tuple[dict[str, Any], ...]
    num_tokens: int

    @classmethod
    def of(cls, make: Callable[[], tuple[Prompt, ...]], facts: dict[str, Any], weights: str) -> _Text:
        prompts = make()
        shared = hash_token_ids([torch.tensor(prompts[0].text_ids)])
        return cls(
            make, tuple(_identify(prompt, shared, facts, weights) for prompt in prompts), len(prompts[0].text_ids)
        )

    @property
    def run_keys(self) -> list[str]:
        return [identity["run_key"] for identity in self.identities]


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
        self.stop_ids = stop_ids_of(model, tokenizer)
        self.length_dependent = length_dependent_rope_types(model)  # each question changes the keys before it

    def answer_all(self, texts: Sequence[_Text], progress: bool) -> list[RetrievalRecord]:
        """Return the records of all questions; those in the file are not repeated."""
        written = self.processes.from_main(lambda: [] if self.output is None else read_retrieval_records(self.output))
        run_keys = [run_key for text in texts for run_key in text.run_keys]
        self.processes.agree(run_keys)
        known = {one.run_key: one for one in written}
        # Of each text, the questions to put to it; a text without any is not read.
        missing = [[at for at, run_key in enumerate(text.run_keys) if run_key not in known] for text in texts]
        todo = [(text, questions) for text, questions in zip(texts, missing, strict=True) if questions]
        left = sum(len(questions) for _, questions in todo)
        if left < len(run_keys):
            done = len(run_keys) - left
            if self.output is not None:
                logger.warning("%d of %d results are already in %s: not repeated.", done, len(run_keys), self.output)
        if self.length_dependent and left > len(todo):
            logger.warning(
                "each of %d questions is read with its whole text, for the frequencies of rope_type %s change with the "
                "number of tokens: --questions saves no time.",
                left,
                " and ".join(self.length_dependent),
            )
        reset_peak_memory(self.model.device)
        shown, alone = progress and self.processes.is_main, self.processes.count == 1
        shorter = slow_dtype_advice(self.model) + "fewer --samples or --depths, or shorter --context-lengths"
        total = sum(self._num_tokens(*each) for each in todo)
        with Progress("retrieval", total, shown=shown, shorter=shorter) as bar:
            inside = bar.update if alone else None
            for each, records in self.processes.share(todo, lambda each: self._answer(*each, inside)):
                known |= {record.run_key: record for record in records}
                if not alone:  # a process knows of the others' questions when all of their text are answered
                    self._write(records)
                    bar.update(self._num_tokens(*each))
        return [known[run_key] for run_key in run_keys]

    def _num_tokens(self, text: _Text, questions: Sequence[int]) -> int:
        """Return the number of tokens that are read."""
        asked = sum(int(text.identities[question]["num_prompt_tokens"]) for question in questions)
        return asked if self.length_dependent else asked - (len(questions) - 1) * text.num_tokens

    def _write(self, records: Sequence[RetrievalRecord]) -> None:
        if self.output is not None and self.processes.is_main:
            for record in records:
                append_line(self.output, record.to_json())

    def _answer(self, text: _Text, questions: Sequence[int], advance: Advance | None) -> list[RetrievalRecord]:
        prompts = text.make()
        prompts = tuple(prompts[question] for question in questions)
        # A single question belongs to its text, so that all of the prompt is read at once.
        several = len(text.identities) > 1
        shared = prompts[0].text_ids if several else prompts[0].ids
        asked = [
            Asked(
                prompt.question_ids if several else [],
                prompt.answer_ids,
                prompt.max_new_tokens,
                partial(self._has_all, prompt) if several else None,
            )
            for prompt in prompts
        ]
        records: list[RetrievalRecord] = []
        started = time.perf_counter()
        got = replies(
            self.model,
            shared,
            asked,
            stop_ids=self.stop_ids,
            prefill_chunk=self.prefill_chunk,
            advance=advance,
        )
        for prompt, at, reply in zip(prompts, questions, got, strict=True):
            written = str(self.tokenizer.decode(reply.written))
            record = RetrievalRecord(
                **text.identities[at],
                **_score(prompt, reply, written),
                forced=str(self.tokenizer.decode(reply.choices)),
                written=written,
                seconds=time.perf_counter() - started,
                peak_memory_bytes=peak_memory(self.model.device),
            )
            records.append(record)
            if self.processes.count == 1:
                self._write([record])
            started = time.perf_counter()
        return records

    def _has_all(self, prompt: Prompt, written: list[int]) -> bool:
        """Say whether all answers are in a text, whatever is written after it."""
        text = str(self.tokenizer.decode(written))
        return num_written(text, prompt.answers, prompt.choices, ended=True) == len(prompt.answers)


def _identify(prompt: Prompt, shared_text: str, facts: dict[str, Any], weights: str) -> dict[str, Any]:
    """Return a record's fields except its results; ``run_key`` is a hash of them and of the weights."""
    design = {"questions_per_text": prompt.num_questions, "question": prompt.question, "shared_text": shared_text}
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
        **(design if prompt.num_questions > 1 else {}),
    }
    return {**identity, "run_key": make_run_key(identity, weights)}


def _score(prompt: Prompt, got: Reply, written: str) -> dict[str, Any]:
    right = [choice == token for choice, token in zip(got.choices, prompt.answer_ids, strict=True)]
    positions = [at for span in prompt.answer_positions for at in span]
    return {
        "num_forced": sum(all(right[at] for at in span) for span in prompt.answer_positions)
        if prompt.ordered
        else None,
        "num_written": num_written(written, prompt.answers, prompt.choices),
        "n_tokens": len(positions),
        "n_right": sum(right[position] for position in positions),
        "nll_sum": math.fsum(got.losses[position] for position in positions),
    }


def _depths_and_seeds(
    task: str, depths: Sequence[float], seed: int, samples: int, questions: int
) -> list[tuple[float | None, int]]:
    each = sorted(set(depths))
    if questions > 1:
        return [(None, one) for one in range(seed, seed + samples)]
    if get_task(task).has_depth:
        return [(depth, one) for depth in each for one in range(seed, seed + samples)]
    return [(None, one) for one in range(seed, seed + samples * len(each))]


def stop_ids_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer, as the tokenizer and the generation config have them."""
    config = getattr(model, "generation_config", None)
    eos_token_id = getattr(config, "eos_token_id", None)
    several = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return frozenset(int(one) for one in (*several, tokenizer.eos_token_id) if one is not None)
