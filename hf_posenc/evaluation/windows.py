"""Windows over a text: what is fed together, and which tokens of it are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_posenc.errors import InvalidRequestError

_TOKENS_OF_A_GROUP = 2**18


@dataclass(frozen=True)
class Window:
    """Tokens ``[start, end)`` are fed together and tokens ``[score_from, end)`` are scored.

    With ``bos``, a BOS token of its own stands before them, so that the first one can be scored too.
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

    Unlike ``sliding_windows``, the last one begins where its turn is and ends with the document, so it is shorter.

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


def lay_out(text: torch.Tensor, windows: Sequence[Window], bos_id: int | None) -> tuple[torch.Tensor, list[Window]]:
    """Put windows of a text side by side, each with its own BOS if it has one.

    Args:
        text: int64 ``(num_tokens,)``.
        windows: Of the text.
        bos_id: Token id; None where no window has a BOS.

    Returns:
        int64 ``(all that is fed,)``, and each window's place in it.
    """
    parts, placed, at = [], [], 0
    for window in windows:
        tokens = text[window.start : window.end]
        if window.bos:
            tokens = torch.cat([text.new_tensor([bos_id]), tokens])
        placed.append(Window(at, at + len(tokens), at + window.bos + window.score_from - window.start))
        parts.append(tokens)
        at += len(tokens)
    return torch.cat(parts), placed
