"""Ways of measuring perplexity, by name: ours, and the published ones as their authors' code runs them.

What papers call a perplexity at N tokens differs by more than the methods do that they compare: which tokens are
scored, how much context each has, whether there is a BOS token, and what is averaged. This is the one table of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hf_posenc.errors import UnknownNameError

ProtocolName = Literal[
    "truncated",
    "last_k",
    "sliding_window",
    "same_tokens",
    "longppl",
    "yarn",
    "yarn_govreport",
    "pi",
    "pose",
    "longlora",
    "dca",
    "rerope",
]
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)
Average = Literal["tokens", "windows"]
# Where there is a BOS token: nowhere, before every document (as one of its tokens), or before every window.
Bos = Literal["none", "prepended", "each_window"]
# What is fed, and what of it is scored: see ``hf_posenc.evaluation.windows``.
Shape = Literal["beginning", "sliding", "steps", "stream", "end"]


@dataclass(frozen=True)
class Rule:
    """One protocol.

    Attributes:
        source: Paper, table and code it comes from; for published ones what is written there was read in the code.
        shape: What is fed.
        scored: Which tokens are scored, in words; ``{n}`` is the context length, ``{stride}``, ``{last_k}`` and
            ``{first}`` are the run's.
        bos: ``None`` leaves it to whoever measures; ``prepended`` and ``each_window`` apply where there is a BOS token.
        needs_bos: Whether there has to be one.
        stride: The published number of new tokens a window; None takes ours.
        last_k: Tokens scored at the end, unless another number is requested; None for protocols that score others.
        average: ``windows`` for the mean of window means, where each window counts the same however few its tokens.
        by_position: Whether each scored token is at its own position of one text, so that records can hold the loss
            by position.
    """

    source: str
    shape: Shape
    scored: str
    bos: Bos | None = None
    needs_bos: bool = False
    stride: int | None = None
    last_k: int | None = None
    average: Average = "tokens"
    by_position: bool = False

    @property
    def moves(self) -> bool:
        """Whether a window moves over what is read."""
        return self.shape in ("sliding", "steps", "stream")

    @property
    def whole(self) -> bool:
        """Whether documents are read to their end, or to ``max_tokens``."""
        return self.shape != "beginning"


_PRESS = "Press et al. 2021, arXiv:2012.15832, section 2"
_STREAM = (
    "All documents are one stream, with nothing between them. Windows of {n} tokens begin every {stride} tokens of it, "
    "the last one left out; all tokens of a window but its first are scored, so most are scored again in later windows."
)
_BEGINNING = "The first {n} tokens of each document are read in one go; all but the first token are scored."
_STEPS = (
    "Windows of {n} tokens begin every {stride} tokens of each document, the last one cut short by its end; each "
    "scores what no window before it scored."
)
RULES: dict[ProtocolName, Rule] = {
    "truncated": Rule("ours; one pass serves all lengths", "beginning", _BEGINNING, by_position=True),
    "last_k": Rule(
        "ours",
        "beginning",
        "The first {n} tokens of each document are read in one go; the last {last_k} of them are scored.",
        last_k=256,
    ),
    "sliding_window": Rule(
        f"ours, after {_PRESS}",
        "sliding",
        "A window of {n} tokens moves over each document by {stride} tokens, the last one by what is left; every token "
        "but the first is scored once, in the first window that has it.",
    ),
    "same_tokens": Rule(
        "ours, for comparing methods and lengths",
        "sliding",
        "The same tokens at every length: those from token {first} of each document on. A window of {n} tokens moves "
        "by {stride}; each token is scored once, in the first window that has it.",
    ),
    "longppl": Rule(
        "LongPPL, arXiv:2410.23771, section 3; PyPI longppl 0.3.0, longppl/longppl.py",
        "beginning",
        "The first {n} tokens of each document are read in one go; of them the key tokens are scored, which need the "
        "long context to be foreseen.",
    ),
    "yarn": Rule(
        "YaRN, arXiv:2309.00071, tables 1, 2 and 6; jquesnelle/yarn, eval/perplexity.py --truncate, which makes the "
        '"sliding window S=256" of the captions a stride of the whole length',
        "beginning",
        _BEGINNING,
        bos="prepended",
        by_position=True,
    ),
    "yarn_govreport": Rule(
        "YaRN, arXiv:2309.00071, table 4 (GovReport); jquesnelle/yarn, eval/perplexity.py --sliding-window 256",
        "steps",
        _STEPS,
        bos="each_window",
        stride=256,
        average="windows",
    ),
    "pi": Rule(
        f"Position Interpolation, arXiv:2306.15595, S=256 after {_PRESS}; no code was published",
        "sliding",
        "A window of {n} tokens moves over each document by {stride} tokens, the last one by what is left; every token "
        "but the first is scored once, in the first window that has it.",
        stride=256,
    ),
    "pose": Rule(
        "PoSE, arXiv:2309.10400, table 1; dwzhu-pku/PoSE, src/eval_ppl.py",
        "steps",
        _STEPS,
        bos="each_window",
        needs_bos=True,
        stride=1024,
    ),
    "longlora": Rule(
        "LongLoRA, arXiv:2309.12307, PG19 and Proof-pile; dvlab-research/LongLoRA, eval.py --batch_size 1",
        "stream",
        _STREAM,
        stride=256,
    ),
    "dca": Rule(
        "Dual Chunk Attention, arXiv:2402.17463, PG19; HKUNLP/ChunkLlama, ppl/test_ppl.py",
        "stream",
        _STREAM,
        stride=256,
    ),
    "rerope": Rule(
        "ReRoPE, github.com/bojone/rerope, eval_loss.py",
        "end",
        "The last {last_k} tokens of each document are scored, after reading the {n} tokens before its last.",
        last_k=4096,
    ),
}
_BOS_WORDS: dict[Bos, str] = {
    "none": "No BOS token is added.",
    "prepended": "A BOS token stands before each document and counts as one of its tokens.",
    "each_window": "A BOS token stands before each window and counts as one of its tokens.",
}
_AVERAGE_WORDS: dict[Average, str] = {
    "tokens": "Perplexity is exp(nats / tokens scored), both summed over all documents.",
    "windows": "Perplexity is exp(mean of the windows' mean losses): a window with few tokens counts like a full one.",
}


def rule_of(name: str) -> Rule:
    """Return the rule of a protocol.

    Raises:
        ValueError: There is none of that name.
    """
    for known, rule in RULES.items():
        if known == name:
            return rule
    raise UnknownNameError("protocol", name, PROTOCOLS)


def in_words(
    name: ProtocolName, bos: Bos, average: Average, max_tokens: int | None, **numbers: int | str | None
) -> str:
    """Say which tokens a number is of, where there was a BOS token, and what was averaged."""
    rule = RULES[name]
    where = _BOS_WORDS[bos]
    if rule.shape == "stream" and bos == "prepended":
        where = "One BOS token stands before the stream."
    read = "stream" if rule.shape == "stream" else "document"
    limit = [] if max_tokens is None or not rule.whole else [f"A {read} ends after {max_tokens} tokens."]
    return " ".join([rule.scored.format(**numbers), *limit, where, _AVERAGE_WORDS[average]])
