"""The commands that measure a report's numbers again: as they were typed, or put together from what records say."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hf_posenc.evaluation.plans import DEFAULT_STRIDE
from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.retrieval.records import RetrievalRecord
from hf_posenc.report.pieces import Panel, quiet

_TYPED = "As they were typed:"
_MADE = (
    "Put together from the records, which keep hashes of texts and no names of files: DOCUMENTS stands for the texts "
    "(add --cut if they were cut into pieces), TRAINED for the folder of the trained model, and the tasks are asked in "
    "the package's novels unless --documents says otherwise. The same text hashes then say that all was as it had been."
)
_RESULTS = "results.jsonl"
# What one command is for; a record of either kind lacks some of these.
_SAME = (
    *("model", "label", "dtype", "attn_implementation", "tokens_trained", "chat"),
    *("protocol", "bos", "stride", "last_k", "num_documents"),
)


@dataclass(frozen=True)
class Commands:
    """``typed`` are the commands that records carry, ``made`` those put together for the records that carry none."""

    typed: tuple[str, ...]
    made: tuple[str, ...]


def make_commands(records: Sequence[Record | RetrievalRecord]) -> Commands:
    """Return the commands of all records, each once, in order of appearance."""
    typed = dict.fromkeys(record.command for record in records if record.command)
    told = [record for record in records if not record.command]
    made = [*_perplexity_commands(told), *_retrieval_commands(told)]
    return Commands(tuple(typed), tuple(made))


def command_panel(records: Sequence[Record | RetrievalRecord], report_command: str) -> Panel:
    """Return the panel of the commands, that of the report itself last."""
    found = make_commands(records)
    last = report_command or shlex.join(["hf-posenc", "report", _RESULTS])
    every = [(_TYPED, found.typed), (_MADE, found.made), ("And the report:", (last,))]
    groups = [(words, lines) for words, lines in every if lines]
    html = "\n".join(quiet(words) + _block(lines) for words, lines in groups)
    markdown = "\n\n".join(f"{words}\n\n```sh\n" + "\n".join(lines) + "\n```" for words, lines in groups)
    return Panel("commands", "Commands", html, markdown)


def _block(lines: Iterable[str]) -> str:
    return "".join(f"<pre><code>{escape(line)}</code></pre>" for line in lines)


def _line(words: list[str]) -> str:
    return shlex.join(["hf-posenc", "eval", *words])


def _perplexity_commands(records: Iterable[Record | RetrievalRecord]) -> list[str]:
    """Return a command for each model and way of measuring, of all its methods and lengths."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if isinstance(record, Record):
            same = [*_flags(record), record.protocol, record.bos, record.last_k, record.num_documents]
            groups.setdefault(json.dumps([*same, _stride(record), _kept(record)]), []).append(record)
    return [_line(_perplexity_words(group)) for group in _with_unpatched(list(groups.values()))]


def _perplexity_words(group: list[Record]) -> list[str]:
    first, lengths = group[-1], sorted({record.context_length for record in group})
    words = [_model(first), "--documents", "DOCUMENTS", "--context-lengths", *map(str, lengths), *_methods(group)]
    words += ["--protocol", first.protocol, "--max-documents", str(first.num_documents)]
    words += ["--bos", "prepended"] if first.bos == "prepended" else []
    words += ["--last-k", str(first.last_k)] if first.last_k is not None else []
    words += ["--stride", str(stride)] if (stride := _stride(first)) is not None else []
    words += ["--max-tokens", str(kept)] if (kept := _kept(first)) not in (None, lengths[-1]) else []
    return [*words, *_flags(first), "--output", _RESULTS]


def _stride(record: Record) -> int | None:
    """Return the stride that was asked for; None where it is the default of its window."""
    usual = DEFAULT_STRIDE if record.context_length > DEFAULT_STRIDE else record.context_length // 2
    return None if record.stride in (None, usual) else record.stride


def _kept(record: Record) -> int | None:
    """Return how many tokens of each document a sliding window went over: all but the first of each are scored."""
    return record.n_tokens // record.num_documents + 1 if record.protocol == "sliding_window" else None


def _retrieval_commands(records: Iterable[Record | RetrievalRecord]) -> list[str]:
    """Return a command for each model and way of asking, of all its methods, tasks and lengths."""
    groups: dict[str, list[RetrievalRecord]] = {}
    for record in records:
        if isinstance(record, RetrievalRecord):
            groups.setdefault(json.dumps([*_flags(record), record.chat]), []).append(record)
    lines = []
    for group in _with_unpatched(list(groups.values())):
        seed = min(record.seed for record in group)
        remark = f"  # seeds began at {seed}: from Python, retrieval(..., seed={seed})" if seed else ""
        lines.append(_line(_retrieval_words(group)) + remark)
    return lines


def _retrieval_words(group: list[RetrievalRecord]) -> list[str]:
    first, lengths = group[-1], sorted({record.context_length for record in group})
    depths = sorted({record.depth for record in group if record.depth is not None})
    seeds = {record.seed for record in group if record.depth is not None}
    # A task with nothing at one depth has had as many prompts as the others have over all depths.
    spread = {record.seed for record in group if record.depth is None}
    samples = len(seeds) or len(spread)
    words = [_model(first), "--tasks", *dict.fromkeys(record.task for record in group)]
    words += ["--context-lengths", *map(str, lengths), "--samples", str(samples), *_methods(group)]
    words += ["--depths", *(f"{depth:g}" for depth in depths or [0.0])]
    return [*words, "--chat", "on" if first.chat else "off", *_flags(first), "--output", _RESULTS]


def _with_unpatched(groups: list[Any]) -> list[Any]:
    """Put the records of the unpatched model, which no factor belongs to, before those of the first group they fit."""
    extended = [group for group in groups if group[0].method != "none"]
    alone = []
    for group in groups:
        if group[0].method == "none":
            home = next((one for one in extended if _fits(group[0], one[-1])), None)
            if home is None:
                alone.append(group)
            else:
                home[:0] = group
    return [*alone, *extended]


def _fits(unpatched: Any, other: Any) -> bool:
    same = all(getattr(unpatched, name, None) == getattr(other, name, None) for name in _SAME)
    return same and other.method != "none"


def _model(record: Record | RetrievalRecord) -> str:
    return "TRAINED" if record.tokens_trained else record.model


def _methods(group: Sequence[Record | RetrievalRecord]) -> list[str]:
    trained = group[0].tokens_trained > 0  # its folder brings the rule
    return [] if trained else ["--method", *dict.fromkeys(record.method for record in group)]


def _flags(record: Record | RetrievalRecord) -> list[str]:
    """Return the words that are the same for every record of a command."""
    words = ["--dtype", record.dtype, "--attn-implementation", record.attn_implementation]
    words += ["--label", record.label] if record.label else []
    if record.tokens_trained:
        return [*words, "--model-name", record.model]
    if record.method != "none":
        words += ["--factor", _number(record.factor)]
        if record.original_max_position_embeddings is not None:
            words += ["--original-max-position-embeddings", str(record.original_max_position_embeddings)]
        options = record.options.items()
        words += ["--option"] * bool(options)
        words += [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in options]
    return words


def _number(value: float) -> str:
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)
