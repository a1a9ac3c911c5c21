"""The results of fitted and published rules on held-out texts: perplexity at all lengths, and hidden numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.intervals import share_interval
from hf_posenc.evaluation.measuring_perplexity import perplexity
from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.windows import doublings
from hf_posenc.fitting.hidden_numbers import MEASURED_BY, HiddenNumber, hide_numbers
from hf_posenc.fitting.run import Fit, FitRun
from hf_posenc.fitting.verdict import ADAPTED
from hf_posenc.patching.extension_config import NO_METHOD
from hf_posenc.retrieving.scoring import Asked, replies
from hf_posenc.utils.units import duration_name, length_name

logger = logging.getLogger(__name__)

_SHORTEST = 512  # tokens, of the first measured length


@dataclass(frozen=True)
class NumbersFound:
    """The count of numbers hidden in one text of the target length that a model found.

    Attributes:
        scores: 1 or 0 for each number.
        context_length: Tokens of the text.
    """

    scores: tuple[float, ...]
    context_length: int

    def __str__(self) -> str:
        share = share_interval(self.scores, range(len(self.scores)))
        interval = f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%})"
        return f"{sum(self.scores):.0f} of {len(self.scores)}, {interval}"


def measured_lengths(original: int, target: int) -> list[int]:
    """Return the lengths of the table: 512 (or half the original length), the original, its doublings, the target."""
    short = {max(min(_SHORTEST, original // 2), 2), max(original // 4, 2)}
    return sorted({*short, *doublings(original, target)})


def measure_rows(run: FitRun, fit: Fit) -> tuple[dict[str, list[Record]], list[str]]:
    """Measure the perplexity of the result of a fit and of the rules it is compared with, in this order.

    The unextended model is measured up to the original length only. With a budget, rows that no longer fit are left
    out, after the result, the unextended model and one other.

    Args:
        run: The fit.
        fit: Its result.

    Returns:
        The records of each row by its method, and sentences about rows that were left out.
    """
    if not run.texts.held_out:
        return {}, []
    lengths = measured_lengths(run.original, run.target)
    rows: dict[str, dict[str, Any] | None] = {fit.name: run.config.request(fit.method, fit.options)}
    rows |= {name: None if name == NO_METHOD else run.config.request(name) for name in run.config.compare}
    records: dict[str, list[Record]] = {}
    left_out = []
    for name, row in rows.items():
        short = row is None
        rivals = len(records.keys() - {fit.name, NO_METHOD})
        if rivals and not short and run.budget.left < run.pass_seconds * len(run.texts.held_out):
            left_out.append(name)
            continue
        with run.extended(row, fit.adapter if name == fit.name else None):
            records[name] = perplexity(
                run.rotary.model,
                [ids[: run.original] if short else ids for ids in run.texts.held_out],
                [length for length in lengths if length <= run.original or not short],
                tokenizer=run.tokenizer,
                output=run.folder / "results.jsonl",
                model_name=run.model_name,
                label=ADAPTED if name == ADAPTED else "",
                progress=not run.config.hide_progress,
            )
    if not left_out:
        return records, []
    budget = duration_name(run.config.budget or 0)
    return records, [f"not compared, as the budget of {budget} is spent: {', '.join(left_out)}"]


def spread_of_seeds(run: FitRun, rows: Mapping[str, Sequence[Record]], others: Sequence[Fit]) -> list[str]:
    """Return in a sentence by how much fits with other seeds differ at the target length; empty if there are none.

    Args:
        run: The fit.
        rows: From ``measure_rows``.
        others: The results of the other seeds.
    """
    if not rows or not others:
        return []
    perplexities = [next(iter(rows.values()))[-1].perplexity]
    for fit in others:
        with run.extended(run.config.request(fit.method, fit.options), fit.adapter):
            [record] = perplexity(
                run.rotary.model,
                run.texts.held_out,
                [run.target],
                tokenizer=run.tokenizer,
                output=run.folder / "seeds.jsonl",
                progress=not run.config.hide_progress,
            )
        perplexities.append(record.perplexity)
    spread = 100 * (max(perplexities) / min(perplexities) - 1)
    values = ", ".join(f"{value:.2f}" for value in perplexities)
    return [
        f"{len(perplexities)} fits with different seeds differ by {spread:.1f} % at {length_name(run.target)}: {values}"
    ]


def find_numbers(run: FitRun, rows: Mapping[str, Sequence[Record]], fit: Fit) -> dict[str, NumbersFound]:
    """Ask the result, and the published rule of the lowest perplexity, for numbers hidden in a held-out text.

    Args:
        run: The fit.
        rows: From ``measure_rows``.
        fit: Its result.
    """
    count, tokenizer = run.config.held_out_numbers, run.tokenizer
    rivals = [name for name in rows if name not in (fit.name, NO_METHOD)]
    if not count or not rows or tokenizer is None:
        return {}
    best = min(rivals, key=lambda name: rows[name][-1].perplexity, default=None)
    asked = {fit.name: run.config.request(fit.method, fit.options)}
    asked |= {} if best is None else {best: run.config.request(best)}
    if run.budget.left < len(asked) * run.pass_seconds:
        return {}
    try:
        ids, hidden = hide_numbers(
            tokenizer, run.texts.held_out[0], count, Random(f"{run.config.seed} held out"), MEASURED_BY
        )
    except InvalidRequestError as error:  # a text too short for them
        logger.warning("nothing is hidden in the held-out text: %s", error)
        return {}
    scores = {}
    for name, row in asked.items():
        with run.extended(row, fit.adapter if name == fit.name else None):
            scores[name] = NumbersFound(tuple(numbers_found(run.rotary.model, ids, hidden)), len(ids))
    return scores


def numbers_found(model: PreTrainedModel, ids: torch.Tensor, hidden: Sequence[HiddenNumber]) -> list[float]:
    """Return for each number 1 if the likeliest tokens are all of its digits, else 0.

    Args:
        model: In evaluation mode.
        ids: The text, int64 ``(num_tokens,)``.
        hidden: What is hidden in it.
    """
    asked = [Asked(number.question, number.answer) for number in hidden]
    got = replies(model, ids.tolist(), asked)
    return [float(one.choices == number.answer) for one, number in zip(got, hidden, strict=True)]
