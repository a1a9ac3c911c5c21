"""The texts that ``--documents`` and its companions name, read all at once or as a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_posenc.cli.shared_arguments import DocumentArguments
from hf_posenc.errors import InvalidRequestError

if TYPE_CHECKING:
    from hf_posenc.data.columns import Document
    from hf_posenc.data.reading import DocumentStream


def read(source: DocumentArguments) -> list[str]:
    """Return all texts.

    Raises:
        OSError, ValueError: There are none, they are chats, or they cannot be read.
    """
    from hf_posenc.data.reading import read_documents

    return read_documents(_named(source), **_of_dataset(source))


def read_examples(source: DocumentArguments) -> list[Document]:
    """Return all texts, chats, and prompts with answers.

    Raises:
        OSError, ValueError: There are none, or they cannot be read.
    """
    from hf_posenc.data.reading import DocumentStream

    return DocumentStream(_named(source), **_of_dataset(source), whole=True).all()


def stream(source: DocumentArguments) -> DocumentStream:
    """Return what reads them one by one, each when it is asked for.

    Raises:
        OSError, ValueError: As for ``read_examples``.
    """
    from hf_posenc.data.reading import DocumentStream

    examples = DocumentStream(_named(source), **_of_dataset(source))
    if next(iter(examples), None) is None:  # now, not when the model is there
        raise InvalidRequestError(f"{source.documents!r} holds no text.")
    return examples


def _named(source: DocumentArguments) -> str:
    if not source.documents:
        raise InvalidRequestError("the following arguments are required: --documents")
    return source.documents


def _of_dataset(source: DocumentArguments) -> dict[str, Any]:
    told = {name: getattr(source, name) for name in ("text_field", "template", "split", "config_name")}
    if source.template is not None:
        told["template"] = source.template.replace("\\n", "\n")  # which a shell leaves as two characters
    return told
