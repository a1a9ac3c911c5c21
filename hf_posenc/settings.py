"""Settings that are declared once, as fields of a dataclass, and used by others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields
from enum import Enum
from typing import Any

from hf_posenc.errors import InvalidRequestError, InvalidTypeError, UnknownNameError, argument
from hf_posenc.spec import check_number


def same_field(kind: Any, name: str, **changes: Any) -> Any:
    """Return a dataclass field with the default and the metadata of another dataclass' field.

    Args:
        kind: The dataclass that declares it.
        name: Name of the field there.
        **changes: What differs here: ``default``, or entries of the metadata such as ``help``.
    """
    (found,) = (one for one in fields(kind) if one.name == name)
    metadata = {**found.metadata, **changes}
    given: dict[str, Any] = {"metadata": _Metadata(metadata, check=found.metadata.get("check"))}
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


Check = Callable[[str, Any], Any]


class _Metadata(dict[str, Any]):
    """The metadata of a field, without the key "check" when it is copied: HfArgumentParser passes all to argparse."""

    def keys(self) -> Any:
        return self.copy().keys()

    def copy(self) -> dict[str, Any]:
        return {key: value for key, value in self.items() if key != "check"}


def setting(default: Any, check: Check | None, help: str, **metadata: Any) -> Any:
    """Return a dataclass field with its default, its check and its help text.

    Args:
        default: A value, or a class such as ``dict`` that makes one.
        check: It takes the argument's name and its value, and returns the value that is kept or raises an error; None
            accepts every value. A default of None is always accepted.
        help: The text of ``--help``.
        **metadata: Other keywords of argparse, such as ``nargs``.
    """
    made = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return field(**made, metadata=_Metadata(help=help, check=check, **metadata))


def check_settings(config: Any, named: Callable[[str], str] = argument) -> None:
    """Check every field of a dataclass that has a check, and keep what the checks return.

    Args:
        config: The dataclass; it may be frozen.
        named: Gives the name of a field in messages.

    Raises:
        ValueError, TypeError: A value is out of range or of the wrong type.
    """
    for each in fields(config):
        check, value = each.metadata.get("check"), getattr(config, each.name)
        if check is not None and not (value is None and each.default is None):
            object.__setattr__(config, each.name, check(named(each.name), value))


def whole(least: int) -> Check:
    """Return the check of a whole number of at least ``least``; a float that is whole becomes an int."""

    def check(name: str, value: Any) -> int:
        is_whole = isinstance(value, float) and value.is_integer()  # integers of NumPy have an index, as ints do
        if isinstance(value, bool) or not (is_whole or hasattr(value, "__index__")) or value < least:
            raise InvalidRequestError(f"{name} must be a whole number >= {least}, got {value!r}.")
        return int(value)

    return check


def optional(check: Check) -> Check:
    """Return a check that accepts None too."""
    return lambda name, value: None if value is None else check(name, value)


def number(**limits: Any) -> Check:
    """Return the check of a number; the limits are those of ``check_number``."""
    return lambda name, value: check_number(name, value, **limits)


def share(name: str, value: Any) -> float:
    """Check a number from 0 to 1."""
    checked = check_number(name, value, at_least=0)
    if checked > 1:
        raise InvalidRequestError(f"{name} must be a share between 0 and 1, got {checked}.")
    return checked


def flag(name: str, value: Any) -> bool:
    """Check True or False."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be True or False, got {value!r}.")
    return value


def word(*allowed: str) -> Check:
    """Return the check of one of several words; a member of an enumeration is its value."""

    def check(name: str, value: Any) -> Any:
        text = value.value if isinstance(value, Enum) else value
        if text not in allowed:
            raise UnknownNameError(name, text, allowed)
        return text

    return check


def tokens(kind: type[int], least: int = 1) -> Check:
    """Return the check of a number of tokens, which may be written as ``16k``."""

    def check(name: str, value: Any) -> int:
        try:
            number = kind(value)
        except TypeError as error:
            raise InvalidTypeError(f"{name}: {error}") from None
        except (ValueError, OverflowError) as error:
            raise InvalidRequestError(f"{name}: {error}") from None
        if number != value and not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be a whole number of tokens, got {value!r}.")
        if number < least:
            raise InvalidRequestError(f"{name} must be at least {least} token{'s' * (least > 1)}, got {value!r}.")
        return number

    return check
