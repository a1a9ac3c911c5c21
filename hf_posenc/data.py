"""Texts from files, folders, stdin and datasets, and their token ids, whole: nothing is truncated here."""

from __future__ import annotations

import gzip
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

TEXT_SUFFIXES = (".txt", ".md")
_OPENERS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}
_DAMAGED = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError)
_NOVEL = "novel:"
_FORMS = "a .txt, .md or .jsonl file (.xz and .gz too), a folder of text files, '-', novel:NAME or a dataset's name"


def read_documents(
    source: str | Path, *, text_field: str = "text", split: str = "train", config_name: str | None = None
) -> list[str]:
    """Read whole documents from wherever the user keeps them.

    Args:
        source: A text file (one document), a ``.jsonl`` file (one document a line), either of them compressed as
            ``.xz`` or ``.gz``, a folder (each ``.txt`` or ``.md`` file one document, sorted by path), ``-`` for
            stdin (one document), ``novel:persuasion`` for a novel of this package, or else what
            ``datasets.load_dataset`` takes: a name on the Hub or a folder of parquet or jsonl files.
        text_field: The field holding the text, for ``.jsonl`` and datasets.
        split: The split of a dataset; ``test[:50]`` works too.
        config_name: The configuration of a dataset, for those that have several.

    Returns:
        The documents that hold more than blanks, in the order of the source. Their lines end with a line feed, however
        they did in the source, and a byte order mark is left out.

    Raises:
        FileNotFoundError: ``source`` looks like a path and there is nothing.
        ValueError: No text in it, no such field, not UTF-8, a damaged .xz or .gz file, or no such dataset.
    """
    documents = [text for text in _read(str(source), text_field, split, config_name) if text.strip()]
    if not documents:
        raise ValueError(f"{str(source)!r} holds no text. Give {_FORMS}.")
    return documents


@dataclass(frozen=True)
class DocumentStream:
    """Documents of any source that ``read_documents`` takes, read as they are asked for; each loop begins anew.

    A dataset is streamed: nothing is downloaded beyond what is read. Of a folder one file is held at a time.

    Attributes:
        source, text_field, split, config_name: As for ``read_documents``; only whole splits can be streamed.

    Raises:
        ValueError, FileNotFoundError: As ``read_documents``, when they are read.
    """

    source: str | Path
    text_field: str = "text"
    split: str = "train"
    config_name: str | None = None

    def __iter__(self) -> Iterator[str]:
        texts = _read(str(self.source), self.text_field, self.split, self.config_name, streaming=True)
        return (text for text in texts if text.strip())


def tokenize_documents(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> list[torch.Tensor]:
    """Turn each document into all of its token ids, int64 ``(num_tokens,)``.

    Never truncated, whatever the tokenizer's ``model_max_length``, and no warning about length; no special tokens
    are added, so that a BOS is there only where the caller puts one.
    """
    return [
        torch.tensor(
            tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"], dtype=torch.int64
        )
        for text in documents
    ]


def _read(
    source: str, text_field: str, split: str, config_name: str | None, *, streaming: bool = False
) -> Iterable[str]:
    if source == "-":
        return [_with_plain_line_ends(sys.stdin.read())]
    if source.startswith(_NOVEL):
        from hf_posenc.assets import load_novel

        return [load_novel(source.removeprefix(_NOVEL))]
    path = Path(source).expanduser()
    if path.is_file() and path.suffix != ".parquet":
        return _read_jsonl(path, text_field) if _kind(path) == ".jsonl" else [_read_text(path)]
    if path.is_dir() and (files := _text_files(path)):
        return (_read_text(file) for file in files)
    if not path.exists() and (_kind(path) in (*TEXT_SUFFIXES, ".jsonl", ".parquet") or source[:1] in "./~"):
        raise FileNotFoundError(f"there is no file or folder {source!r}. Give {_FORMS}.")
    return _read_dataset(path if path.exists() else source, text_field, split, config_name, streaming)


def _text_files(folder: Path) -> list[Path]:
    """Return a folder's text files, sorted; a folder may be named ``notes.txt`` too."""
    return [path for path in sorted(folder.rglob("*")) if _kind(path) in TEXT_SUFFIXES and path.is_file()]


def _kind(path: Path) -> str:
    """Return the suffix that says what is in the file, below any compression: ``.txt`` for ``a.txt.xz``."""
    return Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix


def _read_text(path: Path) -> str:
    try:
        content = _OPENERS.get(path.suffix, bytes)(path.read_bytes())
        return _with_plain_line_ends(content.decode("utf-8-sig"))
    except _DAMAGED as error:
        raise ValueError(f"{str(path)!r} is damaged or no {path.suffix} file ({error}). Get it again.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 text ({error}). Convert it, or give {_FORMS}.") from error


def _with_plain_line_ends(text: str) -> str:
    """Return a text whose lines end as models were trained on them: Windows' and old Macs' ends cost it dearly."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_jsonl(path: Path, text_field: str) -> Iterable[str]:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} of {str(path)!r} is not JSON: {error}") from error
            yield _text_of(row, text_field, f"line {number} of {str(path)!r}")


def _read_dataset(
    source: str | Path, text_field: str, split: str, config_name: str | None, streaming: bool
) -> Iterator[str]:
    import datasets

    try:
        if isinstance(source, Path) and source.is_file():
            rows: Any = datasets.load_dataset("parquet", data_files=str(source), split=split, streaming=streaming)
        else:
            rows = datasets.load_dataset(str(source), config_name, split=split, streaming=streaming)
        rows = iter(rows)
    except Exception as error:  # whatever the hub, the network and the file formats raise
        raise _unreadable(source, error) from error
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # a stream goes on reading
            raise _unreadable(source, error) from error
        yield _text_of(row, text_field, f"dataset {str(source)!r}")


def _unreadable(source: str | Path, error: Exception) -> ValueError:
    return ValueError(f"{str(source)!r} cannot be read as a dataset: {error}. Give {_FORMS}.")


def _text_of(row: Any, text_field: str, where: str) -> str:
    text = row.get(text_field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        fields = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no text in field {text_field!r}; it has: {fields}. Name it with text_field=.")
    return _with_plain_line_ends(text)
