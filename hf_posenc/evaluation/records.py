"""The measured result with all its conditions: one line of JSON for a perplexity, or for a retrieval prompt."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from hf_posenc.errors import InvalidRequestError
from hf_posenc.utils.files import writable_folder


@dataclass(frozen=True, kw_only=True)
class JsonRecord:
    """What every record has; it is written as a line of JSON, and read back.

    Two records with the same ``run_key`` are repeats of one measurement.

    Attributes:
        model: Name or path the model was loaded from, or the name that was given for it.
        method: Name of the extension method; ``"none"`` for a model that is not extended.
        factor: Target length / original length.
        options: The options of the method that differ from their defaults.
        tokens_trained: Tokens the model was fine-tuned on; 0 means zero-shot, None that it is not known.
        original_max_position_embeddings: Tokens the model was trained on; None where that is not known.
        context_length: Tokens that are fed at a time, a BOS token included; of a retrieval prompt, with its answer.
            It is the x axis of a curve.
        n_tokens: Tokens that were scored: in all documents, or those that hold an answer.
        nll_sum: Sum of their negative log-likelihoods, in nats.
        tokenizer_hash: Hash of the tokenizer.
        text_hash: Hash of the token ids that the number depends on; of a retrieval prompt, with its answer.
        dtype: Data type of the computation.
        attn_implementation: Attention implementation of Transformers that ran.
        versions: Versions of the libraries, by name.
        seconds: Time of the pass. Records that come from one pass have the same time. Of several questions of a text,
            the first that was asked has the time of reading it.
        peak_memory_bytes: Largest memory of the process or device during the pass, in bytes.
        run_key: Hash of everything that decides the number, the weights included.
        label: Free words, such as the name of the row in a report.
        rope: ``rotary_dim``, ``rope_theta`` and ``unrotated_pairs`` of the model as it was trained; empty where there
            is no rotary embedding. Not part of ``run_key``.
        command: The command that was typed; empty for a measurement from Python. Not part of ``run_key``.
        checkpoint_dtype: Data type that the weights are stored in. Not part of ``run_key``.
    """

    model: str
    method: str
    factor: float
    options: dict[str, Any]
    tokens_trained: int | None
    original_max_position_embeddings: int | None
    context_length: int
    n_tokens: int
    nll_sum: float
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

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the line's end."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Make a record of what ``json.loads`` gives; fields this version does not know are left out.

        Raises:
            ValueError: Not all fields of a record.
        """
        missing = [one.name for one in fields(cls) if one.name not in values and not _has_default(one)]
        if missing:
            raise InvalidRequestError(f"not a whole record: it has no {', '.join(missing)}.")
        return cls(**{one.name: values[one.name] for one in fields(cls) if one.name in values})


def _has_default(one: Field[Any]) -> bool:
    """Say whether a record may lack a field: those that came later, and what nobody has to give."""
    return one.default is not MISSING or one.default_factory is not MISSING


Kind = TypeVar("Kind", bound=JsonRecord)


@dataclass(frozen=True, kw_only=True)
class Record(JsonRecord):
    """One perplexity, and how it was measured; it has the fields of every record besides.

    Two perplexities can be compared where ``text_hash`` and the protocol are the same: then the same tokens were
    scored.

    Attributes:
        protocol: Name of the protocol, which says which tokens are scored.
        window: Tokens of a sliding window; None where the protocol has no windows.
        stride: New tokens of a window; None where the protocol has no windows.
        last_k: Tokens at the end of the context that are scored; None where the protocol scores others.
        bos: Where a BOS token was put: ``"none"``, ``"prepended"`` (before each document) or ``"each_window"``.
        num_documents: Documents that were measured.
        perplexity: ``exp(nll_sum / n_tokens)``; where ``average`` is ``"windows"``, from the mean of window means.
        ci_low: Lower end of the 95 % bootstrap interval of ``perplexity``.
        ci_high: Upper end of that interval.
        ci_unit: What the bootstrap draws: ``"documents"``, or ``"blocks"`` of tokens where there are few documents.
        average: ``"tokens"``, or ``"windows"`` for the mean of window means. A perplexity of the second kind does not
            compare with one of the first, and ``nll_sum`` and ``n_tokens`` do not give it.
        scored: Which tokens were scored, in words.
        key_tokens: For the protocol ``longppl``, how its tokens were chosen and by which model; empty for others.
        unit_nll: Sum of the negative log-likelihoods of each unit of the bootstrap, in order, in nats; with
            ``average="windows"``, the mean of each window. ``paired_interval`` makes an interval of the difference of
            two records from them.
        unit_tokens: Tokens of each of these units; with ``average="windows"``, ones.
        position_bucket: Tokens that share a value of the loss by position; None for protocols whose tokens are not all
            at their own position of one text, which are all but ``truncated`` and ``yarn``.
        position_nll: Sum of the negative log-likelihoods by position, over all documents, in nats. Bucket b has the
            scored tokens at indices ``[b * position_bucket, (b + 1) * position_bucket)`` of what is fed.
        position_tokens: Tokens of each of these buckets.
        max_tokens: Tokens after which a document, or a stream, ended, as requested; None where it was read to its end,
            or as far as the protocol reads. Not part of ``run_key``, as ``text_hash`` is of what was read.
    """

    protocol: str
    window: int | None
    stride: int | None
    last_k: int | None
    bos: str
    num_documents: int
    perplexity: float
    ci_low: float
    ci_high: float
    ci_unit: str
    average: str = "tokens"
    scored: str = ""
    key_tokens: dict[str, Any] = field(default_factory=dict)
    unit_nll: list[float] = field(repr=False)
    unit_tokens: list[int] = field(repr=False)
    position_bucket: int | None = None
    position_nll: list[float] = field(default_factory=list, repr=False)
    position_tokens: list[int] = field(default_factory=list, repr=False)
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class RetrievalRecord(JsonRecord):
    """One question of a retrieval task, and what the model made of it; it has the fields of every record besides.

    Attributes:
        task: Name of the task, such as ``passkey``.
        depth: Percent of the free text that is before the needle; None where the needles of the answer are spread over
            the text.
        seed: Seed of the random numbers that made the text and its questions.
        chat: Whether the prompt was the message of a user in the chat template.
        num_prompt_tokens: Tokens of the prompt.
        max_new_tokens: Tokens that the model may write.
        needle_places: Positions of the first token of each needle; with several questions of a text, of those needles
            that hold this answer.
        answers: The right answers.
        num_forced: How many answers were right teacher-forced: the likeliest token was the right one wherever a token
            holds a character of the answer, which leaves out the word before it. None where the order of the answers
            is free.
        num_written: How many answers are in the text that the model writes greedily.
        n_right: How many of these tokens were the likeliest.
        forced: The likeliest tokens at the places of the answer, as text.
        written: The text that the model wrote; with several questions of a text, up to the token that follows the last
            right answer, if all of them are in it.
        questions_per_text: Questions that were asked of its text; they share the text and most of its cost.
        question: Which of them it is, from 0.
        shared_text: Hash of the token ids of the text that they share; empty if the text is this question's alone.
    """

    task: str
    depth: float | None
    seed: int
    chat: bool
    num_prompt_tokens: int
    max_new_tokens: int
    needle_places: list[int]
    answers: list[str]
    num_forced: int | None
    num_written: int
    n_right: int
    forced: str
    written: str
    questions_per_text: int = 1
    question: int = 0
    shared_text: str = ""

    @property
    def text(self) -> str:
        """The key of its text: questions of one text are right or wrong together more than by chance."""
        return self.shared_text or self.text_hash

    def score(self, by: str) -> float | None:
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
    of_others = "perplexity" if kind is RetrievalRecord else "task"
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line) if line.strip() else None
            if values is not None and of_others not in values:
                records.append(kind.from_values(values))
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(f"line {number} of {str(path)!r}: {error}") from error
    return records


def check_output(path: str | Path) -> Path:
    """Return the file that records are written to; raise before any work if they could not be.

    Raises:
        ValueError: It is a folder, a file is where its folder should be, or this user may not write there.
    """
    file = Path(path).expanduser()
    if not file.exists():
        writable_folder(file.absolute().parent)
    if file.is_dir():
        raise InvalidRequestError(
            f"results cannot be written to {str(path)!r}: it is a folder. Give a file, such as results.jsonl."
        )
    if file.exists() and not os.access(file, os.W_OK):
        raise InvalidRequestError(f"results cannot be written to {str(path)!r} by this user. Give another file.")
    return file


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
        file.write(lead + line.encode("utf-8", "backslashreplace") + b"\n")  # a path in a command may be no UTF-8


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
