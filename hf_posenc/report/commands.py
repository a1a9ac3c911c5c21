"""The commands that measure a report's numbers again: as they were typed, or put together from what records say."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.config import KeyTokens
from hf_posenc.evaluation.key_tokens import CHOSEN_BY_ITSELF
from hf_posenc.evaluation.plans import DEFAULT_STRIDE
from hf_posenc.evaluation.protocols import rule_of
from hf_posenc.evaluation.records import Record, RetrievalRecord
from hf_posenc.report.page import Code, Panel

_TYPED = "As they were typed:"
_MADE = (
    "Put together from the records, which keep hashes of texts and no names of files: DOCUMENTS means the texts, "
    "TRAINED the folder of the trained model, and the tasks are put into the package's novels. What records do not "
    "say has to be added: --cut if documents were cut into pieces, --max-tokens if a published protocol was not to "
    "read them to their end. The same text hashes then say that all was as it had been."
)
_RESULTS = "results.jsonl"
# What one command is for; a record of either kind lacks some of these.
_SAME = (
    *("model", "label", "dtype", "attn_implementation", "tokens_trained", "chat"),
    *("protocol", "bos", "average", "last_k", "num_documents", "key_tokens"),
)


@dataclass(frozen=True)
class Commands:
    """``typed`` are the commands that records carry, ``made`` those put together for the records that carry none."""

    typed: tuple[str, ...]
    made: tuple[str, ...]


def make_commands(records: Sequence[Record | RetrievalRecord]) -> Commands:
    """Return the commands of all records, each once, in order of appearance."""
    typed = dict.fromkeys(record.command for record in records if record.command)
    others = [record for record in records if not record.command]
    made = [*_perplexity_commands(others), *_retrieval_commands(others)]
    return Commands(tuple(typed), tuple(made))


def command_panel(records: Sequence[Record | RetrievalRecord], report_command: str) -> Panel:
    """Return the panel of the commands, that of the report itself last."""
    found = make_commands(records)
    last = report_command or shlex.join(["hf-posenc", "report", _RESULTS])
    every = [(_TYPED, found.typed), (_MADE, found.made), ("And the report:", (last,))]
    return Panel("commands", "Commands", [Code(words, lines) for words, lines in every if lines])


def _line(words: list[str]) -> str:
    return shlex.join(["hf-posenc", "eval", *words])


def _perplexity_commands(records: Iterable[Record | RetrievalRecord]) -> list[str]:
    """Return a command for each model and way of measuring, of all its methods and lengths."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if isinstance(record, Record):
            same = [*_flags(record), record.protocol, record.bos, record.average, record.last_k, record.num_documents]
            groups.setdefault(json.dumps([*same, _stride(record), record.key_tokens]), []).append(record)
    return [
        _line(_perplexity_words(group)) + _evaluator(group[0])[1] for group in _with_unpatched(list(groups.values()))
    ]


def _perplexity_words(group: list[Record]) -> list[str]:
    first, lengths = group[-1], sorted({record.context_length for record in group})
    words = [_model(first), "--documents", "DOCUMENTS", "--context-lengths", *map(str, lengths), *_methods(group)]
    words += ["--protocol", first.protocol, *_settings(first, lengths)]
    return [*words, *_flags(first), "--output", _RESULTS]


def _settings(record: Record, lengths: Sequence[int]) -> list[str]:
    """Return the flags that say how a protocol was used, without those that repeat what it does by itself."""
    rule = rule_of(record.protocol)
    flags: dict[str, str | int | None] = {
        # A stream is one text, made of any number of documents.
        "--max-documents": None if rule.shape == "stream" else record.num_documents,
        "--bos": record.bos if rule.bos is None and record.bos != "none" else None,
        "--average": record.average if record.average != rule.average else None,
        "--last-k": record.last_k,
        "--stride": _stride(record),
        "--max-tokens": _kept(record, lengths),
    }
    flags |= _key_token_flags(record)
    return [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]


def _key_token_flags(record: Record) -> dict[str, str | int | None]:
    """Return how ``longppl`` chose its tokens, where that is not what it does by itself."""
    usual, chosen = KeyTokens(), record.key_tokens
    if not chosen:
        return {}
    short = usual.short_tokens(record.original_max_position_embeddings)
    return {
        "--evaluator": _evaluator(record)[0],
        "--alpha": _number(chosen["alpha"]) if chosen["alpha"] != usual.alpha else None,
        "--beta": _number(chosen["beta"]) if chosen["beta"] != usual.beta else None,
        "--short-context": chosen["short_context"] if chosen["short_context"] != short else None,
    }


def _evaluator(record: Record) -> tuple[str | None, str]:
    """Return the model that chose the key tokens, None for the measured one, and a remark if it was an extended one."""
    name = record.key_tokens.get("chosen_by", CHOSEN_BY_ITSELF)
    if name == CHOSEN_BY_ITSELF:
        return None, ""
    if re.search(r" \([a-z_]+ x[\d.e+]+\)$", name):
        return "EVALUATOR", f"  # EVALUATOR: folder of {name}"
    return name, ""


def _stride(record: Record) -> int | None:
    """Return the stride of a record; None where it is what the protocol does by itself."""
    half = max(1, record.context_length // 2)
    usual = DEFAULT_STRIDE if record.context_length > DEFAULT_STRIDE else half
    if record.protocol == "same_tokens":
        usual = half
    return None if record.stride in (None, rule_of(record.protocol).stride or usual) else record.stride


def _kept(record: Record, lengths: Sequence[int]) -> int | None:
    """Return how many tokens of each document a window moved over, where that is not the longest length.

    Of our protocols all tokens are scored, but the first one, or those before the shortest length.
    """
    unscored = {"sliding_window": 1, "same_tokens": lengths[0]}.get(record.protocol)
    kept = None if unscored is None else record.n_tokens // record.num_documents + unscored
    return None if kept == lengths[-1] else kept


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
    return record.model if record.tokens_trained == 0 else "TRAINED"


def _methods(group: Sequence[Record | RetrievalRecord]) -> list[str]:
    trained = group[0].tokens_trained != 0  # its folder brings the rule
    return [] if trained else ["--method", *dict.fromkeys(record.method for record in group)]


def _flags(record: Record | RetrievalRecord) -> list[str]:
    """Return the words that are the same for every record of a command."""
    words = ["--dtype", record.dtype, "--attn-implementation", record.attn_implementation]
    words += ["--label", record.label] if record.label else []
    if record.tokens_trained != 0:
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
