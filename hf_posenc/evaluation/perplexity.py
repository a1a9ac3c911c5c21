"""Perplexity by context length: one pass a document where that is enough, resumable, with its protocol on record."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.evaluation.bootstrap import block_totals, interval_over
from hf_posenc.evaluation.documents import (
    Document,
    bos_token_id,
    hash_tokenizer,
    select_documents,
    to_token_ids,
)
from hf_posenc.evaluation.facts import (
    hash_json,
    hash_weights,
    identify_run,
    model_facts,
    peak_memory,
    reset_peak_memory,
)
from hf_posenc.evaluation.losses import Advance, evaluation_mode, length_dependent_rope_types, window_losses
from hf_posenc.evaluation.plans import DEFAULT_LAST_K, Pass, Protocol, Run, plan_passes, plan_runs
from hf_posenc.evaluation.progress import Finished, ProgressFile
from hf_posenc.evaluation.records import Record, append_line, check_output, read_records
from hf_posenc.evaluation.tallies import Totals, add_totals, default_bucket, position_totals
from hf_posenc.lm_head import DEFAULT_ROWS_PER_CHUNK, check_head

logger = logging.getLogger(__name__)


def perplexity(
    model: PreTrainedModel,
    documents: Sequence[Document],
    context_lengths: Sequence[int],
    protocol: Protocol | Sequence[Protocol] = "truncated",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stride: int | None = None,
    last_k: int = DEFAULT_LAST_K,
    max_tokens: int | None = None,
    bos: Literal["prepended"] | None = None,
    prefill_chunk: int | None = None,
    logits_chunk: int = DEFAULT_ROWS_PER_CHUNK,
    max_documents: int | None = None,
    cut: bool = False,
    output: str | Path | None = None,
    label: str = "",
    model_name: str | None = None,
    tokens_trained: int = 0,
    progress: bool = True,
    seed: int = 0,
    position_bucket: int | None = None,
) -> list[Record]:
    """Measure the perplexity of documents at several context lengths.

    Protocols, all on the same documents at every length (those that reach the longest):

    - ``truncated``: the first N tokens of each document, tokens 1 to N - 1 scored.
    - ``last_k``: tokens N - k to N - 1 scored, each with everything before it as context.
    - ``sliding_window``: windows of N tokens over the document, each token but the first scored once.

    One pass at the longest length serves ``truncated`` and ``last_k`` at all lengths, unless the model's frequencies
    depend on the length fed (Transformers' ``dynamic``, ``longrope`` with two lists): then each length has its own.

    Args:
        model: A causal language model, patched or not, wrapped by PEFT or not.
        documents: Texts (with ``tokenizer``) or rows of token ids; never truncated by the tokenizer.
        context_lengths: Tokens fed at a time, BOS included.
        protocol: One name or several; several share what passes they can.
        tokenizer: The model's tokenizer; may be None where ``documents`` are token ids.
        stride: New tokens scored a window by ``sliding_window``, less than every window; None takes 256, and half
            of windows not longer than that.
        last_k: Tokens scored by ``last_k``.
        max_tokens: Tokens of a document that ``sliding_window`` goes over; None stops at the longest context length,
            so that all lengths score the same tokens.
        bos: ``"prepended"`` puts a BOS token before every document (not before every window).
        prefill_chunk: Feed a window in chunks of so many tokens over a KV cache: equal numbers, less memory.
        logits_chunk: Rows whose logits exist at one time.
        max_documents: At most so many documents (or pieces), evenly spread.
        cut: Cut long documents into consecutive pieces of the longest length (``max_tokens`` if given).
        output: JSON-lines file the records are appended to. What an interrupted run has done is kept in
            ``<output>.progress``: the same call skips it and gives the same numbers; records already in ``output``
            are not measured again.
        label: Free words for the records, such as the name of a report's row.
        model_name: The records' model; None takes the path or name the model was loaded from.
        tokens_trained: Tokens the model was fine-tuned on, for the records; 0 is zero-shot.
        progress: Show a progress bar with the remaining time.
        seed: Of the bootstrap intervals.
        position_bucket: Tokens that share a place in the loss by position, which records of ``truncated`` hold; None
            takes a 32nd of the original length (at least 16), and 256 where that is unknown.

    Returns:
        A record per protocol and length, in the order of the protocols, by rising length.

    Raises:
        ValueError: No document is long enough; a length, stride, chunk or protocol that cannot be; a model whose head
            or losses cannot be trusted; ``output`` is a folder.
        TypeError: ``documents`` is not a list, ``context_lengths`` not one of whole numbers, or texts came without a
            tokenizer.
    """
    if output is not None:
        check_output(output)
    protocols = [protocol] if isinstance(protocol, str) else list(protocol)
    runs = plan_runs(protocols, context_lengths, stride, last_k)
    _check_sizes(prefill_chunk=prefill_chunk, logits_chunk=logits_chunk, position_bucket=position_bucket)
    bos_id = bos_token_id(model, tokenizer, bos)
    ids = select_documents(
        to_token_ids(model, documents, tokenizer),
        max(run.context_length for run in runs),
        max_tokens=max_tokens,
        bos_id=bos_id,
        cut=cut,
        max_documents=max_documents,
    )
    with evaluation_mode(model):
        check_head(model)
        facts = model_facts(model, model_name, tokens_trained, label)
        facts |= {"bos": bos or "none", "tokenizer_hash": hash_tokenizer(tokenizer), "num_documents": len(ids)}
        settings = {"weights": hash_weights(model), "seed": seed}
        identities = {run: identify_run(run, ids, facts, settings) for run in runs}
        losses_of = partial(window_losses, model, prefill_chunk=prefill_chunk, logits_chunk=logits_chunk)
        bucket = position_bucket or default_bucket(facts["original_max_position_embeddings"])
        evaluation = _Evaluation(losses_of, ids, identities, seed, bucket, None if output is None else Path(output))
        reset_peak_memory(model)
        evaluation.measure(_passes(model, runs, prefill_chunk), partial(peak_memory, model), progress)
    return [evaluation.records[run] for run in runs]


class _Evaluation:
    """The records that are there, the documents that are done, and what is left to do."""

    def __init__(
        self,
        losses_of: Callable[..., torch.Tensor],
        ids: list[torch.Tensor],
        identities: dict[Run, dict[str, Any]],
        seed: int,
        bucket: int,
        output: Path | None,
    ) -> None:
        self.losses_of, self.ids, self.identities, self.seed, self.output = losses_of, ids, identities, seed, output
        self.buckets = {run: bucket if run.protocol == "truncated" else None for run in identities}
        known = {} if output is None else {(one.run_key, one.position_bucket): one for one in read_records(output)}
        keys = {run: (identity["run_key"], self.buckets[run]) for run, identity in identities.items()}
        self.records = {run: known[key] for run, key in keys.items() if key in known}
        self.progress = ProgressFile(None if output is None else output.with_name(output.name + ".progress"))
        if self.records:
            logger.warning("%d of %d results are already in %s: not repeated.", len(self.records), len(keys), output)

    def measure(self, passes: list[Pass], peak_memory_bytes: Callable[[], int], show_progress: bool) -> None:
        """Walk over every document of every pass that has a record to give, and append the records."""
        passes = [one for one in passes if any(run not in self.records for run in one.runs)]
        todo = [(one, self._key(one), index) for one in passes for index in range(len(self.ids))]
        total, done = self._tokens(todo), self._tokens([at for at in todo if self.progress.get(*at[1:])])
        with tqdm(
            desc="perplexity",
            total=total,
            initial=done,
            unit="tok",
            unit_scale=True,
            disable=not (show_progress and todo),
        ) as bar:
            for one, key, index in todo:
                if self.progress.get(key, index) is None:
                    self.progress.add(key, index, self._score(one, self.ids[index], bar.update))
                if index == len(self.ids) - 1:
                    self._finish(one, key, peak_memory_bytes())
        self.progress.forget(key for _, key, _ in todo)

    def _tokens(self, todo: list[tuple[Pass, str, int]]) -> int:
        return sum(one.num_tokens_fed(len(self.ids[index])) for one, _, index in todo)

    def _key(self, one: Pass) -> str:
        return hash_json([(self.identities[run]["run_key"], self.buckets[run]) for run in one.runs])

    def _score(self, one: Pass, ids: torch.Tensor, advance: Advance) -> Finished:
        scored = [_as_slice(run.scored(len(ids))) for run in one.runs]
        needed = torch.zeros(len(ids), dtype=torch.bool)
        for positions in scored:
            needed[positions] = True
        started = time.perf_counter()
        losses = self.losses_of(ids, one.windows(len(ids)), needed, advance=advance)
        totals = [block_totals(losses[positions]) for positions in scored]
        for run, positions in zip(one.runs, scored, strict=True):
            if (width := self.buckets[run]) is not None:
                totals.append(position_totals(losses[positions], positions.start, width))
        return Finished(totals, time.perf_counter() - started)

    def _finish(self, one: Pass, key: str, peak_memory_bytes: int) -> None:
        finished = [self.progress.get(key, index) for index in range(len(self.ids))]
        done = [document for document in finished if document is not None]
        seconds = math.fsum(document.seconds for document in done)
        by_position = iter(range(len(one.runs), len(done[0].runs)))  # behind the blocks of all runs
        for at, run in enumerate(one.runs):
            width = self.buckets[run]
            where = None if width is None else next(by_position)
            if run in self.records:
                continue
            positions = ([], []) if where is None else add_totals([document.runs[where] for document in done])
            record = _make_record(
                {**self.identities[run], "position_bucket": width},
                [document.runs[at] for document in done],
                positions,
                self.seed,
                seconds,
                peak_memory_bytes,
            )
            self.records[run] = record
            if self.output is not None:
                append_line(self.output, record.to_json())


def _make_record(
    identity: dict[str, Any],
    totals: list[Totals],
    positions: Totals,
    seed: int,
    seconds: float,
    peak_memory_bytes: int,
) -> Record:
    nll_sum = math.fsum(value for sums, _ in totals for value in sums)
    n_tokens = sum(count for _, counts in totals for count in counts)
    ci_low, ci_high, ci_unit = interval_over(totals, seed=seed)
    return Record(
        **identity,
        n_tokens=n_tokens,
        nll_sum=nll_sum,
        perplexity=math.exp(nll_sum / n_tokens),
        ci_low=ci_low,
        ci_high=ci_high,
        ci_unit=ci_unit,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
        position_nll=positions[0],
        position_tokens=positions[1],
    )


def _check_sizes(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1 token, got {value}.")


def _passes(model: PreTrainedModel, runs: list[Run], prefill_chunk: int | None) -> list[Pass]:
    rope_types = length_dependent_rope_types(model)
    if not rope_types:
        return plan_passes(runs, causal_in_position=True)
    name = " and ".join(rope_types)
    if prefill_chunk is not None:
        raise ValueError(
            f"prefill_chunk cannot be used with rope_type {name!r}: its frequencies change with the length fed, so "
            "keys in the cache would be rotated differently from those of one pass. Leave prefill_chunk out."
        )
    logger.warning("rope_type %r depends on the length that is fed: one pass for each context length.", name)
    return plan_passes(runs, causal_in_position=False)


def _as_slice(span: range) -> slice:
    return slice(span.start, span.stop)
