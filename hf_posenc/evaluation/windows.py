"""The windows that are read and the tokens of them that are scored, as functions of numbers: no model, no PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, argument
from hf_posenc.evaluation.protocols import PROTOCOLS, Average, Bos, ProtocolName, Rule, in_words, rule_of

DEFAULT_STRIDE = 256
_TOKENS_OF_A_GROUP = 2**18


@dataclass(frozen=True)
class Window:
    """Tokens ``[start, end)`` are fed together and tokens ``[score_from, end)`` are scored.

    With ``bos``, they have a BOS token of their own before them, so that the first one can be scored too.
    """

    start: int
    end: int
    score_from: int
    bos: bool = False


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
        raise InvalidRequestError(
            f"a document needs at least 2 tokens, got {num_tokens}: the first one is never scored."
        )
    check_stride(window, stride)
    windows = [Window(0, min(window, num_tokens), 1)]
    while (done := windows[-1].end) < num_tokens:
        end = min(done + stride, num_tokens)
        windows.append(Window(end - window, end, done))
    return windows


def stepping_windows(num_tokens: int, window: int, stride: int, bos: bool = False) -> list[Window]:
    """Cover a document as YaRN's and PoSE's code does: a window every ``stride`` tokens, each scoring what is new.

    Unlike in ``sliding_windows``, the last one too begins ``stride`` tokens after the one before; it ends with the
    document, so it is shorter.

    Args:
        num_tokens: Tokens of the document, without any BOS.
        window: Tokens fed at a time at most, the BOS included.
        stride: Tokens from the beginning of a window to that of the next, at most what fits a window.
        bos: Whether each window has a BOS token before it.

    Raises:
        ValueError: One of them is out of its range.

    Reference: jquesnelle/yarn, eval/perplexity.py, ``compute_perplexity``.
    """
    fits = window - 1 if bos else window
    check_stride(window, stride)
    if num_tokens < 2:
        raise InvalidRequestError(
            f"a document needs at least 2 tokens, got {num_tokens}: the first one may not be scored."
        )
    windows: list[Window] = []
    start = 0
    while not windows or windows[-1].end < num_tokens:
        done = windows[-1].end if windows else 0 if bos else 1
        windows.append(Window(start, min(start + fits, num_tokens), done, bos))
        start += stride
    return windows


def whole_windows(num_tokens: int, window: int, stride: int) -> list[Window]:
    """Take a window of a stream every ``stride`` tokens, each scored whole, as LongLoRA's code does.

    The last window that would fit is left out, and so is one that ends with the stream: both are in that code.

    Raises:
        ValueError: The stream is too short for one.

    Reference: dvlab-research/LongLoRA, eval.py, ``get_as_batch``; the same in HKUNLP/ChunkLlama, ppl/test_ppl.py.
    """
    check_stride(window, stride)
    windows = [Window(start, start + window, start + 1) for start in range(0, num_tokens - window, stride)][:-1]
    if not windows:
        raise InvalidRequestError(
            f"all documents together have {num_tokens} tokens; windows of {window} every {stride} tokens, of which the "
            f"last is left out, need {window + stride + 1}. Give more text or shorter context lengths."
        )
    return windows


def check_stride(window: int, stride: int) -> None:
    """Raise unless every token can be scored with at least one token before it."""
    if window < 2:
        raise InvalidRequestError(f"a window needs at least 2 tokens, got {window}.")
    if not 1 <= stride < window:
        raise InvalidRequestError(
            f"stride must be from 1 to window - 1 = {window - 1}, got {stride}: "
            "the first token of a window has nothing before it to be predicted from."
        )


def grouped(windows: Sequence[Window]) -> list[list[Window]]:
    """Split windows into groups of neighbours that are fed at most 262,144 tokens, or are a single one."""
    groups: list[list[Window]] = []
    room = 0
    for window in windows:
        size = window.end - window.start + window.bos
        if size > room:
            groups.append([])
            room = _TOKENS_OF_A_GROUP
        groups[-1].append(window)
        room -= size
    return groups


@dataclass(frozen=True)
class Run:
    """One number to come: a protocol at one context length (tokens), and what else decides which tokens are scored.

    ``stride``, ``last_k`` and ``score_from`` (the first token scored) are None where they have no meaning; ``bos`` says
    where there is a BOS token and ``average`` what is averaged.
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

    def facts(self, num_documents: int, max_tokens: int | None) -> dict[str, Any]:
        """Return the fields of a record that say what was measured; ``scored`` says it in words."""
        numbers = {"stride": self.stride, "last_k": self.last_k}
        words = in_words(
            self.protocol, self.bos, self.average, max_tokens, n=self.context_length, first=self.score_from, **numbers
        )
        return {
            "protocol": self.protocol,
            "context_length": self.context_length,
            "window": self.window,
            **numbers,
            "max_tokens": max_tokens,
            "bos": self.bos,
            "average": self.average,
            "scored": words,
            "num_documents": num_documents,
        }

    def fed(self, num_tokens: int) -> int:
        """Return the number of a document's first tokens that the result depends on."""
        return self.context_length if self.rule.shape == "beginning" else num_tokens

    def scored(self, num_tokens: int) -> range:
        """Return the positions whose losses are summed, in a document of ``num_tokens`` tokens."""
        first = self.score_from or (0 if self.bos == "each_window" else 1)
        if self.last_k is not None:
            first = self.fed(num_tokens) - self.last_k
        return range(first, self.fed(num_tokens))

    @property
    def least_tokens(self) -> int:
        """The tokens of a document, a prepended BOS included, of which at least one is scored."""
        return max(2, 1 + (self.last_k or self.score_from or 0))

    def windows(self, num_tokens: int) -> list[Window]:
        """Return the windows of a document or stream of ``num_tokens`` tokens, and the tokens that each scores."""
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
    """Return the runs of each protocol by rising length, each once.

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
    lengths = whole_lengths(context_lengths)
    if not lengths or lengths[0] < 2:
        raise InvalidRequestError(
            f"{argument('context_lengths')} must be one or more numbers of tokens, each at least 2, got {lengths}."
        )
    runs: list[Run] = []
    for name in dict.fromkeys(protocols):
        rule = rule_of(name)
        last = rule.last_k if last_k is None or rule.last_k is None else last_k
        if last is not None and not 1 <= last < lengths[0]:
            raise InvalidRequestError(
                f"{argument('last_k')} must be at least 1 and less than the shortest context length, got {last} and "
                f"{lengths[0]}. Lower {argument('last_k')}, or leave the short lengths to another protocol."
            )
        if name == "same_tokens" and len(lengths) < 2:
            raise InvalidRequestError(
                "same_tokens scores at every length the tokens from the shortest one on: give two context lengths or "
                f"more, got {lengths}."
            )
        first = lengths[0] if name == "same_tokens" else None
        for length in lengths:
            step = None if not rule.moves else default_stride(name, length) if stride is None else stride
            if step is not None:
                check_stride(length, step)
            runs.append(
                Run(
                    name,  # type: ignore[arg-type]  # rule_of knows it
                    length,
                    stride=step,
                    last_k=last,
                    score_from=first,
                    bos=rule.bos or "none",
                    average=average or rule.average,
                )
            )
    if not runs:
        raise InvalidRequestError(f"protocol is empty. Known: {', '.join(PROTOCOLS)}.")
    return runs


def whole_lengths(context_lengths: Iterable[int]) -> list[int]:
    """Return lengths rising, each once.

    Raises:
        TypeError: They are no list of whole numbers.
    """
    if isinstance(context_lengths, str) or not isinstance(context_lengths, Iterable):
        raise InvalidTypeError(
            f"{argument('context_lengths')} must be a list of numbers of tokens, such as [512, 2048], got "
            f"{context_lengths!r}."
        )
    lengths = list(context_lengths)
    for length in lengths:
        if not hasattr(length, "__index__"):
            raise InvalidTypeError(f"{argument('context_lengths')} must be whole numbers of tokens, got {length!r}.")
    return sorted({operator.index(length) for length in lengths})


def default_stride(protocol: str, window: int) -> int:
    """Return the stride of a protocol that moves a window: the published one, or ours."""
    ours = DEFAULT_STRIDE if window > DEFAULT_STRIDE and protocol != "same_tokens" else max(1, window // 2)
    return rule_of(protocol).stride or ours


def doublings(original: int, target: int) -> list[int]:
    """Return the original length, its doublings below the target, and the target."""
    lengths = [original]
    while 2 * lengths[-1] < target:
        lengths.append(2 * lengths[-1])
    return [*lengths, target]


@dataclass(frozen=True)
class Portion:
    """A portion of the work, remembered when it is done: windows of one text."""

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
        """Return the windows of a document of ``num_tokens`` tokens."""
        if self.runs[0].rule.shape != "beginning":
            return self.runs[0].windows(num_tokens)
        return [Window(0, max(run.context_length for run in self.runs), 1)]

    def scored(self, num_tokens: int) -> list[range]:
        """Return the positions in a document of ``num_tokens`` tokens that some run scores; only these need a loss."""
        return [run.scored(num_tokens) for run in self.runs]

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
        key: tuple[object, ...] = (rule.shape, run.bos, run.protocol == "longppl")
        if rule.shape != "beginning":
            key += (run.context_length, run.stride, run.last_k, run.score_from)
        elif not causal_in_position:
            key += (run.context_length,)
        groups.setdefault(key, []).append(run)
    return [Pass(tuple(group)) for group in groups.values()]
