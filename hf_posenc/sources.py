"""The texts that ``--documents`` and its companions name, read all at once or as a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_posenc.arguments import DocumentArguments


def read(source: DocumentArguments) -> list[str]:
    """Return all texts.

    Raises:
        OSError, ValueError: There are none, or they cannot be read.
    """
    from hf_posenc.data import read_documents

    return read_documents(_named(source), **_of_dataset(source))


def stream(source: DocumentArguments) -> Iterable[str]:
    """Return the texts one by one, each read when it is asked for.

    Raises:
        OSError, ValueError: As for ``read``.
    """
    from hf_posenc.data import DocumentStream

    texts = DocumentStream(_named(source), **_of_dataset(source))
    if next(iter(texts), None) is None:  # now, not when the model is there
        raise ValueError(f"{source.documents!r} holds no text.")
    return texts


def _named(source: DocumentArguments) -> str:
    if not source.documents:
        raise ValueError("the following arguments are required: --documents")
    return source.documents


def _of_dataset(source: DocumentArguments) -> dict[str, Any]:
    return {name: getattr(source, name) for name in ("text_field", "split", "config_name")}
