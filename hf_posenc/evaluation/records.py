"""What was measured, with everything that says how: one line of JSON for a perplexity, or for a retrieval prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from hf_posenc.errors import InvalidRequestError

# The field that tells the kinds of records in one file apart.
_MARKS = ("perplexity", "task")


class JsonRecord:
    """A dataclass that is written as a line of JSON and read back; ``MARK`` is a field no other kind has."""

    MARK = ""

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the line's end."""
        record: Any = self
        return json.dumps(asdict(record), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read a record back; fields this version does not know are left out.

        Raises:
            ValueError: Not JSON, or not all fields of a record.
        """
        return cls.from_values(json.loads(line))

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Make a record of what ``json.loads`` gives; as ``from_json``."""
        kind: Any = cls
        missing = [one.name for one in fields(kind) if one.name not in values and not _has_default(one)]
        if missing:
            raise InvalidRequestError(f"not a {cls.MARK} record: it has no {', '.join(missing)}.")
        return cls(**{one.name: values[one.name] for one in fields(kind) if one.name in values})


def _has_default(one: Field[Any]) -> bool:
    """Say whether a record may lack a field: those that came later, and what nobody has to give."""
    return one.default is not MISSING or one.default_factory is not MISSING


Kind = TypeVar("Kind", bound=JsonRecord)


@dataclass(frozen=True)
class Record(JsonRecord):
    """A perplexity and its protocol. ``context_length`` (tokens fed at a time) is the x axis.

    ``perplexity`` is ``exp(nll_sum / n_tokens)``: nats summed and tokens counted over all documents, divided once;
    ``ci_low`` and ``ci_high`` are its bootstrap 95 % interval, over ``ci_unit``. ``window``, ``stride`` and
    ``last_k`` are None where the protocol has none. ``text_hash`` is of the token ids the number depends on: numbers
    compare where it and the protocol are the same. ``tokens_trained`` 0 means zero-shot, None that
    it is not known. ``seconds`` is the time of
    the pass, which other records may share. ``run_key`` is a hash of all that decides the number, weights included:
    records of one key are repeats of one measurement.

    ``unit_nll`` and ``unit_tokens`` are the nats and tokens of each of the units, in order (with "windows", means and
    ones): two records of the same tokens differ unit by unit, which ``paired_interval`` makes an interval of.

    ``scored`` says in words which tokens were scored. ``average`` is "tokens", or "windows" for the mean of window
    means: then ``perplexity`` is not what ``nll_sum`` and ``n_tokens`` give, and does not compare with the others.

    ``key_tokens`` is empty but for ``longppl``: how its tokens were chosen, and by which model.

    ``position_nll`` and ``position_tokens`` are the loss by position, summed over documents: bucket b has the tokens
    at indices ``[b * position_bucket, (b + 1) * position_bucket)`` of what is fed that are scored. The three are None
    and empty where the tokens of a number are not all at their own position of one text (for all protocols but
    ``truncated`` and ``yarn``).

    ``rope`` has ``rotary_dim``, ``rope_theta`` and ``unrotated_pairs`` of the model as it was trained, and is empty
    where there is no rotary embedding; ``command`` is what was typed, empty from Python; ``checkpoint_dtype`` is what
    the weights are stored in, where ``dtype`` is what was computed in. None of them is part of the key.
    """

    model: str
    method: str
    factor: float
    options: dict[str, Any]
    tokens_trained: int | None
    original_max_position_embeddings: int | None
    context_length: int
    protocol: str
    window: int | None
    stride: int | None
    last_k: int | None
    bos: str
    num_documents: int
    n_tokens: int
    nll_sum: float
    perplexity: float
    ci_low: float
    ci_high: float
    ci_unit: str
    tokenizer_hash: str
    text_hash: str
    dtype: str
    attn_implementation: str
    versions: dict[str, str]
    seconds: float
    peak_memory_bytes: int
    run_key: str = field(repr=False)
    label: str = ""
    average: str = "tokens"
    scored: str = ""
    key_tokens: dict[str, Any] = field(default_factory=dict)
    unit_nll: list[float] = field(repr=False, kw_only=True)
    unit_tokens: list[int] = field(repr=False, kw_only=True)
    position_bucket: int | None = None
    position_nll: list[float] = field(default_factory=list, repr=False)
    position_tokens: list[int] = field(default_factory=list, repr=False)
    rope: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    checkpoint_dtype: str = ""

    MARK = "perplexity"


@dataclass(frozen=True)
class RetrievalRecord(JsonRecord):
    """One prompt of a task. ``context_length`` counts prompt and answer together, in tokens.

    ``depth`` is the percent of the free text before the needle, None where needles are spread over it;
    ``needle_places`` are the positions of their first tokens. ``chat`` says whether the prompt was a user's message in
    the chat template. Of the ``answers``, ``num_forced`` were right teacher-forced: the likeliest token was the right
    one wherever a token holds a character of it, which leaves out the word before it (None where the order is free);
    ``num_written`` are in the greedy answer. ``n_tokens`` are the tokens that hold an answer, ``n_right`` of them were
    the likeliest, ``nll_sum`` is their loss in nats. ``text_hash`` is of the token ids of prompt and answer;
    ``run_key`` of all that decides the result, weights included; ``rope``, ``command`` and ``checkpoint_dtype`` as in
    ``Record``.
    """

    model: str
    method: str
    factor: float
    options: dict[str, Any]
    tokens_trained: int | None
    original_max_position_embeddings: int | None
    task: str
    context_length: int
    depth: float | None
    seed: int
    chat: bool
    num_prompt_tokens: int
    max_new_tokens: int
    needle_places: list[int]
    answers: list[str]
    num_forced: int | None
    num_written: int
    n_tokens: int
    n_right: int
    nll_sum: float
    forced: str
    written: str
    tokenizer_hash: str
    text_hash: str
    dtype: str
    attn_implementation: str
    versions: dict[str, str]
    seconds: float
    peak_memory_bytes: int
    run_key: str = field(repr=False)
    label: str = ""
    rope: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    checkpoint_dtype: str = ""

    MARK = "task"

    def score(self, by: str = "forced") -> float | None:
        """Return the share of the answers that were right, by "forced" or "written"."""
        right = self.num_forced if by == "forced" else self.num_written
        return None if right is None else right / len(self.answers)


AnyRecord = Record | RetrievalRecord


def read_records(path: str | Path) -> list[Record]:
    """Read the perplexity records of a file; a last line cut off in the middle of writing is left out.

    Raises:
        ValueError: A line is not a record; the message names it.
    """
    return read_kind(path, Record)


def read_retrieval_records(path: str | Path) -> list[RetrievalRecord]:
    """Read the retrieval records of a file; the perplexities in it are passed over.

    Raises:
        ValueError: A line is not a record; the message names it.
    """
    return read_kind(path, RetrievalRecord)


def read_kind(path: str | Path, kind: type[Kind]) -> list[Kind]:
    """Read the records of one kind, as ``read_records`` does; those of other kinds are passed over.

    Raises:
        ValueError: A line is not a record; the message names it.
    """
    lines = list(whole_lines(Path(path)))
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line) if line.strip() else None
            if values is not None and not any(mark in values for mark in _MARKS if mark != kind.MARK):
                records.append(kind.from_values(values))
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(f"line {number} of {str(path)!r}: {error}") from error
    return records


def check_output(path: str | Path) -> None:
    """Raise before any work if records could not be written to a file of this name.

    Raises:
        ValueError: It is a folder, or a file is where its folder should be.
    """
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if Path(path).is_dir() or not folder.is_dir():
        what = f"{str(path)!r} is a folder" if Path(path).is_dir() else f"{str(folder)!r} is not a folder"
        raise InvalidRequestError(
            f"results cannot be written to {str(path)!r}: {what}. Give a file, such as results.jsonl."
        )


def whole_lines(path: Path) -> Iterable[str]:
    """Yield the lines that were written to their end; none if there is no file."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            if line.endswith("\n") or _is_json(line):
                yield line


def append_line(path: Path, line: str) -> None:
    """Add one line with a single write, first removing what a killed writer left of its last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        lead = b"\n" if _cut_torn_tail(file) else b""
        file.write(lead + line.encode("utf-8") + b"\n")


def _cut_torn_tail(file: BinaryIO) -> bool:
    """Truncate an unfinished last line; return whether a finished one only lacks its line end."""
    size = file.seek(0, 2)
    file.seek(max(size - 1, 0))
    if file.read(1) in (b"", b"\n"):
        return False
    file.seek(0)
    content = file.read()
    tail = content[content.rfind(b"\n") + 1 :]
    if _is_json(tail.decode("utf-8", errors="replace")):
        return True
    file.truncate(size - len(tail))
    return False


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
