"""Texts from files, folders, stdin and datasets, and their token ids, whole: nothing is truncated here."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_posenc.data.columns import COMPLETION, PROMPT, Columns, Document, with_plain_line_ends
from hf_posenc.errors import InvalidRequestError, MissingFileError, argument
from hf_posenc.utils.warning import warn_user

TEXT_SUFFIXES = (".txt", ".md")
_OPENERS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}
_DAMAGED = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError)
NOVEL = "novel:"
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_JSON = (".json", ".jsonl", ".ndjson")
_OF_ROWS = (*_JSON, *_SEPARATORS, ".parquet")
_ABOUT_A_DATASET = ("README", "LICENSE", "NOTICE")  # what lies beside its files
_FORMS = (
    "a .txt, .md, .jsonl, .json or .csv file (.xz and .gz too), a .parquet file, a folder of text files, '-', "
    "novel:NAME or a dataset's name"
)


@dataclass(frozen=True)
class DocumentStream:
    """Whole documents from wherever the user keeps them, read as they are asked for; each loop begins anew.

    They are texts, or as ``Columns.read`` returns them: chats, and prompts with answers. Those of blanks alone are left
    out. Lines of a text end with a line feed, however they did in the source, and a byte order mark is left out. A
    dataset is streamed: nothing is downloaded beyond what is read. Of a folder one file is held at a time.

    Attributes:
        source: A text file (one document), a ``.jsonl``, ``.ndjson``, ``.json``, ``.csv`` or ``.tsv`` file (one
            document a row), any of them compressed as ``.xz`` or ``.gz``, a ``.parquet`` file, a folder (each ``.txt``
            or ``.md`` file one document, sorted by path; not the README beside a dataset's files), ``-`` for stdin (one
            document), ``novel:persuasion`` for a novel of this package, or else what ``datasets.load_dataset`` takes: a
            name on the Hub or a folder of parquet or jsonl files.
        text_field, template: Which columns of a row are read; see ``Columns``.
        split: The split of a dataset; ``test[:50]`` works too.
        config_name: The configuration of a dataset, for those that have several.
        whole: Do not stream a dataset; parts of splits (``train[:50]``) can be read only so.

    Raises:
        FileNotFoundError: When they are read: ``source`` looks like a path and there is nothing.
        ValueError: When they are read: no such column, not UTF-8, a damaged .xz or .gz file, or no such dataset.
    """

    source: str | Path
    text_field: str | Sequence[str] | None = None
    split: str = "train"
    config_name: str | None = None
    template: str | None = None
    whole: bool = False

    def __iter__(self) -> Iterator[Document]:
        columns = Columns(self.text_field, self.template)
        rows = _read(str(self.source), columns, self.split, self.config_name, streaming=not self.whole)
        return (document for document in rows if _holds_something(document))

    def all(self) -> list[Document]:
        """Return all of them.

        Raises:
            ValueError: There is none.
        """
        documents = list(self)
        if not documents:
            raise InvalidRequestError(f"{str(self.source)!r} holds no text. Give {_FORMS}.")
        return documents

    def texts(self) -> list[str]:
        """Return all of them as texts, a prompt and its answer as one.

        Raises:
            ValueError: There is none, or they are chats.
        """
        return [_as_text(document, str(self.source)) for document in self.all()]


def _as_text(document: Document, source: str) -> str:
    if isinstance(document, str):
        return document
    parts = [document.get(name) for name in (PROMPT, COMPLETION)]
    if not all(isinstance(part, str) for part in parts):
        raise InvalidRequestError(
            f"{source!r} holds chats, and texts are measured here: which tokens a chat becomes is the chat template's "
            f"matter. Name a column of texts with {argument('text_field')}. Chats can be trained on: hf-posenc "
            "finetune."
        )
    return "".join(map(str, parts))


def _holds_something(document: Document) -> bool:
    if isinstance(document, str):
        return bool(document.strip())
    return any(value.strip() if isinstance(value, str) else value for value in document.values())


def added_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token for the beginning of a text that a tokenizer puts before each by itself; None without one."""
    bos: int | None = tokenizer.bos_token_id
    first, alone = (tokenizer("A", add_special_tokens=added)["input_ids"][:1] for added in (True, False))
    return bos if first == [bos] != alone else None


def tokenize_text(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Return all token ids of a text, int64 ``(num_tokens,)``.

    Never truncated, whatever the tokenizer's ``model_max_length``, and no warning about length; no special tokens
    are added, so that a BOS is there only where the caller puts one.
    """
    ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def _read(
    source: str, columns: Columns, split: str, config_name: str | None, *, streaming: bool = False
) -> Iterable[Document]:
    texts = _read_plain(source)
    if texts is not None:
        if columns.template is not None:
            raise InvalidRequestError(f"{source!r} is plain text and has no columns that a template could name.")
        return texts
    path = Path(source).expanduser()
    if path.is_file() and _kind(path) != ".parquet":
        return _read_rows(path, columns)
    if not path.exists() and (_kind(path) in (*TEXT_SUFFIXES, *_OF_ROWS) or source[:1] in "./~"):
        raise MissingFileError(f"there is no file or folder {source!r}. Give {_FORMS}.")
    return _read_dataset(path if path.exists() else source, columns, split, config_name, streaming)


def _read_plain(source: str) -> Iterable[str] | None:
    """Return the texts of a source that has no columns; None for any other."""
    if source == "-":
        return [with_plain_line_ends(sys.stdin.read())]
    if source.startswith(NOVEL):
        from hf_posenc.assets import load_novel

        return [load_novel(source.removeprefix(NOVEL))]
    path = Path(source).expanduser()
    if path.is_file() and _kind(path) not in _OF_ROWS:
        return [_read_text(path)]
    if path.is_dir() and (files := _text_files(path)):
        return (_read_text(file) for file in files)
    return None


def _text_files(folder: Path) -> list[Path]:
    """Return a folder's text files, sorted; none of a dataset's folder, whose texts are about it."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]  # a folder may be named notes.txt too
    texts = [path for path in files if _kind(path) in TEXT_SUFFIXES]
    rows = [path for path in files if _kind(path) in _OF_ROWS]
    if rows and all(path.stem.upper() in _ABOUT_A_DATASET for path in texts):
        return []
    if texts and (rows := [path for path in rows if _kind(path) != ".json"]):  # which often say something of the texts
        warn_user(
            f"of the folder {str(folder)!r} the {len(texts)} text files are read, and {str(rows[0])!r} and other files "
            "of rows are not: give a file or a folder of its own for those."
        )
    return texts


def _kind(path: Path) -> str:
    """Return the suffix that says what is in the file, below any compression: ``.txt`` for ``A.TXT.xz``."""
    return Path(path.stem if path.suffix.lower() in _OPENERS else path).suffix.lower()


def _read_text(path: Path) -> str:
    try:
        content = _OPENERS.get(path.suffix.lower(), bytes)(path.read_bytes())
        return with_plain_line_ends(content.decode("utf-8-sig"))
    except _DAMAGED as error:
        raise InvalidRequestError(
            f"{str(path)!r} is damaged or no {path.suffix} file ({error}). Get it again."
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{str(path)!r} is not UTF-8 text ({error}). Convert it, or give {_FORMS}."
        ) from error


def _read_rows(path: Path, columns: Columns) -> Iterator[Document]:
    text = _read_text(path)
    if _kind(path) in _SEPARATORS:
        rows = _table(path, text, _SEPARATORS[_kind(path)])
    elif _kind(path) == ".json" and (row := _one_object(text)) is not None:
        rows = [("row 1", row)]
    elif text.lstrip()[:1] == "[":
        rows = ((f"row {number}", row) for number, row in enumerate(_parsed(text, repr(str(path))), start=1))
    else:
        numbered = enumerate(text.split("\n"), start=1)
        lines = ((f"line {number}", line) for number, line in numbered if line.strip())
        rows = ((name, _parsed(line, f"{name} of {str(path)!r}")) for name, line in lines)
    return (columns.read(row, f"{name} of {str(path)!r}") for name, row in rows)


def _one_object(text: str) -> dict[str, Any] | None:
    """Return the object that a whole file is, over any number of lines; None if it is a list, or an object a line."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from error


def _table(path: Path, text: str, separator: str) -> Iterable[tuple[str, dict[str, str]]]:
    """Return the rows of a table, every value as the text it is: a number would lose its zeros."""
    limit = csv.field_size_limit(2**31 - 1)  # of a module; its default is 128 thousand characters
    try:
        rows = list(csv.DictReader(io.StringIO(text), delimiter=separator, strict=True))
    except csv.Error as error:
        raise InvalidRequestError(
            f"{str(path)!r} is no {_kind(path)} file: {error}. Commas separate the values of a .csv file, tabs those "
            "of a .tsv file."
        ) from error
    finally:
        csv.field_size_limit(limit)
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise InvalidRequestError(
                f"row {number} of {str(path)!r} has more or fewer values than the first line has names."
            )
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _read_dataset(
    source: str | Path, columns: Columns, split: str, config_name: str | None, streaming: bool
) -> Iterator[Document]:
    import datasets

    try:
        if isinstance(source, Path) and source.is_file():
            rows: Any = datasets.load_dataset("parquet", data_files=str(source), split=split, streaming=streaming)
        else:
            rows = datasets.load_dataset(str(source), config_name, split=split, streaming=streaming)
        rows = iter(rows)
    except Exception as error:  # whatever the hub, the network and the file formats raise
        raise _unreadable(source, error) from error
    for number in itertools.count(1):
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # a stream goes on reading
            raise _unreadable(source, error) from error
        yield columns.read(row, f"row {number} of dataset {str(source)!r}")


def _unreadable(source: str | Path, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"{str(source)!r} cannot be read as a dataset: {error}. Give {_FORMS}.")
