"""What is fed and which tokens are scored, as pure functions of numbers: no model, no text."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, argument
from hf_posenc.evaluation.protocols import PROTOCOLS, Average, Bos, ProtocolName, Rule, in_words, rule_of
from hf_posenc.evaluation.windows import (
    Window,
    check_stride,
    grouped,
    sliding_windows,
    stepping_windows,
    whole_windows,
)

__all__ = [
    "DEFAULT_LAST_K",
    "PROTOCOLS",
    "Pass",
    "Portion",
    "Run",
    "Window",
    "plan_passes",
    "plan_runs",
    "sliding_windows",
    "spread",
]
DEFAULT_STRIDE = 256
DEFAULT_LAST_K = 256
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One number to come: a protocol at one context length (tokens), and what else decides which tokens are scored.

    ``stride``, ``last_k`` and ``score_from`` (the first token scored) are None where they have no meaning; ``bos`` says
    where a BOS token stands and ``average`` what is averaged.
    """

    protocol: ProtocolName
    context_length: int
    stride: int | None = None
    last_k: int | None = None
    score_from: int | None = None
    bos: Bos = "none"
    average: Average = "tokens"

    @property
    def rule(self) -> Rule:
        """The protocol's row of the table."""
        return rule_of(self.protocol)

    @property
    def window(self) -> int | None:
        """Tokens fed at a time by protocols that move a window; None for those that feed one stretch of a document."""
        return None if self.rule.shape in ("beginning", "end") else self.context_length

    @property
    def words(self) -> str:
        """Which tokens are scored, where a BOS token stands, and what is averaged."""
        return in_words(
            self.protocol,
            self.bos,
            self.average,
            n=self.context_length,
            stride=self.stride,
            last_k=self.last_k,
            first=self.score_from,
        )

    def facts(self, num_documents: int) -> dict[str, Any]:
        """Return the fields of a record that say what was measured, next to those ``identify_run`` gives."""
        return {"bos": self.bos, "average": self.average, "scored": self.words, "num_documents": num_documents}

    def fed(self, num_tokens: int) -> int:
        """Return how many of a document's first tokens the number depends on."""
        return self.context_length if self.rule.shape == "beginning" else num_tokens

    def scored(self, num_tokens: int) -> range:
        """Return the positions whose losses are summed, in a document of ``num_tokens`` tokens."""
        first = self.score_from or (0 if self.bos == "each_window" else 1)
        if self.last_k is not None:
            first = self.fed(num_tokens) - self.last_k
        return range(first, self.fed(num_tokens))

    def windows(self, num_tokens: int) -> list[Window]:
        """Return what to feed of a document or stream of ``num_tokens`` tokens, and what each window scores."""
        shape, length = self.rule.shape, self.context_length
        if shape == "beginning":
            return [Window(0, length, self.scored(num_tokens).start)]
        if shape == "end":
            # The last token is only foreseen, so one more than the context length is looked at.
            return [Window(max(0, num_tokens - length - 1), num_tokens, self.scored(num_tokens).start)]
        stride = self.stride or DEFAULT_STRIDE
        if shape == "steps":
            return stepping_windows(num_tokens, length, stride, self.bos == "each_window")
        if shape == "stream":
            return whole_windows(num_tokens, length, stride)
        windows = sliding_windows(num_tokens, length, stride)
        first = self.score_from or 0
        return [replace(one, score_from=max(one.score_from, first)) for one in windows if one.end > first]


def plan_runs(
    protocols: Sequence[str],
    context_lengths: Iterable[int],
    stride: int | None = None,
    last_k: int | None = None,
    average: Average | None = None,
) -> list[Run]:
    """Return the runs of each protocol by rising length, each asked for once.

    Args:
        protocols: Names from ``PROTOCOLS``.
        context_lengths: Tokens, each at least 2.
        stride: For protocols that move a window; None takes the published one, half the context length for
            ``same_tokens``, and else 256, or half of a window that is not longer than that.
        last_k: Tokens scored by ``last_k`` (None: 256) and ``rerope`` (None: 4096); less than every context length.
        average: What is averaged; None takes the protocol's own.

    Raises:
        TypeError: ``context_lengths`` is not a list of whole numbers.
        ValueError: An unknown protocol, no length, or a length, stride or last_k out of its range.
    """
    lengths = sorted({_whole(length) for length in _as_list(context_lengths)})
    if not lengths or lengths[0] < 2:
        raise InvalidRequestError(
            f"{argument('context_lengths')} must be one or more numbers of tokens, each at least 2, got {lengths}."
        )
    runs: list[Run] = []
    for name in dict.fromkeys(protocols):
        rule = rule_of(name)
        if name in ("last_k", "rerope"):
            _check_last_k(rule.last_k or DEFAULT_LAST_K if last_k is None else last_k, lengths[0])
        if name == "same_tokens" and len(lengths) < 2:
            raise InvalidRequestError(
                "same_tokens scores at every length the tokens between the shortest and the longest: give two context "
                f"lengths or more, got {lengths}."
            )
        runs += [_plan(name, rule, length, lengths[0], stride, last_k, average) for length in lengths]
    if not runs:
        raise InvalidRequestError(f"protocol is empty. Known: {', '.join(PROTOCOLS)}.")
    return runs


def _plan(
    name: str,
    rule: Rule,
    length: int,
    shortest: int,
    stride: int | None,
    last_k: int | None,
    average: Average | None,
) -> Run:
    moves = rule.shape in ("sliding", "steps", "stream")
    if moves and stride is None and name == "same_tokens":
        stride = max(1, length // 2)
    if name in ("last_k", "rerope"):
        last_k = rule.last_k or DEFAULT_LAST_K if last_k is None else last_k
    return Run(
        name,  # type: ignore[arg-type]  # rule_of knows it
        length,
        stride=_stride(length, rule.stride if stride is None else stride) if moves else None,
        last_k=last_k if name in ("last_k", "rerope") else None,
        score_from=shortest if name == "same_tokens" else None,
        bos=rule.bos or "none",
        average=average or rule.average,
    )


def _as_list(context_lengths: Iterable[int]) -> list[int]:
    if isinstance(context_lengths, str) or not isinstance(context_lengths, Iterable):
        raise InvalidTypeError(
            f"{argument('context_lengths')} must be a list of numbers of tokens, such as [512, 2048], got "
            f"{context_lengths!r}."
        )
    return list(context_lengths)


def _whole(length: int) -> int:
    try:
        return operator.index(length)
    except TypeError:
        raise InvalidTypeError(
            f"{argument('context_lengths')} must be whole numbers of tokens, got {length!r}."
        ) from None


def _check_last_k(last_k: int, shortest: int) -> None:
    if not 1 <= last_k < shortest:
        raise InvalidRequestError(
            f"{argument('last_k')} must be at least 1 and less than the shortest context length, got {last_k} and "
            f"{shortest}. "
            f"Lower {argument('last_k')}, or leave the short lengths to another protocol."
        )


def _stride(window: int, stride: int | None) -> int:
    if stride is None:
        stride = DEFAULT_STRIDE if window > DEFAULT_STRIDE else max(1, window // 2)
    check_stride(window, stride)
    return stride


@dataclass(frozen=True)
class Portion:
    """What is done at one go, and remembered when done: windows of one text."""

    text: int
    windows: tuple[Window, ...]

    @property
    def num_tokens_fed(self) -> int:
        """The work in tokens, for the progress bar."""
        return sum(window.end - window.start + window.bos for window in self.windows)


@dataclass(frozen=True)
class Pass:
    """Runs that share what the model is fed: one walk over a document serves them all."""

    runs: tuple[Run, ...]

    def windows(self, num_tokens: int) -> list[Window]:
        """Return what to feed of a document of ``num_tokens`` tokens."""
        if self.runs[0].rule.shape != "beginning":
            return self.runs[0].windows(num_tokens)
        return [Window(0, max(run.context_length for run in self.runs), 1)]

    def asked(self, num_tokens: int) -> list[range]:
        """Return the positions in a document of ``num_tokens`` tokens that some run scores; only these need a loss."""
        return [run.scored(num_tokens) for run in self.runs]

    def num_tokens_fed(self, num_tokens: int) -> int:
        """Return the work in tokens on a document of ``num_tokens`` tokens."""
        return sum(portion.num_tokens_fed for portion in self.portions([num_tokens]))

    def portions(self, lengths: Sequence[int]) -> list[Portion]:
        """Return the work on texts of so many tokens: each text by itself, a stream in groups of windows."""
        portions = []
        for text, num_tokens in enumerate(lengths):
            windows = self.windows(num_tokens)
            parts = grouped(windows) if self.runs[0].rule.shape == "stream" else [windows]
            portions += [Portion(text, tuple(part)) for part in parts]
        return portions


def plan_passes(runs: Sequence[Run], causal_in_position: bool) -> list[Pass]:
    """Group runs into as few passes as give right numbers.

    A causal model knows the same of token t whatever follows, so one pass at the longest length holds the losses of
    all shorter ones. Where the frequencies depend on the length of what is fed, each length is its own pass.
    """
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        rule = run.rule
        key: tuple[object, ...] = (rule.shape, rule.whole, run.bos, run.protocol == "longppl")
        if rule.shape != "beginning":
            key += (run.context_length, run.stride, run.last_k, run.score_from)
        elif not causal_in_position:
            key += (run.context_length,)
        groups.setdefault(key, []).append(run)
    return [Pass(tuple(group)) for group in groups.values()]


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """Return at most ``count`` items, evenly spread over the sequence, in order; None returns all."""
    if count is None or count >= len(items):
        return list(items)
    if count < 1:
        raise InvalidRequestError(f"{argument('max_documents')} must be at least 1, got {count}.")
    return [items[index * len(items) // count] for index in range(count)]
