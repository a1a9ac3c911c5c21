"""Passes over documents: what is done is kept on disk, processes share the work, and sums of losses become records."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_posenc.evaluation.intervals import BLOCKS_PER_DOCUMENT, block_totals, bootstrap_interval, resampled_units
from hf_posenc.evaluation.key_tokens import KeyTokenFinder, short_windows
from hf_posenc.evaluation.losses import Advance, lay_out
from hf_posenc.evaluation.model_facts import hash_json
from hf_posenc.evaluation.records import Record, append_line, read_records, whole_lines
from hf_posenc.evaluation.windows import Pass, Portion, Run, Window, grouped
from hf_posenc.utils.console import Progress
from hf_posenc.utils.files import write_whole
from hf_posenc.utils.processes import Processes

logger = logging.getLogger(__name__)

Totals = tuple[list[float], list[int]]  # of each stretch of tokens, in order: nats and scored tokens
_NO_TOTALS: Totals = ([], [])
_STRETCHES = 32  # of the original length, if nobody says how wide
_NARROWEST = 16
_WIDTH_WITHOUT_ORIGINAL = 256


class Evaluation:
    """The records and the documents that are done already, and what is left to do."""

    def __init__(
        self,
        finder: KeyTokenFinder,
        texts: dict[Run, list[torch.Tensor]],
        bos_id: int | None,
        identities: dict[Run, dict[str, Any]],
        seed: int,
        bucket: int,
        output: Path | None,
        processes: Processes,
    ) -> None:
        """Read what an earlier call has done.

        Args:
            finder: Finder of the key tokens, for ``longppl``; it knows the model and how to feed it too.
            texts: Token ids of each run's texts.
            bos_id: Token id of the BOS; None where no run has one.
            identities: What each run's record says besides the numbers.
            seed: Seed of the bootstrap.
            bucket: Tokens that share a value of the loss by position.
            output: The file of the records.
            processes: Who shares the work.
        """
        self.finder, self.losses_of, self.texts, self.bos_id = finder, finder.losses_of, texts, bos_id
        self.identities, self.seed = identities, seed
        self.processes, self.output = processes, output if processes.is_main else None
        self.buckets = {run: bucket if run.rule.by_position else None for run in identities}
        earlier = processes.from_main(lambda: [] if output is None else read_records(output))
        known = {(one.run_key, one.position_bucket): one for one in earlier}
        keys = {run: (identity["run_key"], self.buckets[run]) for run, identity in identities.items()}
        processes.agree([hash_json(key) for key in keys.values()])
        self.records = {run: known[key] for run, key in keys.items() if key in known}
        self.progress = ProgressFile(None if output is None else output.with_name(output.name + ".progress"), processes)
        if self.records and self.output is not None:
            logger.warning("%d of %d results are already in %s: not repeated.", len(self.records), len(keys), output)

    def measure(
        self, passes: list[Pass], peak_memory_bytes: Callable[[], int], show_progress: bool, shorter: str
    ) -> None:
        """Run every pass of which a record is missing over all documents, and append the records.

        If the work takes long, ``shorter`` is printed as advice (see ``hf_posenc.utils.console.Progress``).
        """
        keys = [self._key(one) for one in passes]  # of those with their records too: a kill may have left their lines
        passes = [one for one in passes if any(run not in self.records for run in one.runs)]
        todo = [
            (one, self._key(one), index, portion) for one in passes for index, portion in enumerate(self.portions(one))
        ]
        total = sum(portion.num_tokens_fed for *_, portion in todo)
        done = sum(portion.num_tokens_fed for _, key, index, portion in todo if self.progress.get(key, index))
        shown = show_progress and self.processes.is_main
        with Progress("perplexity", total, done=done, shown=shown, shorter=shorter) as bar:
            for one in passes:
                num_portions = self._walk(one, bar.update)
                self._finish(one, num_portions, max(self.processes.gather(peak_memory_bytes())))
        self.progress.forget(keys)

    def _walk(self, one: Pass, advance: Advance) -> int:
        """Score the portions that are not done yet, each in one process; return the number of all portions."""
        key, portions, alone = self._key(one), self.portions(one), self.processes.count == 1
        left = [index for index in range(len(portions)) if self.progress.get(key, index) is None]
        inside = advance if alone else None
        for index, done in self.processes.share(left, lambda index: self._score(one, portions[index], inside)):
            self.progress.add(key, index, done)
            if not alone:  # a process knows of the others' portions when they are done
                advance(portions[index].num_tokens_fed)
        return len(portions)

    def portions(self, one: Pass) -> list[Portion]:
        """Return the portions of a pass, each computed at one time, in order."""
        return one.portions([len(text) for text in self.texts[one.runs[0]]])

    def fed(self, one: Pass) -> list[list[Window]]:
        """Return the windows of each portion that is left, which alone are fed together; of ``longppl`` the short too.

        Nothing is left of a pass whose records exist.
        """
        if all(run in self.records for run in one.runs):
            return []
        key, fed = self._key(one), []
        for index, portion in enumerate(self.portions(one)):
            if self.progress.get(key, index) is None:
                fed.append(list(portion.windows))
                if one.runs[0].protocol == "longppl":
                    fed.append(short_windows(portion.windows[0].end, self.finder.short_context))
        return fed

    def _key(self, one: Pass) -> str:
        return hash_json([(self.identities[run]["run_key"], self.buckets[run]) for run in one.runs])

    def _score(self, one: Pass, portion: Portion, advance: Advance | None) -> Finished:
        text = self.texts[one.runs[0]][portion.text]
        started = time.perf_counter()
        if one.runs[0].protocol == "longppl":
            key_losses = self.finder.find(text, portion.windows[0].end, advance)
            totals, positions = [_key_totals(run, *key_losses) for run in one.runs], [_NO_TOTALS for _ in one.runs]
        else:
            losses = self._losses(one, text, portion, advance)
            totals = [_run_totals(run, portion.windows, losses, len(text)) for run in one.runs]
            widths = [self.buckets[run] for run in one.runs]
            positions = [
                _NO_TOTALS if width is None else _position_totals(losses[0][: run.context_length - 1], 1, width)
                for run, width in zip(one.runs, widths, strict=True)
            ]
        return Finished(totals + positions, time.perf_counter() - started)

    def _losses(self, one: Pass, text: torch.Tensor, portion: Portion, advance: Advance | None) -> list[torch.Tensor]:
        """Return of each window the losses of the tokens it scores; NaN where no run asks for them."""
        scored = torch.zeros(len(text), dtype=torch.bool)
        for positions in one.scored(len(text)):
            scored[positions.start : positions.stop] = True
        losses = []
        for windows in grouped(portion.windows):
            row, placed = lay_out(text, windows, self.bos_id)
            needed = torch.zeros(len(row), dtype=torch.bool)
            for window, at in zip(windows, placed, strict=True):
                needed[at.score_from : at.end] = scored[window.score_from : window.end]
            of_row = self.losses_of(row, placed, needed, advance=advance)
            losses += [of_row[at.score_from : at.end] for at in placed]
        return losses

    def _finish(self, one: Pass, num_portions: int, peak_memory_bytes: int) -> None:
        key = self._key(one)
        finished = [self.progress.get(key, index) for index in range(num_portions)]
        done = [document for document in finished if document is not None]
        seconds = math.fsum(document.seconds for document in done)
        for at, run in enumerate(one.runs):
            if run in self.records:
                continue
            totals = _join_portions(run, [document.runs[at] for document in done])
            positions = _add_totals([document.runs[len(one.runs) + at] for document in done])
            if not totals:
                logger.warning("longppl at %d tokens: there is no key token, so no result.", run.context_length)
                continue
            identity = {**self.identities[run], "position_bucket": self.buckets[run]}
            record = _make_record(identity, totals, positions, self.seed, seconds, peak_memory_bytes)
            self.records[run] = record
            if self.output is not None:
                append_line(self.output, record.to_json())


@dataclass(frozen=True)
class Finished:
    """A document one pass is done with: per run, the nats and the tokens of its blocks; ``seconds`` it took."""

    runs: list[tuple[list[float], list[int]]]
    seconds: float


class ProgressFile:
    """Finished documents by (key of the pass, index of the document); in memory only without a path.

    JSON keeps every bit of a float, so a resumed evaluation gives the same numbers as one that was never stopped.
    Of several processes, each of which adds every document, only the main one reads and writes the file.
    """

    def __init__(self, path: Path | None, processes: Processes) -> None:
        self.path = path if processes.is_main else None
        self._finished: dict[tuple[str, int], Finished] = {}
        for entry in processes.from_main(self._entries):
            runs = [(sums, counts) for sums, counts in entry["runs"]]
            self._finished[entry["pass"], entry["document"]] = Finished(runs, entry["seconds"])

    def get(self, key: str, document: int) -> Finished | None:
        """Return the results that are known of a document; None if it is still to do."""
        return self._finished.get((key, document))

    def add(self, key: str, document: int, finished: Finished) -> None:
        """Remember a document, on disk before returning."""
        self._finished[key, document] = finished
        if self.path is not None:
            entry = {"pass": key, "document": document, "seconds": finished.seconds, "runs": finished.runs}
            append_line(self.path, json.dumps(entry))

    def forget(self, keys: Iterable[str]) -> None:
        """Drop finished passes; the file goes when nothing else is in it."""
        dropped = set(keys)
        self._finished = {at: one for at, one in self._finished.items() if at[0] not in dropped}
        if self.path is None or not self.path.exists():
            return
        left = [json.dumps(entry) + "\n" for entry in self._entries() if entry["pass"] not in dropped]
        if not left:
            self.path.unlink()
            return
        write_whole(self.path, "".join(left))

    def _entries(self) -> list[dict[str, Any]]:
        return [] if self.path is None else [json.loads(line) for line in whole_lines(self.path)]


def default_bucket(original_length: int | None) -> int:
    """Return the number of positions that share a bucket: a 32nd of the original length, at least 16; else 256."""
    return _WIDTH_WITHOUT_ORIGINAL if original_length is None else max(_NARROWEST, original_length // _STRETCHES)


def _position_totals(losses: torch.Tensor, first: int, width: int) -> Totals:
    """Sum losses by the position of their token.

    Args:
        losses: ``(n,)``, of tokens ``first`` to ``first + n - 1`` of a text.
        first: Index of the first scored token.
        width: Tokens of a bucket; bucket b begins at token ``b * width``.

    Returns:
        Nats (summed in float64) and scored tokens of each bucket, from bucket 0 to the last one that has any.
    """
    buckets = torch.arange(first, first + len(losses)) // width
    sums = torch.zeros(int(buckets[-1]) + 1, dtype=torch.float64).index_add_(0, buckets, losses.double())
    return sums.tolist(), torch.bincount(buckets).tolist()


def _run_totals(run: Run, windows: Sequence[Window], losses: Sequence[torch.Tensor], num_tokens: int) -> Totals:
    """Return the part of a text, or of one portion of a stream, that one number needs.

    Args:
        run: The number.
        windows: What was fed of the text, in order.
        losses: For each window, the losses of the tokens that it scores.
        num_tokens: Number of tokens of the whole text.

    Returns:
        Totals of blocks of neighbouring tokens, which the interval is made of. Where windows are averaged, those of
        each window. Of a stream those of each 32nd of it, a token's losses all in one, however many windows score it.
    """
    if run.rule.shape == "beginning":
        (window,), (found,) = windows, losses
        scored = run.scored(num_tokens)
        losses = [found[scored.start - window.score_from : scored.stop - window.score_from]]
    if run.average == "windows":
        return [float(loss.double().sum()) for loss in losses], [len(loss) for loss in losses]
    if run.rule.shape != "stream":
        return block_totals(torch.cat(list(losses)))
    width = math.ceil(num_tokens / BLOCKS_PER_DOCUMENT)
    return _add_totals([_position_totals(one, at.score_from, width) for one, at in zip(losses, windows, strict=True)])


def _key_totals(run: Run, losses: torch.Tensor, keys: torch.Tensor) -> Totals:
    """Return the totals of the key tokens among a text's first ones, of blocks as everywhere, or of all in one.

    Args:
        run: The number.
        losses: ``(num_tokens,)``.
        keys: bool ``(num_tokens,)``.
    """
    chosen = losses[: run.context_length][keys[: run.context_length]]
    if run.average == "windows":
        return [float(chosen.double().sum())], [len(chosen)]
    return block_totals(chosen)


def _join_portions(run: Run, totals: Sequence[Totals]) -> list[Totals]:
    """Return the totals of each text that has any, from those of its portions: only a stream has more than one."""
    if run.rule.shape != "stream":
        return [total for total in totals if sum(total[1])]
    if run.average == "tokens":
        sums, counts = _add_totals(totals)
        scored = [at for at, count in enumerate(counts) if count]
        return [([sums[at] for at in scored], [counts[at] for at in scored])]
    return [([nats for sums, _ in totals for nats in sums], [count for _, counts in totals for count in counts])]


def _window_means(totals: Totals) -> Totals:
    """Return windows as if each had one token, of the window's mean loss."""
    return [nats / count for nats, count in zip(*totals, strict=True)], [1] * len(totals[1])


def _add_totals(totals: Sequence[Totals]) -> Totals:
    """Add up the stretches of several documents, first with first, second with second."""
    longest = max(len(counts) for _, counts in totals)
    sums = [math.fsum(nats[at] for nats, _ in totals if at < len(nats)) for at in range(longest)]
    return sums, [sum(counts[at] for _, counts in totals if at < len(counts)) for at in range(longest)]


def _sum_up(totals: Sequence[Totals]) -> tuple[float, int]:
    """Return all nats and all tokens."""
    nats = math.fsum(value for sums, _ in totals for value in sums)
    return nats, sum(count for _, counts in totals for count in counts)


def _make_record(
    identity: dict[str, Any],
    totals: list[Totals],
    positions: Totals,
    seed: int,
    seconds: float,
    peak_memory_bytes: int,
) -> Record:
    """Return a record of what a run found.

    Args:
        identity: The fields that say what was measured, and how.
        totals: Totals of each text.
        positions: Totals of each bucket of positions; empty lists where there are none.
        seed: Seed of the interval.
        seconds: That its pass took.
        peak_memory_bytes: Until now.
    """
    nll_sum, n_tokens = _sum_up(totals)
    if identity["average"] == "windows":
        totals = [_window_means(total) for total in totals]
    of, count = _sum_up(totals)
    unit_nll, unit_tokens, ci_unit = resampled_units(totals)
    ci_low, ci_high = bootstrap_interval(unit_nll, unit_tokens, seed=seed)
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
        unit_nll=unit_nll,
        unit_tokens=unit_tokens,
        position_nll=positions[0],
        position_tokens=positions[1],
    )
