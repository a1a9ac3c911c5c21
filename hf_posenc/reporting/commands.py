"""The commands that measure a report's numbers again: as they were typed, or put together from what records say."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from hf_posenc.evaluation.config import KeyTokens
from hf_posenc.evaluation.key_tokens import CHOSEN_BY_ITSELF
from hf_posenc.evaluation.protocols import rule_of
from hf_posenc.evaluation.records import AnyRecord, Record, RetrievalRecord
from hf_posenc.evaluation.windows import default_stride
from hf_posenc.reporting.page import Code, Panel

_TYPED = "As they were typed:"
_MADE = (
    "Put together from the records, which keep hashes of texts and no names of files: DOCUMENTS means the texts, "
    "TRAINED the folder of the trained model, and the tasks are put into the package's novels. What records do not "
    "say has to be added: --cut if documents were cut into pieces. The same text hashes then say that all was as it "
    "had been."
)
_RESULTS = "results.jsonl"
# What one command is for; a record of either kind lacks some of these.
_SAME = (
    *("model", "label", "dtype", "attn_implementation", "tokens_trained", "chat", "questions_per_text"),
    *("protocol", "bos", "average", "last_k", "max_tokens", "num_documents", "key_tokens"),
)


class _Own(NamedTuple):
    """The words of a command that say what is measured and how, and a remark at its end."""

    what: list[str]
    how: list[str]
    remark: str


def make_commands(records: Sequence[AnyRecord]) -> tuple[list[str], list[str]]:
    """Return the commands that records carry, each once, and those put together for the records that carry none."""
    typed = dict.fromkeys(record.command for record in records if record.command)
    others = [record for record in records if not record.command]
    perplexities = [record for record in others if isinstance(record, Record)]
    retrievals = [record for record in others if isinstance(record, RetrievalRecord)]
    return list(typed), [*_made(perplexities, _perplexity), *_made(retrievals, _retrieval)]


def command_panel(records: Sequence[AnyRecord], report_command: str) -> Panel:
    """Return the panel of the commands, that of the report itself last."""
    typed, made = make_commands(records)
    last = report_command or shlex.join(["hf-posenc", "report", _RESULTS])
    every = [(_TYPED, typed), (_MADE, made), ("And the report:", [last])]
    return Panel("commands", "Commands", [Code(words, lines) for words, lines in every if lines])


def _made(records: Iterable[Any], own: Callable[[list[Any], list[int]], _Own]) -> list[str]:
    """Return a command for each model and way of measuring, of all its methods and lengths.

    Args:
        records: Records of one kind.
        own: Returns what only this kind has, of the records of a command and their lengths.
    """
    groups: dict[str, list[Any]] = {}
    for record in records:
        groups.setdefault(json.dumps([_way(record), _flags(record), _stride(record)]), []).append(record)
    lines = []
    for group in _with_unpatched(list(groups.values())):
        first, lengths = group[-1], sorted({record.context_length for record in group})
        what, how, remark = own(group, lengths)
        words = ["hf-posenc", "eval", first.model if first.tokens_trained == 0 else "TRAINED", *what]
        if group[0].tokens_trained == 0:  # the folder of a trained model brings the rule
            words += ["--method", *dict.fromkeys(record.method for record in group)]
        lines.append(shlex.join([*words, *how, *_flags(first), "--output", _RESULTS]) + remark)
    return lines


def _with_unpatched(groups: list[list[Any]]) -> list[list[Any]]:
    """Put the records of the unpatched model, which no factor belongs to, before those of the first group they fit."""
    extended = [group for group in groups if group[0].method != "none"]
    alone = []
    for group in groups:
        if group[0].method == "none":
            fitting = (one for one in extended if _way(group[0]) == _way(one[-1]) and one[-1].method != "none")
            if (home := next(fitting, None)) is None:
                alone.append(group)
            else:
                home[:0] = group
    return [*alone, *extended]


def _way(record: AnyRecord) -> list[Any]:
    return [getattr(record, name, None) for name in _SAME]


def _perplexity(group: list[Record], lengths: list[int]) -> _Own:
    """Say how a protocol was used, without the flags that repeat what it does by itself."""
    record = group[-1]
    rule, (evaluator, remark) = rule_of(record.protocol), _evaluator(record)
    flags: dict[str, str | int | None] = {
        # A stream is one text, made of any number of documents.
        "--max-documents": None if rule.shape == "stream" else record.num_documents,
        "--bos": record.bos if rule.bos is None and record.bos != "none" else None,
        "--average": record.average if record.average != rule.average else None,
        "--last-k": record.last_k,
        "--stride": _stride(record),
        "--max-tokens": record.max_tokens,
    }
    usual, chosen = KeyTokens(), record.key_tokens
    if chosen:
        short = usual.short_tokens(record.original_max_position_embeddings)
        flags |= {
            "--evaluator": evaluator,
            "--alpha": _number(chosen["alpha"]) if chosen["alpha"] != usual.alpha else None,
            "--beta": _number(chosen["beta"]) if chosen["beta"] != usual.beta else None,
            "--short-context": chosen["short_context"] if chosen["short_context"] != short else None,
        }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    return _Own(["--documents", "DOCUMENTS", *_lengths(lengths)], ["--protocol", record.protocol, *words], remark)


def _evaluator(record: Record) -> tuple[str | None, str]:
    """Return the model that chose the key tokens, None for the measured one, and a remark if it was an extended one."""
    name = record.key_tokens.get("chosen_by", CHOSEN_BY_ITSELF)
    if name == CHOSEN_BY_ITSELF:
        return None, ""
    if re.search(r" \([a-z_]+ x[\d.e+]+\)$", name):
        return "EVALUATOR", f"  # EVALUATOR: folder of {name}"
    return name, ""


def _stride(record: AnyRecord) -> int | None:
    """Return the stride of a record; None where it is what the protocol does by itself, or there is none."""
    if isinstance(record, RetrievalRecord) or record.stride is None:
        return None
    return None if record.stride == default_stride(record.protocol, record.context_length) else record.stride


def _retrieval(group: list[RetrievalRecord], lengths: list[int]) -> _Own:
    """Say how prompts were made."""
    depths = sorted({record.depth for record in group if record.depth is not None})
    # A task with nothing at one depth has had as many prompts as the others have over all depths.
    seeds = {record.seed for record in group if record.depth is not None} or {record.seed for record in group}
    what = [
        "--tasks",
        *dict.fromkeys(record.task for record in group),
        *_lengths(lengths),
        "--samples",
        str(len(seeds)),
    ]
    questions = group[-1].questions_per_text
    placed = ["--depths", *(f"{depth:g}" for depth in depths or [0.0])]
    how = [
        *(placed if questions == 1 else ["--questions", str(questions)]),
        "--chat",
        "on" if group[-1].chat else "off",
    ]
    first = min(record.seed for record in group)
    remark = f"  # seeds began at {first}: from Python, retrieval(..., seed={first})" if first else ""
    return _Own(what, how, remark)


def _lengths(lengths: list[int]) -> list[str]:
    return ["--context-lengths", *map(str, lengths)]


def _flags(record: AnyRecord) -> list[str]:
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
