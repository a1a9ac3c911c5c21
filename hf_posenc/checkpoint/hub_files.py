"""Single files of a checkpoint, in a folder here or on the Hugging Face Hub under a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_posenc.errors import InvalidRequestError

_HUB_SECONDS = 5.0  # that the Hub may take to answer at all
_WHERE = ("revision", "token", "cache_dir", "subfolder", "local_files_only")
_NO_ERRORS_FOR = ("missing_entries", "connection_errors", "gated_repo")


def folder_with(source: str | Path, names: Sequence[str], kwargs: Mapping[str, Any] | None = None) -> Path | None:
    """Return the folder that holds files of a checkpoint; those of one on the Hub are downloaded to the cache.

    Args:
        source: A folder, or a name on the Hub.
        names: The files. Missing ones are no error.
        kwargs: ``from_pretrained``'s; ``revision``, ``token``, ``cache_dir``, ``subfolder`` and ``local_files_only``
            are read.

    Returns:
        The folder; None if it has none of the files, or if there is no such folder and no such name.
    """
    where = {key: kwargs[key] for key in _WHERE if kwargs.get(key)} if kwargs else {}
    local = Path(source).expanduser()
    if local.exists():
        folder = local / where.get("subfolder", "")
        return folder if any((folder / name).is_file() for name in names) else None
    from transformers.utils.hub import cached_files

    quietly: Any = {f"_raise_exceptions_for_{what}": False for what in _NO_ERRORS_FOR}
    try:
        found = cached_files(str(source), list(names), **where, **quietly)
    except (OSError, ValueError):  # no name on the Hub
        return None
    return Path(found[0]).parent if found else None


def check_hub(name: str) -> None:
    """See that the Hub can be reached for a model that is not on this machine, before anything asks for many files.

    Raises:
        ValueError: It cannot, and the model's config was not downloaded before.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if hub.constants.HF_HUB_OFFLINE or isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"), timeout=_HUB_SECONDS)
    except (HfHubHTTPError, HFValidationError):
        return  # it answered, or the name is none: what loads the model says what is wrong
    except Exception as error:  # of whichever library the Hub's client speaks HTTP with
        raise InvalidRequestError(
            f"{name!r} is no file or folder here, and the Hugging Face Hub cannot be reached to look for it "
            f"({str(error).strip() or type(error).__name__}). Give a folder with config.json and *.safetensors, or a "
            ".gguf file."
        ) from error
