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

from hf_posenc.evaluation.bootstrap import interval_over
from hf_posenc.evaluation.documents import Document, hash_tokenizer, to_token_ids
from hf_posenc.evaluation.facts import (
    hash_json,
    hash_weights,
    identify_run,
    model_facts,
    peak_memory,
    reset_peak_memory,
)
from hf_posenc.evaluation.losses import Advance, evaluation_mode, length_dependent_rope_types, window_losses
from hf_posenc.evaluation.plans import Pass, Portion, Run, plan_passes, plan_runs
from hf_posenc.evaluation.progress import Finished, ProgressFile
from hf_posenc.evaluation.protocols import Average, ProtocolName
from hf_posenc.evaluation.records import Record, append_line, check_output, read_records
from hf_posenc.evaluation.tallies import (
    Totals,
    add_totals,
    default_bucket,
    join_portions,
    position_totals,
    run_totals,
    sum_up,
    window_means,
)
from hf_posenc.evaluation.texts import Choice, choose_texts, settle_bos
from hf_posenc.evaluation.windows import grouped, lay_out
from hf_posenc.lm_head import DEFAULT_ROWS_PER_CHUNK, check_head

logger = logging.getLogger(__name__)


def perplexity(
    model: PreTrainedModel,
    documents: Sequence[Document],
    context_lengths: Sequence[int],
    protocol: ProtocolName | Sequence[ProtocolName] = "truncated",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stride: int | None = None,
    last_k: int | None = None,
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
    min_tokens: int | None = None,
    average: Average | None = None,
) -> list[Record]:
    """Measure the perplexity of documents at several context lengths.

    Protocols of ours, on the same documents at every length (those that reach the longest):

    - ``truncated``: the first N tokens of each document, tokens 1 to N - 1 scored.
    - ``last_k``: tokens N - k to N - 1 scored, each with everything before it as context.
    - ``sliding_window``: windows of N tokens over the document, each token but the first scored once.
    - ``same_tokens``: the tokens from the shortest context length on, scored at every length, each with up to N tokens
      fed: the one for comparing lengths, and methods.

    And the published ones, as their code does it: ``yarn``, ``yarn_govreport``, ``pi``, ``pose``, ``longlora``,
    ``dca``, ``rerope``. The table is ``hf_posenc.evaluation.protocols.RULES``; records say in words what they are of.

    One pass at the longest length serves ``truncated`` and ``last_k`` at all lengths, unless the model's frequencies
    depend on the length fed (Transformers' ``dynamic``, ``longrope`` with two lists): then each length has its own.

    Args:
        model: A causal language model, patched or not, wrapped by PEFT or not.
        documents: Texts (with ``tokenizer``) or rows of token ids; never truncated by the tokenizer.
        context_lengths: Tokens fed at a time, BOS included.
        protocol: One name or several; several share what passes they can.
        tokenizer: The model's tokenizer; may be None where ``documents`` are token ids.
        stride: New tokens a window, less than every window; None takes the published number, half of each context
            length for ``same_tokens``, and for ``sliding_window`` 256, or half of windows not longer than that.
        last_k: Tokens scored by ``last_k`` (None: 256) and ``rerope`` (None: 4096).
        max_tokens: Tokens of a document that windows go over; None stops at the longest context length for
            ``sliding_window`` and ``same_tokens``, and takes whole documents for the published protocols.
        bos: ``"prepended"`` puts a BOS token before every document (not before every window). None puts none, except in
            ``yarn``, ``yarn_govreport`` and ``pose``, which have a rule of their own.
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
        min_tokens: Tokens a document needs, where that is less than the longest context length: for protocols whose
            windows end with the document.
        average: ``"windows"`` takes the mean of window means instead of all tokens' mean, as some papers do; None takes
            the protocol's own. Whatever is not the mean over tokens says so when it runs, and in its record.

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
    runs = plan_runs(protocols, context_lengths, stride, last_k, average)
    _check_sizes(prefill_chunk=prefill_chunk, logits_chunk=logits_chunk, position_bucket=position_bucket)
    runs, bos_id = settle_bos(runs, model, tokenizer, bos)
    ids = to_token_ids(model, documents, tokenizer)
    choice = Choice(max_tokens=max_tokens, min_tokens=min_tokens, cut=cut, max_documents=max_documents)
    texts = choose_texts(runs, ids, bos_id, choice)
    _tell_of_averages(runs)
    with evaluation_mode(model):
        check_head(model)
        facts = model_facts(model, model_name, tokens_trained, label) | {"tokenizer_hash": hash_tokenizer(tokenizer)}
        settings = {"weights": hash_weights(model), "seed": seed}
        identities = {run: identify_run(run, texts[run], facts | _run_facts(run, texts[run]), settings) for run in runs}
        losses_of = partial(window_losses, model, prefill_chunk=prefill_chunk, logits_chunk=logits_chunk)
        bucket = position_bucket or default_bucket(facts["original_max_position_embeddings"])
        where = None if output is None else Path(output)
        evaluation = _Evaluation(losses_of, texts, bos_id, identities, seed, bucket, where)
        reset_peak_memory(model)
        evaluation.measure(_passes(model, runs, prefill_chunk), partial(peak_memory, model), progress)
    return [evaluation.records[run] for run in runs]


class _Evaluation:
    """The records that are there, the documents that are done, and what is left to do."""

    def __init__(
        self,
        losses_of: Callable[..., torch.Tensor],
        texts: dict[Run, list[torch.Tensor]],
        bos_id: int | None,
        identities: dict[Run, dict[str, Any]],
        seed: int,
        bucket: int,
        output: Path | None,
    ) -> None:
        self.losses_of, self.texts, self.bos_id = losses_of, texts, bos_id
        self.identities, self.seed, self.output = identities, seed, output
        self.buckets = {run: bucket if run.protocol in ("truncated", "yarn") else None for run in identities}
        known = {} if output is None else {(one.run_key, one.position_bucket): one for one in read_records(output)}
        keys = {run: (identity["run_key"], self.buckets[run]) for run, identity in identities.items()}
        self.records = {run: known[key] for run, key in keys.items() if key in known}
        self.progress = ProgressFile(None if output is None else output.with_name(output.name + ".progress"))
        if self.records:
            logger.warning("%d of %d results are already in %s: not repeated.", len(self.records), len(keys), output)

    def measure(self, passes: list[Pass], peak_memory_bytes: Callable[[], int], show_progress: bool) -> None:
        """Walk over every document of every pass that has a record to give, and append the records."""
        passes = [one for one in passes if any(run not in self.records for run in one.runs)]
        todo = [
            (one, self._key(one), index, portion) for one in passes for index, portion in enumerate(self._portions(one))
        ]
        total = sum(portion.num_tokens_fed for *_, portion in todo)
        done = sum(portion.num_tokens_fed for _, key, index, portion in todo if self.progress.get(key, index))
        with tqdm(
            desc="perplexity",
            total=total,
            initial=done,
            unit="tok",
            unit_scale=True,
            disable=not (show_progress and todo),
        ) as bar:
            for at, (one, key, index, portion) in enumerate(todo):
                if self.progress.get(key, index) is None:
                    self.progress.add(key, index, self._score(one, portion, bar.update))
                if at + 1 == len(todo) or todo[at + 1][1] != key:
                    self._finish(one, key, index + 1, peak_memory_bytes())
        self.progress.forget(key for _, key, *_ in todo)

    def _portions(self, one: Pass) -> list[Portion]:
        return one.portions([len(text) for text in self.texts[one.runs[0]]])

    def _key(self, one: Pass) -> str:
        return hash_json([(self.identities[run]["run_key"], self.buckets[run]) for run in one.runs])

    def _score(self, one: Pass, portion: Portion, advance: Advance) -> Finished:
        text = self.texts[one.runs[0]][portion.text]
        started = time.perf_counter()
        losses = self._losses(one, text, portion, advance)
        totals = [run_totals(run, portion.windows, losses, len(text)) for run in one.runs]
        for run in one.runs:
            if (width := self.buckets[run]) is not None:
                first, stop = portion.windows[0].score_from, run.context_length
                totals.append(position_totals(losses[0][: stop - first], first, width))
        return Finished(totals, time.perf_counter() - started)

    def _losses(self, one: Pass, text: torch.Tensor, portion: Portion, advance: Advance) -> list[torch.Tensor]:
        """Return of each window the losses of the tokens it scores; NaN where no run asks for them."""
        asked = torch.zeros(len(text), dtype=torch.bool)
        for positions in one.asked(len(text)):
            asked[positions.start : positions.stop] = True
        losses = []
        for windows in grouped(portion.windows):
            row, placed = lay_out(text, windows, self.bos_id)
            needed = torch.zeros(len(row), dtype=torch.bool)
            for window, at in zip(windows, placed, strict=True):
                needed[at.score_from : at.end] = asked[window.score_from : window.end]
            of_row = self.losses_of(row, placed, needed, advance=advance)
            losses += [of_row[at.score_from : at.end] for at in placed]
        return losses

    def _finish(self, one: Pass, key: str, num_portions: int, peak_memory_bytes: int) -> None:
        finished = [self.progress.get(key, index) for index in range(num_portions)]
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
                join_portions(run, [document.runs[at] for document in done]),
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
    nll_sum, n_tokens = sum_up(totals)
    if identity["average"] == "windows":
        totals = [window_means(one) for one in totals]
    of, count = sum_up(totals)
    ci_low, ci_high, ci_unit = interval_over(totals, seed=seed)
    return Record(
        **identity,
        n_tokens=n_tokens,
        nll_sum=nll_sum,
        perplexity=math.exp(of / count),
        ci_low=ci_low,
        ci_high=ci_high,
        ci_unit=ci_unit,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
        position_nll=positions[0],
        position_tokens=positions[1],
    )


def _run_facts(run: Run, texts: list[torch.Tensor]) -> dict[str, Any]:
    return {"bos": run.bos, "average": run.average, "scored": run.words, "num_documents": len(texts)}


def _tell_of_averages(runs: list[Run]) -> None:
    for name in dict.fromkeys(run.protocol for run in runs if run.average == "windows"):
        logger.warning(
            "%s: this perplexity is the mean of window means: a window with few tokens counts like a full one, so it "
            "does not compare with perplexities that weigh all tokens alike.",
            name,
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
