"""The origin of the model and the documents of a run, as far as a model card may state it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, metadata_load, try_to_load_from_cache

from hf_posenc.checkpoint.manifest import CONFIG, MANIFEST
from hf_posenc.data.reading import NOVEL, DocumentStream
from hf_posenc.utils.files import read_json
from hf_posenc.utils.hub import is_repo_id

_CARD = "README.md"
_GENERATIONS = 8  # of folders that name the one they were made from
_WAIT = 5.0  # seconds for the Hub to answer
_LICENSE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class BaseModel:
    """The known facts of the model that was extended.

    Attributes:
        name: For people: on the Hub, else of its folder; empty for one that was made in the program.
        hub_id: Its name on the Hub, or that of the nearest model it was made from; None where nothing says it.
        is_exact: ``hub_id`` is the model itself.
        card: Fields of the metadata of its card, or of the nearest one that has them: ``license``, ``license_name``,
            ``license_link``, ``language`` and ``pipeline_tag``.
    """

    name: str = ""
    hub_id: str | None = None
    is_exact: bool = False
    card: dict[str, Any] = field(default_factory=dict)


def find_base_model(source: str) -> BaseModel:
    """Find out what a card may say of a model; no path of this machine is part of it.

    Of a folder its manifest, its config and its card are read, and so are the models that these name. Of the Hub one
    file is requested, the card of a model that was loaded from there, and not waited for.

    Args:
        source: Name on the Hub or path, as ``config.name_or_path`` has it; empty if there is none.
    """
    if not is_hub_id(source) and _folder(source) is None:  # a model made in the program, or a folder that is gone
        return BaseModel(_last_part(source))
    first, seen = source, list[str]()
    hub_id, card = None, dict[str, Any]()
    while source and source not in seen and len(seen) < _GENERATIONS:
        seen.append(source)
        folder = _folder(source)
        hub_id = source if folder is None else _id_of_snapshot(folder)
        found = _read_card(folder, hub_id, may_ask=source == first)
        card |= _facts(found, hub_id, without=card.keys())
        made_from = [] if folder is None or hub_id is not None else _made_from(folder, found)
        source = next((name for name in made_from if is_hub_id(name) or _folder(name) is not None), "")
    is_exact = hub_id is not None and len(seen) == 1
    return BaseModel(hub_id if is_exact and hub_id is not None else _last_part(first), hub_id, is_exact, card)


def is_hub_id(name: str) -> bool:
    """Return whether a model's name is one on the Hub: one loaded before, or OWNER/NAME and no folder OWNER here.

    With such a folder it may as well be the path of a model that is gone.
    """
    if not is_repo_id(name) or Path(name).exists():
        return False
    if isinstance(try_to_load_from_cache(name, CONFIG), str):
        return True
    return "/" in name and not Path(name).parent.exists()


def _folder(source: str) -> Path | None:
    """Return the folder that a model is in; None for a name on the Hub, and for no name."""
    path = Path(source).expanduser()
    if not source or not path.exists():
        return None
    return path if path.is_dir() else path.parent


def _last_part(source: str) -> str:
    path = Path(source).expanduser()
    return path.stem if path.is_file() else path.resolve().name if source else ""


def _id_of_snapshot(folder: Path) -> str | None:
    """Return the name on the Hub of a folder in its cache, which is ``.../models--OWNER--NAME/snapshots/COMMIT``."""
    cached = next((part for part in folder.absolute().parts if part.startswith("models--")), None)
    name = cached.removeprefix("models--").replace("--", "/") if cached else ""
    return name if is_repo_id(name) else None


def _made_from(folder: Path, card: dict[str, Any]) -> list[str]:
    """Return the origin that a folder states: by our manifest, its config, its card."""
    said: list[Any] = []
    for file, key in ((MANIFEST, "base_model"), (CONFIG, "_name_or_path")):
        try:
            said.append(read_json(folder / file).get(key))
        except (OSError, ValueError):  # no such file, or it is damaged
            continue
    bases = card.get("base_model")
    said += bases if isinstance(bases, list) and len(bases) == 1 else [bases]  # a merge has several
    return [name for name in said if isinstance(name, str) and name]


def _read_card(folder: Path | None, hub_id: str | None, *, may_ask: bool) -> dict[str, Any]:
    """Return the metadata of a model's card; none where it has no card, or one that cannot be read."""
    path = None if folder is None else folder / _CARD
    if (path is None or not path.is_file()) and hub_id is not None:
        try:
            path = Path(hf_hub_download(hub_id, _CARD, etag_timeout=_WAIT, local_files_only=not may_ask))
        except Exception:  # whatever the Hub and the network raise
            return {}
    if path is None or not path.is_file():
        return {}
    try:
        return metadata_load(path) or {}
    except Exception:  # it is not UTF-8, or its YAML is broken, for which the parser has errors of its own
        return {}


def _facts(card: dict[str, Any], hub_id: str | None, without: Container[str]) -> dict[str, Any]:
    """Return the facts of a card that hold for models made from it too; a licence with its link."""
    kept = {key: card[key] for key in ("language", "pipeline_tag") if card.get(key) and key not in without}
    if not isinstance(card.get("license"), str) or "license" in without:
        return kept
    kept |= {key: card[key] for key in _LICENSE if isinstance(card.get(key), str)}
    link = kept.get("license_link")
    if link is not None and "://" not in link:  # a file of that repository
        del kept["license_link"]
        if hub_id is not None:
            kept["license_link"] = f"https://huggingface.co/{hub_id}/blob/main/{link}"
    return kept


@dataclass(frozen=True)
class DocumentSource:
    """The origin of documents.

    Attributes:
        words: For people, without the path of a file.
        hub_id: Name of a dataset on the Hub; None for anything else.
        config_name, split: Config and split of that dataset.
    """

    words: str
    hub_id: str | None = None
    config_name: str | None = None
    split: str | None = None


def source_settings(documents: Any) -> dict[str, Any]:
    """Return where documents come from, by the names of ``DocumentStream``'s fields; nothing if they do not say."""
    if not isinstance(documents, DocumentStream):
        return {}
    facts = {"documents": str(documents.source), "text_field": documents.text_field, "split": documents.split}
    return {**facts, "config_name": documents.config_name, "template": documents.template}


def document_source(settings: Mapping[str, Any]) -> DocumentSource:
    """Return the source that was named, by the names of ``DocumentStream``'s fields.

    Args:
        settings: ``documents``, a source of ``DocumentStream``, with ``split`` and ``config_name``.
    """
    name = str(settings.get("documents") or "")
    if not name:
        return DocumentSource("texts given in Python, which have no name")
    if name == "-":
        return DocumentSource("a text from standard input")
    if name.startswith(NOVEL):
        return DocumentSource(f"the novel `{name.removeprefix(NOVEL)}`, which is part of hf_posenc")
    path = Path(name).expanduser()
    if path.exists() or not is_repo_id(name):
        source_words = "the folder" if path.is_dir() else "the file"
        return DocumentSource(f"{source_words} `{path.resolve().name}`")
    config_name, split = settings.get("config_name"), settings.get("split")
    more = "".join(f", {part} `{value}`" for part, value in (("configuration", config_name), ("split", split)) if value)
    link = f"[`{name}`](https://huggingface.co/datasets/{name})"
    return DocumentSource(f"the dataset {link}{more}", name, config_name, split)
