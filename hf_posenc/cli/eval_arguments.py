"""The flags of ``hf-posenc eval``, as those of the other commands in ``arguments``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hf_posenc.utils.units import ContextLength

# The same as in evaluation.plans, whose package imports PyTorch: too slow for --help.
PROTOCOLS = (
    *("truncated", "last_k", "sliding_window", "same_tokens", "longppl"),
    *("yarn", "yarn_govreport", "pi", "pose", "longlora", "dca", "rerope"),
)
TASKS = ("passkey", "niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe")


@dataclass
class EvalArguments:
    """What is measured, and where the numbers go."""

    context_lengths: list[ContextLength] = field(metadata={"help": "tokens fed at a time: 512 2k 32k"})
    method: list[str] = field(
        default_factory=list,
        metadata={"help": "one or more from `hf-posenc methods`, or none: as it is; default: none, or --preset"},
    )
    protocol: list[str] = field(
        default_factory=lambda: ["truncated"],
        metadata={
            "help": "which tokens are scored, one or more of " + ", ".join(PROTOCOLS) + "; results say it in words",
            "choices": PROTOCOLS,
            "metavar": "PROTOCOL",
        },
    )
    output: str | None = field(
        default=None, metadata={"help": "append results to this .jsonl file, and resume from it"}
    )
    stride: int | None = field(
        default=None, metadata={"help": "new tokens of a window; default: the published number, else 256"}
    )
    last_k: int | None = field(default=None, metadata={"help": "tokens scored by last_k (256) and rerope (4096)"})
    max_tokens: ContextLength | None = field(
        default=None,
        metadata={"help": "tokens of a document that windows cover; default: the longest length, or as published"},
    )
    min_tokens: ContextLength | None = field(
        default=None, metadata={"help": "take documents from so many tokens on; default: the longest length"}
    )
    average: Literal["tokens", "windows"] | None = field(
        default=None, metadata={"help": "windows: mean of window means, as in some papers; default: the protocol's own"}
    )
    evaluator: str | None = field(
        default=None,
        metadata={"help": "model that chooses longppl's key tokens; default: the measured one itself"},
    )
    alpha: float = field(default=2.0, metadata={"help": "nats a key token of longppl gains from the long context"})
    beta: float = field(default=-2.0, metadata={"help": "log-probability a key token of longppl has after it"})
    short_context: ContextLength | None = field(
        default=None, metadata={"help": "tokens longppl compares with; default: 4096, at most half the original length"}
    )
    bos: Literal["prepended"] | None = field(default=None, metadata={"help": "put a BOS token before every document"})
    prefill_chunk: ContextLength | None = field(
        default=None,
        metadata={"help": "feed so many tokens at a time over a KV cache: same numbers; the log tells the memory"},
    )
    batch_size: int | None = field(
        default=None, metadata={"help": "sliding windows fed together; default: by their length, 1 for long ones"}
    )
    max_documents: int | None = field(default=None, metadata={"help": "at most so many documents, evenly spread"})
    cut: bool = field(default=False, metadata={"help": "cut long documents into pieces of the longest length"})
    label: str = field(default="", metadata={"help": "words for the row in a report"})
    model_name: str | None = field(
        default=None,
        metadata={"help": "the model's name in results, where rows of one name are compared; default: as given"},
    )
    hide_progress: bool = field(default=False, metadata={"help": "no progress bar"})


@dataclass
class RetrievalArguments:
    """What is hidden in long texts and asked for, instead of measuring perplexity."""

    tasks: list[str] = field(
        default_factory=list,
        metadata={
            "help": "retrieval, by default in the package's novels, instead of perplexity: one or more of "
            + ", ".join(TASKS)
        },
    )
    depths: list[float] = field(
        default_factory=lambda: [0.0, 25.0, 50.0, 75.0, 100.0],
        metadata={"help": "where it is hidden, in percent of the text before it"},
    )
    samples: int = field(default=1, metadata={"help": "prompts of each task, length and depth"})
    chat: Literal["auto", "on", "off"] = field(
        default="auto", metadata={"help": "ask in the tokenizer's chat template: on, off, or where there is one"}
    )
