"""Pages of the reference that are made from the package: methods, commands and model families."""

from __future__ import annotations

from collections.abc import Callable


def methods_page() -> str:
    """Return the page of all methods, from the registry."""
    return "# Methods\n"


def command_line_page() -> str:
    """Return the page of all commands, from their parsers."""
    return "# Command line\n"


def families_page() -> str:
    """Return the page of all model types."""
    return "# Model families\n"


PAGES: dict[str, Callable[[], str]] = {
    "reference/methods.md": methods_page,
    "reference/command-line.md": command_line_page,
    "reference/model-families.md": families_page,
}
