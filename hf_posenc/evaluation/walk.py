"""Walking over documents: what is done is kept, what several processes share is put together, a record comes out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_posenc.evaluation.facts import hash_json
from hf_posenc.evaluation.key_tokens import KeyTokenFinder, short_windows
from hf_posenc.evaluation.losses import Advance
from hf_posenc.evaluation.plans import Pass, Portion, Run
from hf_posenc.evaluation.progress import Finished, ProgressFile
from hf_posenc.evaluation.records import append_line, read_records
from hf_posenc.evaluation.tallies import (
    NO_TOTALS,
    Totals,
    add_totals,
    join_portions,
    key_totals,
    make_record,
    position_totals,
    run_totals,
)
from hf_posenc.evaluation.windows import Window, grouped, lay_out
from hf_posenc.utils.console import Progress
from hf_posenc.utils.processes import Processes

logger = logging.getLogger(__name__)


class Evaluation:
    """The records that are there, the documents that are done, and what is left to do."""

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
        """Read what is there.

        Args:
            finder: Of the key tokens, for ``longppl``; it knows the model and how to feed it too.
            texts: Token ids of each run's texts.
            bos_id: Token id of the BOS; None where no run has one.
            identities: What each run's record says besides the numbers.
            seed: Of the bootstrap.
            bucket: Tokens that share a place in the loss by position.
            output: The file of the records.
            processes: Who shares the work.
        """
        self.finder, self.losses_of, self.texts, self.bos_id = finder, finder.losses_of, texts, bos_id
        self.identities, self.seed = identities, seed
        self.processes, self.output = processes, output if processes.is_main else None
        self.buckets = {run: bucket if run.protocol in ("truncated", "yarn") else None for run in identities}
        there = processes.from_main(lambda: [] if output is None else read_records(output))
        known = {(one.run_key, one.position_bucket): one for one in there}
        keys = {run: (identity["run_key"], self.buckets[run]) for run, identity in identities.items()}
        processes.agree([hash_json(key) for key in keys.values()])
        self.records = {run: known[key] for run, key in keys.items() if key in known}
        self.progress = ProgressFile(None if output is None else output.with_name(output.name + ".progress"), processes)
        if self.records:
            logger.warning("%d of %d results are already in %s: not repeated.", len(self.records), len(keys), output)

    def measure(
        self, passes: list[Pass], peak_memory_bytes: Callable[[], int], show_progress: bool, shorter: str
    ) -> None:
        """Walk over every document of every pass that has a record to give, and append the records.

        Of work that takes long ``shorter`` is said (see ``hf_posenc.utils.console.Progress``).
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
        """Score the portions that are left, each in one of the processes; return how many the pass has."""
        key, portions, alone = self._key(one), self.portions(one), self.processes.count == 1
        left = [index for index in range(len(portions)) if self.progress.get(key, index) is None]
        inside = advance if alone else None
        for index, done in self.processes.share(left, lambda index: self._score(one, portions[index], inside)):
            self.progress.add(key, index, done)
            if not alone:  # a process knows of the others' portions when they are done
                advance(portions[index].num_tokens_fed)
        return len(portions)

    def portions(self, one: Pass) -> list[Portion]:
        """Return what of a pass is done at one go, in order."""
        return one.portions([len(text) for text in self.texts[one.runs[0]]])

    def fed(self, one: Pass) -> list[list[Window]]:
        """Return the windows of each portion that is left, which alone are fed together; of ``longppl`` the short too.

        Nothing is left of a pass whose records are there.
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
            found = self.finder.find(text, portion.windows[0].end, advance)
            totals, positions = [key_totals(run, *found) for run in one.runs], [NO_TOTALS for _ in one.runs]
        else:
            losses = self._losses(one, text, portion, advance)
            totals = [run_totals(run, portion.windows, losses, len(text)) for run in one.runs]
            positions = [self._by_position(run, losses[0]) for run in one.runs]
        return Finished(totals + positions, time.perf_counter() - started)

    def _by_position(self, run: Run, losses: torch.Tensor) -> Totals:
        """Return the totals of each bucket of positions; ``losses`` are of the text's tokens from the second on."""
        width = self.buckets[run]
        return NO_TOTALS if width is None else position_totals(losses[: run.context_length - 1], 1, width)

    def _losses(self, one: Pass, text: torch.Tensor, portion: Portion, advance: Advance | None) -> list[torch.Tensor]:
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

    def _finish(self, one: Pass, num_portions: int, peak_memory_bytes: int) -> None:
        key = self._key(one)
        finished = [self.progress.get(key, index) for index in range(num_portions)]
        done = [document for document in finished if document is not None]
        seconds = math.fsum(document.seconds for document in done)
        for at, run in enumerate(one.runs):
            if run in self.records:
                continue
            totals = join_portions(run, [document.runs[at] for document in done])
            positions = add_totals([document.runs[len(one.runs) + at] for document in done])
            if not totals:
                logger.warning("longppl at %d tokens: there is no key token, so no result.", run.context_length)
                continue
            identity = {**self.identities[run], "position_bucket": self.buckets[run]}
            record = make_record(identity, totals, positions, self.seed, seconds, peak_memory_bytes)
            self.records[run] = record
            if self.output is not None:
                append_line(self.output, record.to_json())
