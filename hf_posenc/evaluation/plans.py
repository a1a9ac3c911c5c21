"""What is fed and which tokens are scored, as pure functions of numbers: no model, no text."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

Protocol = Literal["truncated", "last_k", "sliding_window"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
DEFAULT_STRIDE = 256
DEFAULT_LAST_K = 256
T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """Tokens ``[start, end)`` are fed together and tokens ``[score_from, end)`` are scored."""

    start: int
    end: int
    score_from: int


def sliding_windows(num_tokens: int, window: int, stride: int) -> list[Window]:
    """Cover a document so that every token but the first is scored exactly once.

    The first window scores all it can; each later one ends ``stride`` tokens further and scores only what is new.
    The last one is as long as the others, moved back to end with the document, so its tokens miss no context.

    Args:
        num_tokens: Tokens of the document, at least 2.
        window: Tokens fed at a time, at least 2.
        stride: New tokens scored a window, from 1 to ``window - 1``; smaller gives more context and more work.

    Raises:
        ValueError: One of them is out of its range.

    Reference: Press et al. 2021, arXiv:2012.15832, section 2 ("sliding window" evaluation).
    """
    if num_tokens < 2:
        raise ValueError(f"a document needs at least 2 tokens, got {num_tokens}: the first one is never scored.")
    check_stride(window, stride)
    windows = [Window(0, min(window, num_tokens), 1)]
    while (done := windows[-1].end) < num_tokens:
        end = min(done + stride, num_tokens)
        windows.append(Window(end - window, end, done))
    return windows


def check_stride(window: int, stride: int) -> None:
    """Raise unless every token can be scored with at least one token before it."""
    if window < 2:
        raise ValueError(f"a window needs at least 2 tokens, got {window}.")
    if not 1 <= stride < window:
        raise ValueError(
            f"stride must be from 1 to window - 1 = {window - 1}, got {stride}: "
            "the first token of a window has nothing before it to be predicted from."
        )


@dataclass(frozen=True)
class Run:
    """One number to come: a protocol at one context length (tokens); ``stride`` and ``last_k`` where they are meant."""

    protocol: Protocol
    context_length: int
    stride: int | None = None
    last_k: int | None = None

    @property
    def window(self) -> int | None:
        """Tokens fed at a time by the sliding window; None for the protocols that feed the document's beginning."""
        return self.context_length if self.protocol == "sliding_window" else None

    def fed(self, num_tokens: int) -> int:
        """Return how many of a document's first tokens the number depends on."""
        return num_tokens if self.protocol == "sliding_window" else self.context_length

    def scored(self, num_tokens: int) -> range:
        """Return the positions whose losses are summed, in a document of ``num_tokens`` tokens."""
        first = 1 if self.last_k is None else self.context_length - self.last_k
        return range(first, self.fed(num_tokens))


def plan_runs(
    protocols: Sequence[str], context_lengths: Iterable[int], stride: int | None = None, last_k: int = DEFAULT_LAST_K
) -> list[Run]:
    """Return the runs of each protocol by rising length, each asked for once.

    Args:
        protocols: Names from ``PROTOCOLS``.
        context_lengths: Tokens, each at least 2.
        stride: For ``sliding_window``; None takes 256, or half of a window that is not longer than that.
        last_k: Tokens scored by ``last_k``; less than every context length.

    Raises:
        TypeError: ``context_lengths`` is not a list of whole numbers.
        ValueError: An unknown protocol, no length, or a length, stride or last_k out of its range.
    """
    lengths = sorted({_whole(length) for length in _as_list(context_lengths)})
    if not lengths or lengths[0] < 2:
        raise ValueError(f"context_lengths must be one or more numbers of tokens, each at least 2, got {lengths}.")
    runs: list[Run] = []
    for protocol in dict.fromkeys(protocols):
        if protocol == "truncated":
            runs += [Run("truncated", length) for length in lengths]
        elif protocol == "last_k":
            _check_last_k(last_k, lengths[0])
            runs += [Run("last_k", length, last_k=last_k) for length in lengths]
        elif protocol == "sliding_window":
            runs += [Run("sliding_window", length, stride=_stride(length, stride)) for length in lengths]
        else:
            raise ValueError(f"unknown protocol {protocol!r}. Known: {', '.join(PROTOCOLS)}.")
    if not runs:
        raise ValueError(f"protocol is empty. Known: {', '.join(PROTOCOLS)}.")
    return runs


def _as_list(context_lengths: Iterable[int]) -> list[int]:
    if isinstance(context_lengths, str) or not isinstance(context_lengths, Iterable):
        raise TypeError(
            f"context_lengths must be a list of numbers of tokens, such as [512, 2048], got {context_lengths!r}."
        )
    return list(context_lengths)


def _whole(length: int) -> int:
    try:
        return operator.index(length)
    except TypeError:
        raise TypeError(f"context_lengths must be whole numbers of tokens, got {length!r}.") from None


def _check_last_k(last_k: int, shortest: int) -> None:
    if not 1 <= last_k < shortest:
        raise ValueError(
            f"last_k must be at least 1 and less than the shortest context length, got {last_k} and {shortest}. "
            "Lower last_k, or leave the short lengths to another protocol."
        )


def _stride(window: int, stride: int | None) -> int:
    if stride is None:
        stride = DEFAULT_STRIDE if window > DEFAULT_STRIDE else max(1, window // 2)
    check_stride(window, stride)
    return stride


@dataclass(frozen=True)
class Pass:
    """Runs that share what the model is fed: one walk over a document serves them all."""

    runs: tuple[Run, ...]

    def windows(self, num_tokens: int) -> list[Window]:
        """Return what to feed of a document of ``num_tokens`` tokens."""
        first = self.runs[0]
        if first.window is not None and first.stride is not None:
            return sliding_windows(num_tokens, first.window, first.stride)
        return [Window(0, max(run.context_length for run in self.runs), 1)]

    def num_tokens_fed(self, num_tokens: int) -> int:
        """Return the work in tokens, for the progress bar."""
        return sum(window.end - window.start for window in self.windows(num_tokens))


def plan_passes(runs: Sequence[Run], causal_in_position: bool) -> list[Pass]:
    """Group runs into as few passes as give right numbers.

    A causal model knows the same of token t whatever follows, so one pass at the longest length holds the losses of
    all shorter ones. Where the frequencies depend on the length of what is fed, each length is its own pass.
    """
    groups: dict[tuple[int, ...], list[Run]] = {}
    for run in runs:
        if run.stride is not None:
            key: tuple[int, ...] = (run.context_length, run.stride)
        else:
            key = () if causal_in_position else (run.context_length,)
        groups.setdefault(key, []).append(run)
    return [Pass(tuple(group)) for group in groups.values()]


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """Return at most ``count`` items, evenly spread over the sequence, in order; None returns all."""
    if count is None or count >= len(items):
        return list(items)
    if count < 1:
        raise ValueError(f"max_documents must be at least 1, got {count}.")
    return [items[index * len(items) // count] for index in range(count)]
