"""Settings that are declared once, as fields of a dataclass, and used by others."""

from __future__ import annotations

from dataclasses import MISSING, field, fields
from typing import Any


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
