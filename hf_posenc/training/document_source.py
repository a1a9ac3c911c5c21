"""Where the documents of a run came from, as far as a model card may say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc.data.reading import NOVEL, DocumentStream
from hf_posenc.training.base_model import is_repo_id


@dataclass(frozen=True)
class DocumentSource:
    """Where documents came from.

    Attributes:
        words: For people, without the path of a file.
        hub_id: Name of a dataset on the Hub; None for anything else.
        config_name, split: Of that dataset.
    """

    words: str
    hub_id: str | None = None
    config_name: str | None = None
    split: str | None = None


def said_of(documents: Any) -> dict[str, Any]:
    """Return where documents come from, by the names of ``read_documents``' arguments; nothing if they do not say."""
    if not isinstance(documents, DocumentStream):
        return {}
    said = {"documents": str(documents.source), "text_field": documents.text_field, "split": documents.split}
    return {**said, "config_name": documents.config_name, "template": documents.template}


def document_source(told: Mapping[str, Any]) -> DocumentSource:
    """Return the source that was named, by the names of ``read_documents``' arguments.

    Args:
        told: ``documents``, what ``read_documents`` takes as its source, with ``split`` and ``config_name``.
    """
    name = str(told.get("documents") or "")
    if not name:
        return DocumentSource("texts given in Python, which have no name")
    if name == "-":
        return DocumentSource("a text from standard input")
    if name.startswith(NOVEL):
        return DocumentSource(f"the novel `{name.removeprefix(NOVEL)}`, which is part of hf_posenc")
    path = Path(name).expanduser()
    if path.exists() or not is_repo_id(name):
        kind = "the folder" if path.is_dir() else "the file"
        return DocumentSource(f"{kind} `{path.resolve().name}`")
    config_name, split = told.get("config_name"), told.get("split")
    more = "".join(f", {kind} `{value}`" for kind, value in (("configuration", config_name), ("split", split)) if value)
    link = f"[`{name}`](https://huggingface.co/datasets/{name})"
    return DocumentSource(f"the dataset {link}{more}", name, config_name, split)
