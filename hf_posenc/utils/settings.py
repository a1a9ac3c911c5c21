"""Settings that are declared once, as fields of a dataclass, and used by others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, field, fields
from typing import Any

from hf_posenc.errors import InvalidRequestError


def same_field(kind: Any, name: str, **changes: Any) -> Any:
    """Return a dataclass field with the default and the metadata of another dataclass' field.

    Args:
        kind: The dataclass that declares it.
        name: Of the field there.
        **changes: What differs here: ``default``, or entries of the metadata such as ``help``.
    """
    (found,) = (one for one in fields(kind) if one.name == name)
    given: dict[str, Any] = {"metadata": {**found.metadata, **changes}}
    if "default" in changes:
        given["default"] = given["metadata"].pop("default")
    elif found.default_factory is not MISSING:
        given["default_factory"] = found.default_factory
    elif found.default is not MISSING:
        given["default"] = found.default
    return field(**given)


def refuse_given(settings: Any, usual: Any, names: Sequence[str], why: str) -> None:
    """Raise if one of the named flags has another value than the usual one.

    Raises:
        ValueError: It has; ``why`` is what the message says after the flag.
    """
    for name in names:
        if getattr(settings, name) != getattr(usual, name):
            raise InvalidRequestError(f"--{name.replace('_', '-')} {why}.")
